"""One connection to an engine: a request out, its answer back as it arrives, then the next.

The aiohttp client would do, at twice the processor time a stream; this one knows only what a
router needs of an upstream.
"""

import asyncio
from collections.abc import Callable
from typing import cast

from prefixfleet.router.framing import (
    MAX_HEAD_BYTES,
    BadFraming,
    Framing,
    Head,
    framing_of,
    parse_head,
)

HIGH_WATER_BYTES = 256 * 1024
"""Bytes held of an answer that its client reads slower than the engine writes."""


Sink = Callable[[bytes, bool], None]
"""Takes a part of a body, which may be empty, and whether it is the last one."""


class ConnectionClosed(Exception):
    """The engine closed the connection, broke it, or sent what is no HTTP."""


class Connection(asyncio.Protocol):
    """Owned by whoever took it from the pool; one request at a time."""

    def __init__(self, silence_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._silence_s = silence_s
        self._heard_s = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport
        self._raw = b""
        self._body: list[bytes] = []
        self._held_bytes = 0
        self._head: Head | None = None
        self._framing: Framing | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._failure = ""
        self._paused = False
        self._sink: Sink | None = None
        self._asked = False
        self.answered = False  # whether any byte of the present answer has come
        self.timed_out = False
        self.idle_since_s = 0.0

    def send(self, request: bytes) -> None:
        """Start a request. The connection must be idle. Nothing may be silent for too long."""
        self._raw, self._head, self._framing = b"", None, None
        self._asked, self.answered = True, False
        self._heard_s = self._loop.time()
        if not self._failure:
            self._transport.write(request)
            if self._watch is None:  # that of a request before looks after this one too
                self._watch = self._loop.call_later(self._silence_s, self._look_at_silence)

    def rest(self) -> None:
        """The answer is complete: the connection is idle now."""
        self._asked = False
        self.idle_since_s = self._loop.time()

    async def head(self) -> Head:
        """Status and headers. Raises `ConnectionClosed`."""
        while self._head is None:
            await self._more()
        return self._head

    async def read(self) -> bytes:
        """Bytes of the body as they are there, at least one; empty at its end.

        Raises:
            ConnectionClosed: the answer breaks off.
        """
        while not self._body:
            if self._framing is not None and self._framing.done:
                return b""
            await self._more()
        data = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        self._held_bytes = 0
        self.release()
        return data

    async def relay(self, sink: Sink) -> None:
        """Give ``sink`` what is there of the body and what follows, as it arrives, to its end.

        No task is woken for a part. A sink that cannot take more calls `hold`, later `release`.

        Raises:
            ConnectionClosed: the answer breaks off.
        """
        assert self._framing is not None
        held = b"".join(self._body)
        self._body.clear()
        self._held_bytes = 0
        if held or self._framing.done:
            sink(held, self._framing.done)
        self._sink = sink
        try:
            while not self._framing.done:
                await self._more()
        finally:
            self._sink = None

    def hold(self) -> None:
        """Read no more of the answer until `release`."""
        if not self._paused and not self._failure:
            self._paused = True
            self._transport.pause_reading()

    def release(self) -> None:
        """Read on."""
        if self._paused:
            self._paused = False
            if not self._failure:
                self._transport.resume_reading()

    @property
    def reusable(self) -> bool:
        """Whether the answer is complete and the engine keeps the connection."""
        return (
            not self._failure
            and self._framing is not None
            and self._framing.done
            and not self._body
            and self._head is not None
            and self._head.keep_alive
        )

    @property
    def alive(self) -> bool:
        """Whether nobody closed it."""
        return not self._failure

    def close(self) -> None:
        """Close at once; the engine sees it and stops generating."""
        self._stop_watching()
        self._fail("closed by the router")
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        self.answered = True
        self._heard_s = self._loop.time()
        try:
            if not self._asked:
                raise BadFraming("bytes that nobody asked for")
            self._take(data)
        except BadFraming as error:
            self._fail(f"no HTTP answer: {error}")
            self._transport.abort()
        if self._sink is None or (self._framing is not None and self._framing.done):
            self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the loop, when either side is done."""
        if error is None and self._framing is not None and self._framing.at_close():
            self._framing.done = True
            if self._sink is not None:
                self._sink(b"", True)
        self._stop_watching()
        self._fail(f"{type(error).__name__}: {error}" if error else "closed by the engine")

    def _take(self, data: bytes) -> None:
        if self._framing is not None:
            return self._take_body(data)
        self._raw += data
        while self._framing is None:
            end = self._raw.find(b"\r\n\r\n")
            if end < 0:
                if len(self._raw) > MAX_HEAD_BYTES:
                    raise BadFraming("a head without an end")
                return None
            head, self._raw = parse_head(self._raw[:end]), self._raw[end + 4 :]
            if head.status >= 200:  # 1xx only announces the answer
                self._head, self._framing = head, framing_of(head)
        rest, self._raw = self._raw, b""
        return self._take_body(rest) if rest else None

    def _take_body(self, data: bytes) -> None:
        assert self._framing is not None
        part = self._framing.feed(data)
        if self._sink is not None:
            self._sink(part, self._framing.done)
        elif part:
            self._body.append(part)
            self._held_bytes += len(part)
            if self._held_bytes > HIGH_WATER_BYTES:
                self.hold()

    def _more(self) -> asyncio.Future[None]:
        """To be awaited: done as soon as there is anything new."""
        if self._failure:
            raise ConnectionClosed(self._failure)
        self._waiter = self._loop.create_future()
        return self._waiter

    def _look_at_silence(self) -> None:
        self._watch = None
        if not self._asked:
            return
        silent_s = self._loop.time() - self._heard_s
        if silent_s >= self._silence_s and not self._paused:
            self.timed_out = True
            self._fail(f"nothing came for {silent_s:.0f} s")
            self._transport.abort()
        else:
            wait_s = max(0.01, self._silence_s - silent_s)
            self._watch = self._loop.call_later(wait_s, self._look_at_silence)

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
