"""A fast engine of a chaos run, as a process: the OpenAI face of `upstreams.FakeEngine`, and behind
it the real engine channel and the real shared-memory pool, used as the connector uses them.

Usage: engine.py NAME NODE SOCKET MODEL_FOLDER REDIS_URL FLEET PORT ADVERTISED_URL
"""

import asyncio
import contextlib
import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import msgspec
from aiohttp import web
from chaos_model import LAYOUT, answer_of, chain_of
from engine_cache import Cache
from upstreams import READERS, Behaviour, FakeEngine

from prefixfleet.router.body import read_body
from prefixfleet.store.errors import IndexUnavailable
from prefixfleet.store.registry import WorkerRegistry

TTL_S = 3.0
TOKEN_TEXT, TOKEN_S = 8, 0.04  # letters of a token, and seconds between two


async def stream_slowly(request: web.Request, text: str) -> web.StreamResponse:
    """The answer as it is generated: a fault finds it half said."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for start in range(0, len(text), TOKEN_TEXT):
        part = {"choices": [{"index": 0, "text": text[start : start + TOKEN_TEXT]}]}
        await response.write(b"data: " + msgspec.json.encode(part) + b"\n\n")
        await asyncio.sleep(TOKEN_S)
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def answering(cache: Cache) -> Behaviour:
    async def behave(
        engine: FakeEngine, request: web.Request, asked: dict[str, Any]
    ) -> web.StreamResponse:
        for kept in (engine.seen, engine.seen_headers, engine.raw, engine.paths):
            kept.clear()  # nobody reads them here, and a soak is long
        read = READERS[request.path]
        ids = list(read(read_body(msgspec.json.encode(asked)), engine.tokens).token_ids)
        chain = chain_of(ids)
        plan = (asked.get("kv_transfer_params") or {}).get("prefixfleet")
        name = plan["request"] if plan else request.headers["X-Request-Id"]
        async with cache.prefilled(name, chain, plan) as (kv, outcome):
            text = answer_of(kv, ids)
            if asked.get("stream"):
                return await stream_slowly(request, text)
        return web.json_response(
            {
                "id": "x",
                "model": engine.model,
                "choices": [{"index": 0, "text": text}],
                "usage": {"prompt_tokens": len(ids), "completion_tokens": 1},
                "kv_transfer_params": {"prefixfleet": asdict(outcome)},
            }
        )

    return behave


async def main(
    name: str, node: str, socket: str, model: str, redis: str, fleet: str, port: str, url: str
) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    engine = FakeEngine(name, Path(model), node=node)
    cache = Cache(Path(socket), name)
    engine.behave = answering(cache)
    registry = WorkerRegistry(redis, fleet)
    try:
        async with engine.running(int(port)):
            record = replace(engine.record(), url=url, block_bytes=LAYOUT.slot_bytes)
            while not stop.is_set():
                with contextlib.suppress(IndexUnavailable):
                    await registry.announce(record, ttl_s=TTL_S)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), 1.0)
            with contextlib.suppress(IndexUnavailable):
                await registry.withdraw(name)
    finally:
        await registry.close()
        cache.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
