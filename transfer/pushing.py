"""`Pushes`: what one session sends beside its stream, where the link has such a way.

The session goes on hearing its caller meanwhile: a long push must not look like silence.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from prefixfleet.store.errors import PeerLost, ProtocolError, PullFailed
from prefixfleet.transfer import wire
from prefixfleet.transfer.granted import grants_all, refuse, refuse_ungranted, watching
from prefixfleet.transfer.link import Caller, Range, Service
from prefixfleet.transfer.stream import Stream
from prefixfleet.transfer.wire import Kind

REACH_S = 5.0
"""A way to a caller is found within so long, or the caller refused."""
MAX_PUSHES = 16
"""Of one session at once; a correct caller asks for fewer."""


class Sender(Protocol):
    """A way to one caller. Owned by its self._"""

    @property
    def lanes(self) -> str:
        """What carries the bytes, e.g. "tcp/eth0"."""
        ...

    @property
    def segment_bytes(self) -> int:
        """How much there is to send from."""
        ...

    async def send(self, ranges: Sequence[Range], tag: int) -> None:
        """Send the ranges as messages, with this tag and those that follow it. Ends when they
        have left. Raises `PeerLost`."""
        ...

    async def close(self) -> None:
        """Stop whatever is being sent; bounded."""
        ...


OpenSender = Callable[[bytes], Awaitable[Sender]]
"""A way to the worker that has this address. Raises `PeerLost` where there is none."""


class Pushes:
    """Owned by its self._"""

    def __init__(
        self,
        stream: Stream,
        caller: Caller,
        *,
        service: Service,
        counters: Counter[str],
        open_sender: OpenSender | None,
    ) -> None:
        self._stream = stream
        self._caller = caller
        self._service = service
        self._counters = counters
        self._open_sender = open_sender
        self._sender: Sender | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def reach(self, id: int, address: bytes) -> None:
        """Find a way to the caller's worker, and tell what carries it; once a self._

        Raises `ProtocolError` on what no correct caller asks.
        """
        if self._open_sender is None or self._sender is not None:
            raise ProtocolError(f"{self._caller.node}: REACH on a connection that has no use for")
        try:
            async with asyncio.timeout(REACH_S):
                self._sender = await self._open_sender(address)
        except (PeerLost, TimeoutError) as error:
            self._counters["not_reached"] += 1
            detail = str(error) or f"no way to it within {REACH_S} s"
            await refuse(self._stream, id, "not_reached", detail)
            return
        body = wire.pack(wire.Reached(self._sender.lanes))
        await self._stream.send(wire.frame_header(Kind.ANSWER, body, id), body)

    async def begin(self, id: int, body: bytes) -> None:
        """Begin to send what is asked for, if it is granted. Raises `ProtocolError`."""
        if self._sender is None or len(self._tasks) >= MAX_PUSHES:
            raise ProtocolError(f"{self._caller.node}: a PUSH before REACH, or too many at once")
        tag, ranges = wire.decode_push(body, self._sender.segment_bytes)
        if not grants_all(self._service, self._caller, ranges):
            self._counters["not_granted"] += 1
            await refuse_ungranted(self._stream, id)
            return
        task = asyncio.create_task(self._push(self._sender, id, tag, ranges))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop all of it; bounded."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._sender is not None:
            await self._sender.close()

    async def _push(self, sender: Sender, id: int, tag: int, ranges: list[Range]) -> None:
        try:
            with watching(self._stream, self._caller, ranges, self._service):
                await sender.send(ranges, tag)
            await self._stream.send(wire.data_header(0, id))
        except PullFailed:
            self._stream.drop()  # which ends the session
