"""The admin API: which workers get requests. With a key of its own, apart from clients' keys.

GET    /admin/workers                  every worker, its state and what it has in flight
POST   /admin/workers                  add a plain engine; the body is an entry of the workers file
POST   /admin/workers/{name}/drain     no new requests; those in flight end by themselves
POST   /admin/workers/{name}/resume    requests again
POST   /admin/workers/{name}/flush     drop the engine's own prefix cache
DELETE /admin/workers/{name}           take it out; an added one for good, others until `resume`
POST   /admin/pins                     keep a prompt's prefix on the nodes that hold it; see `pin`
DELETE /admin/pins                     the same body: no longer
"""

from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from prefixfleet.router.admin_pins import pin
from prefixfleet.router.core import Router
from prefixfleet.router.errors import (
    JSON,
    BadRequest,
    Conflict,
    NotFound,
    NotOffered,
    OrdersUnavailable,
    UpstreamFailed,
)
from prefixfleet.router.orders import Order
from prefixfleet.router.pages import ROUTER
from prefixfleet.router.seat import Standing
from prefixfleet.router.static_workers import StaticWorker
from prefixfleet.store.errors import IndexUnavailable

FLUSH_PATHS = ("/reset_prefix_cache", "/flush_cache")  # vLLM (with its dev mode), SGLang
FLUSH_TIMEOUT = aiohttp.ClientTimeout(total=10)


def add_admin(app: web.Application) -> None:
    """Add the routes to ``app``."""
    admin = _Admin()
    app.router.add_get("/admin/workers", admin.workers)
    app.router.add_post("/admin/workers", admin.add)
    app.router.add_delete("/admin/workers/{name}", admin.remove)
    app.router.add_post("/admin/workers/{name}/drain", admin.drain)
    app.router.add_post("/admin/workers/{name}/resume", admin.resume)
    app.router.add_post("/admin/workers/{name}/flush", admin.flush)
    app.router.add_post("/admin/pins", admin.pin)
    app.router.add_delete("/admin/pins", admin.unpin)


class _Admin:
    async def workers(self, request: web.Request) -> web.Response:
        router = self._admit(request)
        return _json({"workers": [_described(router, s) for s in router.roster.standings()]})

    async def add(self, request: web.Request) -> web.Response:
        router = self._admit(request)
        try:
            entry = msgspec.json.decode(await request.read(), type=StaticWorker)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise BadRequest(f"the body is no entry of a worker: {error}") from None
        if any(s.record.worker == entry.name for s in router.roster.standings()):
            raise Conflict(f"there is a worker {entry.name!r} already; remove it first")
        await _order(router, entry.name, Order(entry=entry))
        return _json(_described(router, _standing(router, entry.name)), status=201)

    async def drain(self, request: web.Request) -> web.Response:
        return await self._change(request, "draining")

    async def resume(self, request: web.Request) -> web.Response:
        return await self._change(request, "ready")

    async def _change(self, request: web.Request, state: Any) -> web.Response:  # noqa: ANN401
        router = self._admit(request)
        name = request.match_info["name"]
        order = router.orders.of(name)
        if order.state != "removed":  # a removed one is in no list, and may come back
            _standing(router, name)
        await _order(router, name, Order(state=state, entry=order.entry))
        return _json(_described(router, _standing(router, name)))

    async def remove(self, request: web.Request) -> web.Response:
        router = self._admit(request)
        name = request.match_info["name"]
        _standing(router, name)
        added = router.orders.of(name).entry is not None
        await _order(router, name, Order() if added else Order(state="removed"))
        return _json({"worker": name, "removed": True})

    async def flush(self, request: web.Request) -> web.Response:
        router = self._admit(request)
        standing = _standing(router, request.match_info["name"])
        for path in FLUSH_PATHS:
            url = standing.record.url + path
            try:
                async with router.session.post(url, timeout=FLUSH_TIMEOUT) as response:
                    if response.status == 404:
                        continue
                    if response.status < 300:
                        return _json({"worker": standing.record.worker, "flushed": True})
                    raise UpstreamFailed(f"{url}: status {response.status}")
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                raise UpstreamFailed(f"{url}: {type(error).__name__}: {error}") from error
        raise NotOffered(
            "the engine has no route to flush its cache; vLLM offers it with VLLM_SERVER_DEV_MODE=1"
        )

    async def pin(self, request: web.Request) -> web.Response:
        router = self._admit(request)
        return _json(await pin(router, await request.read(), ends=False))

    async def unpin(self, request: web.Request) -> web.Response:
        router = self._admit(request)
        return _json(await pin(router, await request.read(), ends=True))

    def _admit(self, request: web.Request) -> Router:
        """The router, for who has the key. Raises `Forbidden`, `Unauthorized`."""
        router = request.app[ROUTER]
        router.files.admin_key.admit(request.headers.get("Authorization", ""))
        return router


async def _order(router: Router, name: str, order: Order) -> None:
    try:
        await router.orders.give(name, order)
    except IndexUnavailable as error:
        raise OrdersUnavailable(f"nothing was changed: {error}", retry_after_s=1.0) from error
    router.roster.look_again()


def _standing(router: Router, name: str) -> Standing:
    for standing in router.roster.standings():
        if standing.record.worker == name:
            return standing
    raise NotFound(f"there is no worker {name!r:.80}; GET /admin/workers lists them")


def _described(router: Router, standing: Standing) -> dict[str, Any]:
    record = standing.record
    load = router.book.load(record.worker)
    return {
        "worker": record.worker,
        "node": record.node,
        "url": record.url,
        "model": record.model,
        "state": standing.state,
        "reason": standing.reason,
        "ejected": router.traffic.is_ejected(record.worker),
        "in_flight": load.queued_requests + load.decoding,
    }


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type=JSON)
