"""`Channel`: the caller's end of one authenticated TCP connection to a peer.

Carries questions, heartbeats and, for the TCP link, the bytes of the ranges themselves. The UCX
and shared-memory links use one for everything but the bytes.
"""

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from prefixfleet.store.errors import PeerLost, ProtocolError, PullFailed
from prefixfleet.transfer import wire
from prefixfleet.transfer.contact import parse_contact
from prefixfleet.transfer.crew import Crew
from prefixfleet.transfer.deadline import until
from prefixfleet.transfer.dial import dial
from prefixfleet.transfer.extents import cut
from prefixfleet.transfer.introduction import introduce, receive_body, refused
from prefixfleet.transfer.link import Arrived, Deadline, Range, after, check_lengths, unheard
from prefixfleet.transfer.stream import Stream
from prefixfleet.transfer.wire import Kind

Result = TypeVar("Result")

REQUEST_BYTES = 32 * 1024 * 1024
"""One READ asks for about so much."""
WINDOW = 2
"""READs of one `read` that may be under way: the sender never waits for our next question."""
SILENCE_BEATS = 3
"""Heartbeats without a byte from the peer after which it counts as lost."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    future: "asyncio.Future[Any]"
    kind: Kind  # of the answer
    targets: Sequence[memoryview] = ()
    arrived: Arrived = unheard


class Channel:
    """See the module, and `link.Peer`, which it fulfils. Owned by the event loop that opened it."""

    lanes = "tcp"

    def __init__(self, stream: Stream, node: str, attachment: bytes, heartbeat_s: float) -> None:
        self.node = node
        self.attachment = attachment  # what the listener's link told us besides
        self._stream = stream
        self._heartbeat_s = heartbeat_s
        self._ids = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}
        self._beside: set[asyncio.Future[Any]] = set()  # no answer ends these, only a failure
        self._error: PullFailed | None = None
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._beat())]

    @classmethod
    async def open(
        cls,
        contact: str,
        *,
        link: str,
        node: str,
        secret: bytes,
        heartbeat_s: float,
        deadline: Deadline,
        crew: Crew | None = None,
    ) -> Self:
        """Connect and authenticate. Raises the errors of `Peer`."""
        host, port = parse_contact(link, contact)
        async with until(deadline, f"connect to {contact}"):
            stream = await dial(host, port, contact, crew)
            try:
                peer, attachment = await introduce(stream, link, node, secret)
            except BaseException:
                await stream.close()
                raise
        return cls(stream, peer, attachment, heartbeat_s)

    @property
    def broken(self) -> bool:
        """See `Peer`."""
        return self._error is not None

    async def ask(self, question: bytes, *, deadline: Deadline) -> bytes:
        """See `Peer`."""
        async with self._call(deadline, "question"):
            return await (await self._start(Kind.ASK, question, Kind.ANSWER))

    async def read(
        self,
        ranges: Sequence[Range],
        targets: Sequence[memoryview],
        *,
        deadline: Deadline,
        arrived: Arrived = unheard,
    ) -> None:
        """See `Peer`."""
        check_lengths(ranges, targets)
        under_way: deque[asyncio.Future[bytes]] = deque()
        before = 0
        try:
            async with self._call(deadline, "read"):
                for parts, views in cut(ranges, targets, REQUEST_BYTES):
                    if len(under_way) == WINDOW:
                        await under_way.popleft()
                    body = wire.encode_ranges(parts)
                    heard = after(before, arrived)
                    under_way.append(await self._start(Kind.READ, body, Kind.DATA, views, heard))
                    before += sum(view.nbytes for view in views)
                while under_way:
                    await under_way.popleft()
        finally:
            for future in under_way:
                _forget(future)

    async def tell(
        self, kind: Kind, body: bytes, *, deadline: Deadline, answer: Kind = Kind.DATA
    ) -> bytes:
        """What the listener answers, b"" where that is DATA. Raises `PeerRefused`."""
        async with self._call(deadline, kind.name.lower()):
            return await (await self._start(kind, body, answer))

    async def wait(self, end: "asyncio.Future[Result]", *, deadline: Deadline, what: str) -> Result:
        """The result of something that goes on beside the connection, and fails with it."""
        lost: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._beside.add(lost)
        try:
            async with self._call(deadline, what):
                await asyncio.wait({end, lost}, return_when=asyncio.FIRST_COMPLETED)
                return await (lost if lost.done() else end)
        finally:
            self._beside.discard(lost)
            _forget(end)
            _forget(lost)

    @asynccontextmanager
    async def _broken_by_failure(self) -> AsyncIterator[None]:
        """Whatever fails or is cancelled inside makes the connection useless."""
        try:
            yield
        except PullFailed as error:
            self.fail(error)
            raise
        except BaseException:
            self.fail(PeerLost("an earlier call on this connection was cancelled"))
            raise

    def fail(self, error: PullFailed) -> None:
        """End every call, now and later, with this error; the first one counts."""
        if self._error is None:
            self._error = error
            for future in (*(waiting.future for waiting in self._waiting.values()), *self._beside):
                if not future.done():
                    future.set_exception(type(error)(str(error)))

    async def close(self) -> None:
        """See `Peer`."""
        self.fail(PeerLost("the connection was closed on this side"))
        for task in self._tasks:
            task.cancel()
        await self._stream.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @asynccontextmanager
    async def _call(self, deadline: Deadline, what: str) -> AsyncIterator[None]:
        async with self._broken_by_failure(), until(deadline, f"{what} to {self.node}"):
            if self._error is not None:
                raise type(self._error)(str(self._error))
            yield

    async def _start(
        self,
        kind: Kind,
        body: bytes,
        answer: Kind,
        targets: Sequence[memoryview] = (),
        arrived: Arrived = unheard,
    ) -> "asyncio.Future[bytes]":
        id = next(self._ids)
        header = wire.frame_header(kind, body, id)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[id] = _Waiting(future, answer, targets, arrived)
        try:
            await self._stream.send(header, body)
        except BaseException:
            future.cancel()
            raise
        return future

    async def _receive(self) -> None:
        try:
            while True:
                header = wire.decode_header(await self._stream.receive(wire.HEADER.size))
                await self._take(header)
        except PullFailed as error:
            self.fail(error)

    async def _take(self, header: wire.Header) -> None:
        if header.kind == Kind.PONG:
            return
        waiting = self._waiting.get(header.id)
        if waiting is None or header.kind not in (waiting.kind, Kind.REFUSED):
            raise ProtocolError(f"{self.node}: {header.kind.name} that answers no question")
        body = b""
        if header.kind == Kind.DATA:
            expected = sum(view.nbytes for view in waiting.targets)
            if header.length != expected:
                raise ProtocolError(f"DATA: got {header.length} bytes, expected {expected}")
            await self._stream.receive_into(waiting.targets, waiting.arrived)
        else:
            body = bytes(await receive_body(self._stream, header))
        refusal = refused(self.node, body) if header.kind == Kind.REFUSED else None
        del self._waiting[header.id]
        if waiting.future.done():  # given up
            return
        if refusal is None:
            waiting.future.set_result(body)
        else:
            waiting.future.set_exception(refusal)

    async def _beat(self) -> None:
        """Ask for a sign of life whenever the peer is silent; fail when none comes."""
        slept_at = listens_since = self._stream.heard_at  # this task may start late
        while self._error is None:
            await asyncio.sleep(self._heartbeat_s)
            now = time.monotonic()
            if now - slept_at > 2 * self._heartbeat_s:  # we stood still: it may have spoken, and
                listens_since = now  # has as long as ever to answer what we ask it now
            silent_s = now - self._stream.heard_at
            if min(silent_s, now - listens_since) > SILENCE_BEATS * self._heartbeat_s:
                self.fail(PeerLost(f"{self.node}: silent for {silent_s:.1f} s"))
            elif silent_s >= self._heartbeat_s / 2:
                with contextlib.suppress(PullFailed, TimeoutError):  # `_receive` sees it too
                    async with asyncio.timeout(SILENCE_BEATS * self._heartbeat_s):
                        await self._stream.send(wire.frame_header(Kind.PING))
            slept_at = time.monotonic()


def _forget(future: "asyncio.Future[Any]") -> None:
    """Nobody waits for it any more; if it has failed, another error was raised instead."""
    if not future.cancel() and not future.cancelled():
        future.exception()
