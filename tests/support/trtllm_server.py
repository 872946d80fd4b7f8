"""A TensorRT-LLM engine's events on a real HTTP server: POST /kv_cache_events, told once.

Written from the published source of 1.2: ``OpenAIServer.get_kv_cache_events`` (the route, the
array, the drain), ``KVCacheEventSerializer`` (fields) and ``kvCacheEventManager.cpp`` (numbers a
rank, the bounded buffer that drops the oldest, one ``created`` a window at the start). The newer
cache manager's differences: ``hash_algo``, ``layer_group_id``, hashes as text, ``cache_salt``.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Sequence
from typing import Any

from aiohttp import web
from upstreams import Asked, FakeEngine

Event = dict[str, Any]


class TrtllmServer:
    """One life of an engine at a time; ``restart`` begins another. Open with ``async with``.

    ``block_tokens`` tokens a block; block hashes are counted up over all lives. ``buffer`` events
    are kept until somebody polls. Set ``status`` or ``body`` and polls are answered with it; with
    ``held`` they wait.
    """

    def __init__(
        self,
        block_tokens: int = 16,
        buffer: int = 1_000,
        windows: Sequence[int] = (8_192,),
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.block_tokens = block_tokens
        self.windows = windows
        self._tls = tls
        self.names = 2**63  # hashes are unsigned
        self.polls = 0
        self.status = 200
        self.body = b""
        self.held: asyncio.Event | None = None
        self._waiting: deque[Event] = deque(maxlen=buffer)
        self._numbers: dict[int | None, int] = {}
        self._port = 0
        self.restart()

    async def __aenter__(self) -> "TrtllmServer":
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.vanish()

    async def listen(self) -> None:
        """Answer polls; on the port of before, if there was one."""
        app = web.Application()
        app.router.add_post("/kv_cache_events", self._drain)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True
        )
        await self._runner.setup()
        await web.TCPSite(
            self._runner, "127.0.0.1", self._port, reuse_address=True, ssl_context=self._tls
        ).start()
        self._port = self._runner.addresses[0][1]
        self.events = f"http{'s' if self._tls else ''}://127.0.0.1:{self._port}"

    async def vanish(self) -> None:
        """Nobody listens at the port any more."""
        await self._runner.cleanup()

    def restart(self) -> None:
        """Another life: numbers begin anew, nothing is held, what nobody polled is gone."""
        self._waiting.clear()
        self._numbers.clear()
        for window in self.windows:
            self.tell({"type": "created", "num_blocks_per_cache_level": [1_000, 0]}, window=window)

    def tell(
        self,
        data: Event,
        *,
        rank: int | None = None,
        window: int = 0,
        lost: bool = False,
        **more: Any,
    ) -> None:
        """One event; ``lost``: another poller takes it."""
        number = self._numbers.get(rank, 0)
        self._numbers[rank] = number + 1
        event = {"event_id": number, "data": data, "window_size": window or max(self.windows)}
        if rank is not None:
            event["attention_dp_rank"] = rank
        if not lost:
            self._waiting.append(event | more)

    def stored(
        self, token_ids: Sequence[int], parent: int | str | None = None, **block: Any
    ) -> Event:
        """The event's data of a prompt's blocks; the last one need not be full."""
        pieces = [
            token_ids[i : i + self.block_tokens]
            for i in range(0, len(token_ids), self.block_tokens)
        ]
        blocks = []
        for piece in pieces:
            tokens = [
                {"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in piece
            ]
            fields = {"type": "stored_block", "block_hash": self.names, "tokens": tokens}
            blocks.append(fields | {"cache_level": 0, "priority": 35} | block)
            self.names += 1
        return {"type": "stored", "parent_hash": parent, "blocks": blocks}

    async def _drain(self, request: web.Request) -> web.Response:
        self.polls += 1
        if self.held:
            await self.held.wait()
        if self.status != 200 or self.body:
            body, self.body = self.body, b""
            return web.Response(status=self.status, body=body, content_type="application/json")
        events = list(self._waiting)
        self._waiting.clear()
        return web.json_response(events)


def names_of(stored: Event) -> list[Any]:
    """The block hashes of a ``stored`` event's data."""
    return [block["block_hash"] for block in stored["blocks"]]


def removed(*names: Any) -> Event:
    """The event's data of blocks that are gone."""
    return {"type": "removed", "block_hashes": list(names)}


def moved(name: Any) -> Event:
    """A block that went from GPU to host memory, where it stays reusable."""
    diff = {"type": "event_diff", "new_value": 1, "old_value": 0}
    return {"type": "updated", "block_hash": name, "cache_level": diff, "priority": None}


async def counted(engine: FakeEngine, request: web.Request, asked: Asked) -> web.Response:
    """A behaviour of `FakeEngine`: a whole answer with the number of the prompt's tokens, as
    trtllm-serve gives it, which has no ``/tokenize``."""
    if "messages" in asked:
        text = engine.tokens.render(asked["messages"], asked.get("tools"))
        ids = engine.tokens.of_text(text, add_special_tokens=False)
    else:
        prompt = asked["prompt"]
        ids = engine.tokens.of_text(prompt) if isinstance(prompt, str) else prompt
    usage = {"prompt_tokens": len(ids), "completion_tokens": 1, "total_tokens": len(ids) + 1}
    return web.json_response({"choices": [{"index": 0, "text": engine.name}], "usage": usage})
