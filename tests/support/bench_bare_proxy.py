"""The barest proxy that Python can be on our event loop: the floor of what a router costs.

``python bench_bare_proxy.py PORT URL...`` passes bytes on as they are, round robin, in callbacks of
protocols alone: no task, no header looked at but the length, no decision, nothing counted.
"""

import asyncio
import itertools
import sys
from collections import deque
from typing import cast
from urllib.parse import urlsplit

import uvloop


class _Engine(asyncio.Protocol):
    """A connection to an engine; one request at a time."""

    def __init__(self, idle: deque["_Engine"]) -> None:
        self._idle = idle
        self.transport: asyncio.Transport
        self.client: asyncio.Transport | None = None
        self._left = 0  # bytes of the answer; below 0: it is chunked

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own class

    def data_received(self, data: bytes) -> None:
        if not self._left:
            end = data.find(b"\r\n\r\n") + 4
            length = _length_of(data[:end])
            self._left = end + length if length >= 0 else -1
        if self.client is not None:
            self.client.write(data)
        done = data.endswith(b"0\r\n\r\n") if self._left < 0 else len(data) >= self._left
        self._left = 0 if done else self._left if self._left < 0 else self._left - len(data)
        if done:
            self.client = None
            self._idle.append(self)


class _Client(asyncio.Protocol):
    """A client's connection. ``pools`` are the idle connections to each engine, with its URL."""

    def __init__(self, turns: "itertools.cycle[tuple[str, deque[_Engine]]]") -> None:
        self._turns = turns
        self._heard = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._heard += data
        end = self._heard.find(b"\r\n\r\n") + 4
        if end < 4 or len(self._heard) < end + max(0, _length_of(self._heard[:end])):
            return
        request, self._heard = self._heard, b""
        if request.startswith(b"GET /health"):
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            return
        url, idle = next(self._turns)
        if idle:
            self._ask(idle.pop(), request)
        else:
            asyncio.get_running_loop().create_task(self._connect(url, idle, request))

    async def _connect(self, url: str, idle: deque[_Engine], request: bytes) -> None:
        parts = urlsplit(url)
        assert parts.hostname
        assert parts.port
        _, engine = await asyncio.get_running_loop().create_connection(
            lambda: _Engine(idle), parts.hostname, parts.port
        )
        self._ask(engine, request)

    def _ask(self, engine: _Engine, request: bytes) -> None:
        engine.client = self._transport
        engine.transport.write(request)


def _length_of(head: bytes) -> int:
    at = head.lower().find(b"content-length:")
    return int(head[at + 15 : head.find(b"\r\n", at)]) if at >= 0 else -1


async def _main(port: int, urls: list[str]) -> None:
    turns = itertools.cycle([(url, deque[_Engine]()) for url in urls])
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Client(turns), "127.0.0.1", port, backlog=4_096)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_main(int(sys.argv[1]), sys.argv[2:]))
