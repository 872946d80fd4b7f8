"""Who asked, and how the answer gets there: what serving a request needs of HTTP, and no more."""

import asyncio
from collections.abc import Mapping
from typing import Protocol

from aiohttp import web

from prefixfleet.router.errors import TooSlow
from prefixfleet.router.headers import AnswerHeaders, worker_lines
from prefixfleet.router.inflate import body_too_large, inflate
from prefixfleet.router.upstream import Answer

ID, CALLED = web.RequestKey("id", str), web.RequestKey("called", str)  # see `Client`
WAITS = web.RequestKey("waits", bool)  # its client sends the body when it hears that it may
BODY_S = 60.0  # 32 MB at 4 Mbit/s


class Client(Protocol):
    """One request of a client. Its answer is either `answer` or `begin`, `relay` and `end`."""

    id: str
    """Of the request; unique in the fleet."""
    called: str
    """What the client calls it, if that may be repeated; else its `id`."""
    events: int
    """Server-sent events of a stream that came after its first bytes."""
    last: bytes
    """The last part of the stream that was passed on."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Of the request."""
        ...

    @property
    def target(self) -> str:
        """Path and query, as they came."""
        ...

    async def read(self) -> bytes:
        """The whole body, unpacked. Raises `Refusal`."""
        ...

    def worker_lines(self, with_key: bool) -> str:
        """See `headers.worker_lines`."""
        ...

    def answer(self, status: int, headers: AnswerHeaders, body: bytes) -> None:
        """The whole answer at once."""
        ...

    async def begin(self, answer: Answer, headers: AnswerHeaders) -> None:
        """Status, headers and first bytes of an answer that is passed on as it comes."""
        ...

    async def relay(self, answer: Answer) -> None:
        """The rest of it. Raises `StreamBroken`; what was passed on until then stays."""
        ...

    async def write(self, data: bytes) -> None:
        """A part that the worker did not send."""
        ...

    async def end(self) -> None:
        """The answer is complete."""
        ...

    def hang_up(self) -> None:
        """Close the connection without the end that a complete answer has."""
        ...


def count_events(data: bytes) -> int:
    """Server-sent events that begin in ``data``."""
    return data.count(b"\ndata:") + data.startswith(b"data:")


class AnyClient:
    """A request that came through aiohttp; `response` is what its handler returns."""

    def __init__(self, request: web.Request, max_bytes: int) -> None:
        self._request = request
        self._max_bytes = max_bytes
        self.id = request[ID]
        self.called = request[CALLED]
        self.headers = request.headers
        self.target = request.rel_url.raw_path_qs
        self.response = web.StreamResponse()
        self.events = 0
        self.last = b""

    async def read(self) -> bytes:
        """See `Client`; one that does not arrive in time must not keep a place in flight for
        ever, and one that would be too large is not waited for."""
        if (self._request.content_length or 0) > self._max_bytes:
            raise body_too_large(self._max_bytes)
        try:
            async with asyncio.timeout(BODY_S):
                if self._request.pop(WAITS, False):
                    await self._say_continue()
                raw = await self._request.read()
        except TimeoutError:
            raise TooSlow(f"the body did not arrive within {BODY_S:g} s") from None
        return inflate(raw, self.headers.get("Content-Encoding", ""), self._max_bytes)

    async def _say_continue(self) -> None:
        writer = self._request.writer
        await writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        writer.output_size = 0  # of the answer nothing was written yet

    def worker_lines(self, with_key: bool) -> str:
        """See `Client`."""
        return worker_lines(self.headers, with_key=with_key)

    def answer(self, status: int, headers: AnswerHeaders, body: bytes) -> None:
        """See `Client`."""
        self.response = web.Response(status=status, headers=headers.fields(), body=body)

    async def begin(self, answer: Answer, headers: AnswerHeaders) -> None:
        """See `Client`."""
        self.response = web.StreamResponse(status=answer.status, headers=headers.fields())
        await self.response.prepare(self._request)
        await self.response.write(answer.first)
        self.last = answer.first

    async def relay(self, answer: Answer) -> None:
        """See `Client`."""
        async for chunk in answer.rest():
            await self.response.write(chunk)
            self.last = chunk
            self.events += count_events(chunk)

    async def write(self, data: bytes) -> None:
        """See `Client`."""
        await self.response.write(data)

    async def end(self) -> None:
        """See `Client`."""
        await self.response.write_eof()

    def hang_up(self) -> None:
        """See `Client`."""
        if self._request.transport:
            self._request.transport.close()
