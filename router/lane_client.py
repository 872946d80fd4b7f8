"""The client of a plain request: its answer goes straight to the transport. See `Client`."""

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING

from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import SERVER_SOFTWARE

from prefixfleet.router.client import count_events
from prefixfleet.router.headers import AnswerHeaders
from prefixfleet.router.plain_request import PlainHead
from prefixfleet.router.upstream import Answer

if TYPE_CHECKING:
    from aiohttp.base_protocol import BaseProtocol

_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n" for s in HTTPStatus}
_WITHOUT_BODY = {204, 304}
_LAST_CHUNK = b"0\r\n\r\n"


class LaneClient:
    """Owned by the task that serves the request."""

    def __init__(
        self,
        connection: "BaseProtocol",
        transport: asyncio.Transport,
        head: PlainHead,
        body: bytes,
    ) -> None:
        self._connection = connection
        self._transport = transport
        self._body = body
        self._answer: Answer | None = None
        self._chunked = self._ended = False
        self.begun = False
        self.id = self.called = ""
        self._fields = head.fields
        self.target = head.fields.path
        self.headers: Mapping[str, str] = head.fields.headers
        self.events = 0
        self.last = b""

    async def read(self) -> bytes:
        """See `Client`."""
        return self._body

    def worker_lines(self, with_key: bool) -> str:
        """See `Client`."""
        return self._fields.worker_lines(with_key)

    def answer(self, status: int, headers: AnswerHeaders, body: bytes) -> None:
        """See `Client`."""
        self.begun = self._ended = True
        length = "" if status in _WITHOUT_BODY else f"Content-Length: {len(body)}\r\n"
        self._transport.write(_head(status, headers, length) + body)

    async def begin(self, answer: Answer, headers: AnswerHeaders) -> None:
        """See `Client`."""
        self.begun = True
        if answer.status in _WITHOUT_BODY:
            return self.answer(answer.status, headers, b"")
        self._chunked = headers.length is None
        framing = f"Content-Length: {headers.length}\r\n"
        if self._chunked:
            framing = "Transfer-Encoding: chunked\r\n"
        self.last = answer.first
        self._transport.write(_head(answer.status, headers, framing) + self._framed(answer.first))
        return None

    async def relay(self, answer: Answer) -> None:
        """See `Client`."""
        self._answer = answer
        if self._connection.writing_paused:
            self.hold()
        try:
            await answer.relay(self._take)
        finally:
            self._answer = None

    def _take(self, part: bytes, is_last: bool) -> None:
        if self._transport.is_closing():
            return
        data = self._framed(part)
        if is_last and self._chunked and not self._ended:
            self._ended = True
            data += _LAST_CHUNK
        if part:
            self.last = part
            self.events += count_events(part)
        if data:
            self._transport.write(data)

    def hold(self) -> None:
        """Too much is on its way to the client: read no more from its engine."""
        if self._answer is not None:
            self._answer.connection.hold()

    def release(self) -> None:
        """The client reads again."""
        if self._answer is not None:
            self._answer.connection.release()

    async def write(self, data: bytes) -> None:
        """See `Client`."""
        self._transport.write(self._framed(data))

    async def end(self) -> None:
        """See `Client`."""
        if self._chunked and not self._ended:
            self._ended = True
            self._transport.write(_LAST_CHUNK)

    def hang_up(self) -> None:
        """See `Client`."""
        self._transport.close()

    def _framed(self, data: bytes) -> bytes:
        if not self._chunked or not data:
            return data
        return b"%x\r\n%b\r\n" % (len(data), data)


def _head(status: int, headers: AnswerHeaders, framing: str) -> bytes:
    first = _STATUS_LINES.get(status) or f"HTTP/1.1 {status} \r\n"
    own = f"Date: {rfc822_formatted_time()}\r\nServer: {SERVER_SOFTWARE}\r\n"
    return f"{first}{headers.lines()}{own}{framing}\r\n".encode("utf-8", "replace")
