"""A server with vLLM's command line and HTTP face that answers in milliseconds: KV bytes come from
hashes (`chaos_model`), and behind it is the real engine channel with the real pool.

For fleets of several engines on few cores; started by the real worker, through PYTHONPATH.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[4]))

import msgspec
from aiohttp import web
from chaos_model import BLOCK_TOKENS, answer_of
from engine_cache import Cache

from prefixfleet.cluster.engine_client import Welcome
from prefixfleet.router.body import read_body
from prefixfleet.router.prompt import Prompt, prefix_chain, read_chat, read_completion
from prefixfleet.router.rendered import Rendered
from prefixfleet.router.tokens import load_tokens
from prefixfleet.store.records import PARAMS_KEY, Outcome

HELLO_S = 30.0
TOKEN_S = 0.04
METRICS = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0"}} {running}.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0"}} 0.0
"""


class FastEngine:
    """One engine. Owned by its event loop."""

    def __init__(self, options: argparse.Namespace) -> None:
        extra = json.loads(options.kv_transfer_config)["kv_connector_extra_config"]
        self._model = options.served_model_name
        self._tokens = load_tokens(options.model)
        self._cache = Cache(Path(extra["socket"]), extra["engine"])
        self._running = 0
        self._welcome: Welcome | None = None

    def app(self) -> web.Application:
        """Its routes, those of vLLM that a fleet uses."""
        app = web.Application(client_max_size=64 << 20, middlewares=[self._counted])
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._complete)
        app.on_cleanup.append(self._close)
        return app

    @web.middleware
    async def _counted(self, request: web.Request, handler: Any) -> web.StreamResponse:
        completes = request.path == "/v1/completions"
        self._running += completes
        try:
            response: web.StreamResponse = await handler(request)
        finally:
            self._running -= completes
        return response

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=METRICS.format(running=self._running))

    async def _close(self, _: web.Application) -> None:
        self._cache.close()

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = read_body(await request.read())
        read = read_completion if "prompt" in body.fields else read_chat
        prompt = read(body, self._tokens)
        if prompt.blind:
            return web.json_response({"error": {"message": prompt.blind}}, status=400)
        return web.json_response({"tokens": list(prompt.token_ids), "count": prompt.tokens})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        asked = msgspec.json.decode(raw)
        ids = list(read_completion(read_body(raw), self._tokens).token_ids)
        ids = ids[-asked.get("truncate_prompt_tokens", len(ids)) :]
        name, plan = self._named(request, asked)
        async with self._prefilled(name, ids, asked.get("cache_salt") or "", plan) as done:
            kv, outcome = done
            cached = (outcome.local_blocks + outcome.pulled_blocks) * BLOCK_TOKENS
            details = {"cached_tokens": min(cached, len(ids))}
            used = {"prompt_tokens": len(ids), "prompt_tokens_details": details}
            text = answer_of(kv, ids)
            params = {PARAMS_KEY: asdict(outcome)}
            if asked.get("stream"):
                last = {"kv_transfer_params": params, "usage": used}
                return await self._stream(request, text, asked.get("max_tokens", 16), last)
            choice = {"index": 0, "text": text, "finish_reason": "length"}
            body = {"id": "x", "model": self._model, "choices": [choice]}
            return web.json_response(body | {"usage": used, "kv_transfer_params": params})

    def _named(self, request: web.Request, asked: dict[str, Any]) -> tuple[str, Any]:
        plan = (asked.get("kv_transfer_params") or {}).get(PARAMS_KEY)
        return (plan["request"] if plan else request.headers.get("X-Request-Id", "x")), plan

    @asynccontextmanager
    async def _prefilled(
        self, name: str, ids: list[int], salt: str, plan: object
    ) -> AsyncIterator[tuple[list[bytes], Outcome]]:
        """The prompt's KV, loaded or computed, as long as the request lasts."""
        # without a daemon everything is computed, as with the connector; the keys stay the same
        self._welcome = (
            await asyncio.to_thread(self._cache.scheduler.settle, HELLO_S) or self._welcome
        )
        if (welcome := self._welcome) is None:
            raise web.HTTPServiceUnavailable(text="there never was a daemon")
        prompt = Prompt(rendered=Rendered(ids), tokens=len(ids), salt=salt)
        chain = prefix_chain(prompt, welcome.namespace_digest, BLOCK_TOKENS, welcome.hash_key)
        async with self._cache.prefilled(name, chain, plan) as done:
            yield done

    async def _stream(
        self, request: web.Request, text: str, count: int, last: dict[str, Any]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(count):
            event: dict[str, Any] = {
                "id": "x",
                "model": self._model,
                "choices": [{"index": 0, "text": text[:4]}],
            }
            if number == count - 1:
                event |= last
            await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")
            await asyncio.sleep(TOKEN_S)
        await response.write(b"data: [DONE]\n\n")
        return response


async def serve() -> web.Application:
    """The engine that the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    for name in ("--served-model-name", "--kv-transfer-config"):
        parser.add_argument(name, required=True)
    return FastEngine(parser.parse_known_args()[0]).app()


def main() -> None:
    """Serve until SIGTERM, as vLLM does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    listen = parser.parse_known_args()[0]
    web.run_app(
        serve(), host=listen.host, port=listen.port, reuse_address=True, print=None, access_log=None
    )


if __name__ == "__main__":
    main()
