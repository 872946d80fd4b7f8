"""The daemon's HTTP face: /health, /status, /metrics for people, /prefetch and /keep for routers.

Reads what the daemon knows and starts what a signed hint asks for; decides nothing.
"""

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from aiohttp import web

from prefixfleet.cluster.handover import HANDOVER_PATH, HandedOver, open_request
from prefixfleet.cluster.node_stats import render_metrics
from prefixfleet.store.errors import ConfigError, Overloaded, PeerRefused, ProtocolError
from prefixfleet.store.keep import KEEP_PATH, Keep, keep_key, open_keep
from prefixfleet.store.prefetch import (
    MAX_PREFETCH_BYTES,
    PREFETCH_PATH,
    SIGNATURE_HEADER,
    Prefetch,
    open_prefetch,
    prefetch_key,
)

SHUTDOWN_S = 2.0


class NodeHttp:
    """Owned by the daemon's event loop. ``status`` gives what the daemon knows; ``prefetch``
    starts a pull and raises `Overloaded` or `ProtocolError`; ``hand_over`` gives the last copies
    away within so many seconds; ``keep`` takes a wish, says what it covers, and raises
    `ProtocolError`. ``secret`` is the fleet's."""

    def __init__(
        self,
        *,
        secret: bytes,
        status: Callable[[], dict[str, Any]],
        prefetch: Callable[[Prefetch], None],
        hand_over: Callable[[float], Awaitable[HandedOver]],
        keep: Callable[[Keep], dict[str, int]],
    ) -> None:
        self._prefetch_key = prefetch_key(secret)
        self._keep_key = keep_key(secret)
        self._keep = keep
        self._status = status
        self._prefetch = prefetch
        self._hand_over = hand_over
        app = web.Application(client_max_size=MAX_PREFETCH_BYTES)
        app.router.add_get("/health", self._get_health)
        app.router.add_get("/status", self._get_status)
        app.router.add_get("/metrics", self._get_metrics)
        app.router.add_post(PREFETCH_PATH, self._post_prefetch)
        app.router.add_post(HANDOVER_PATH, self._post_handover)
        app.router.add_post(KEEP_PATH, self._post_keep)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S)

    async def open(self, host: str, port: int) -> str:
        """Listen; the base URL. Raises `ConfigError` if the address cannot be used."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(
                f"node's HTTP on {host}:{port}: {error.strerror}; set PREFIXFLEET_NODE_HOST and "
                "PREFIXFLEET_NODE_PORT (0 takes a free one)"
            ) from error
        bound = self._runner.addresses[0][1]
        return f"http://[{host}]:{bound}" if ":" in host else f"http://{host}:{bound}"

    async def close(self) -> None:
        """Stop listening."""
        await self._runner.cleanup()

    async def _get_health(self, _: web.Request) -> web.Response:
        degraded = self._status()["stats"]["degraded"]
        return web.json_response({"status": "degraded" if degraded else "ok", "degraded": degraded})

    async def _get_status(self, _: web.Request) -> web.Response:
        return web.json_response(self._status())

    async def _get_metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            body=render_metrics(self._status()["stats"]),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _post_prefetch(self, request: web.Request) -> web.Response:
        signature = request.headers.get(SIGNATURE_HEADER, "")
        try:
            self._prefetch(open_prefetch(await request.read(), signature, self._prefetch_key))
        except PeerRefused as error:
            return _refusal(403, error)
        except ProtocolError as error:
            return _refusal(400, error)
        except Overloaded as error:
            return _refusal(429, error)
        return web.json_response({}, status=202)

    async def _post_handover(self, request: web.Request) -> web.Response:
        signature = request.headers.get(SIGNATURE_HEADER, "")
        try:
            within_s = open_request(await request.read(), signature, self._prefetch_key)
        except PeerRefused as error:
            return _refusal(403, error)
        except ProtocolError as error:
            return _refusal(400, error)
        return web.json_response(asdict(await self._hand_over(within_s)))

    async def _post_keep(self, request: web.Request) -> web.Response:
        signature = request.headers.get(SIGNATURE_HEADER, "")
        try:
            covered = self._keep(open_keep(await request.read(), signature, self._keep_key))
        except PeerRefused as error:
            return _refusal(403, error)
        except ProtocolError as error:
            return _refusal(400, error)
        return web.json_response(covered)


def _refusal(status: int, error: Exception) -> web.Response:
    return web.json_response({"error": str(error)}, status=status)
