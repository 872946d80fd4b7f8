"""A small OpenAI endpoint for replays, and a line of a trace for it."""

import asyncio
import json
import threading
from typing import Any

from aiohttp import web


class Endpoint:
    """A small OpenAI endpoint on a thread of its own; owned by the test that started it."""

    def __init__(self) -> None:
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.answered = 0
        self.chunks: list[dict[str, Any]] = [
            {"choices": [{"text": "hi"}]},
            {"choices": [{"delta": {"content": "you"}}]},
        ]
        self.usage: dict[str, Any] = {"prompt_tokens": 100, "completion_tokens": 2}
        self.usage["prompt_tokens_details"] = {"cached_tokens": 40}
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))
        self._stop = asyncio.Event()

    def __enter__(self) -> "Endpoint":
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        self._loop.close()

    async def _run(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_post("/v1/completions", self._answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append((request.path, body))
        if body.get("max_tokens") == 13:
            return web.json_response({"error": {"message": "</script>"}}, status=500)
        response = web.StreamResponse(headers={"x-prefixfleet-node": "a"})
        await response.prepare(request)
        for chunk in [*self.chunks, {"choices": [], "usage": self.usage}]:
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        if body.get("max_tokens") != 14:
            await response.write(b"data: [DONE]\n\n")
        self.answered += 1
        return response


def line(at_ms: int, output: int = 2) -> str:
    return json.dumps(
        {"timestamp": at_ms, "input_length": 600, "output_length": output, "hash_ids": [0, at_ms]}
    )
