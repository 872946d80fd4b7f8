"""The reading side of `UcxLink`, both ways: one-sided reads, and messages that the source sends."""

import asyncio
from collections.abc import Sequence

from prefixfleet.store.errors import PeerLost, PeerRefused, ProtocolError
from prefixfleet.transfer import wire
from prefixfleet.transfer.asking import AskingPeer
from prefixfleet.transfer.channel import Channel
from prefixfleet.transfer.extents import cut
from prefixfleet.transfer.link import Arrived, Deadline, Range, check_lengths, unheard
from prefixfleet.transfer.ucx_get import address_of
from prefixfleet.transfer.ucx_inbox import Inbox
from prefixfleet.transfer.ucx_listener import PIECE_BYTES, Memory, opened
from prefixfleet.transfer.ucx_remote import Remote
from prefixfleet.transfer.ucx_thread import UcxThread
from prefixfleet.transfer.wire import Kind

PUSH_BYTES = 32 * 1024 * 1024
"""One PUSH asks for about so much."""
PUSHES = 4
"""Of one connection under way at once."""


class GetPeer(AskingPeer):
    """Fulfils `Peer` by one-sided reads. Owned by the event loop that connected it."""

    def __init__(self, channel: Channel, thread: UcxThread, remote: Remote, memory: Memory) -> None:
        super().__init__(channel)
        self.lanes = f"ucx:{remote.transports}"
        self._thread = thread
        self._remote = remote
        self._memory = memory

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
        pieces = [
            (self._memory.address + part.offset, address_of(view), part.length)
            for part, view in _cut(self._memory, ranges, targets)
        ]
        _, reading = self._thread.begin(lambda done: self._remote.read(pieces, done))
        await self._channel.wait(reading, deadline=deadline, what="read")

    async def close(self) -> None:
        """See `Peer`."""
        await _close(self._channel, self._thread, self._remote)


class TagPeer(AskingPeer):
    """Fulfils `Peer` by messages: it waits for one for each piece, then asks the source to send
    them. Owned by the event loop that connected it."""

    def __init__(
        self, channel: Channel, thread: UcxThread, inbox: Inbox, memory: Memory, lanes: str
    ) -> None:
        super().__init__(channel)
        self.lanes = lanes
        self._thread = thread
        self._inbox = inbox
        self._memory = memory
        self._places = asyncio.Semaphore(PUSHES)

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
        pieces = _cut(self._memory, ranges, targets)
        for parts, views in cut([part for part, _ in pieces], [v for _, v in pieces], PUSH_BYTES):
            async with self._places:
                await self._push(parts, views, deadline)

    async def close(self) -> None:
        """See `Peer`."""
        await _close(self._channel, self._thread, self._inbox)

    async def _push(
        self, parts: Sequence[Range], views: Sequence[memoryview], deadline: Deadline
    ) -> None:
        places = [(address_of(view), view.nbytes) for view in views]
        begun, ended = self._thread.begin(lambda done: self._inbox.receive(places, done))
        tag = await self._channel.wait(begun, deadline=deadline, what="read")
        body = wire.encode_push(tag, parts)
        await asyncio.gather(
            self._channel.tell(Kind.PUSH, body, deadline=deadline),
            self._channel.wait(ended, deadline=deadline, what="read"),
        )


async def by_gets(channel: Channel, thread: UcxThread, memory: Memory) -> GetPeer:
    """A peer that is read one-sided. Raises `PeerLost`, `KeyUnusable`."""
    remote = await opened(thread, lambda: thread.connect(memory.worker, memory.rkey))
    return GetPeer(channel, thread, remote, memory)


async def by_tags(
    channel: Channel, thread: UcxThread, memory: Memory, *, deadline: Deadline, why: str
) -> TagPeer:
    """A peer that sends messages, ``why`` it is not read one-sided. Raises the errors of `Peer`."""
    inbox = await opened(thread, lambda: thread.open_inbox(memory.worker))
    try:
        kind, answer = Kind.REACH, Kind.ANSWER
        body = await channel.tell(kind, inbox.address, deadline=deadline, answer=answer)
        reached: wire.Reached = wire.unpack(body, wire.Reached)
    except PeerRefused as error:
        thread.disconnect(inbox)
        raise PeerLost(str(error)) from error
    except BaseException:
        thread.disconnect(inbox)
        raise
    return TagPeer(channel, thread, inbox, memory, f"ucx:tags over {reached.lanes} ({why})")


def _cut(
    memory: Memory, ranges: Sequence[Range], targets: Sequence[memoryview]
) -> list[tuple[Range, memoryview]]:
    """Ranges and targets in pieces, without the empty ones. Raises `ProtocolError`."""
    pieces = []
    for part, target in zip(ranges, targets, strict=True):
        if part.offset + part.length > memory.length:
            raise ProtocolError(f"read: {part} is not inside {memory.length} bytes")
        for done in range(0, part.length, PIECE_BYTES):
            length = min(PIECE_BYTES, part.length - done)
            pieces.append((Range(part.offset + done, length), target[done : done + length]))
    return pieces


async def _close(channel: Channel, thread: UcxThread, remote: Remote | Inbox) -> None:
    try:
        await asyncio.shield(thread.disconnect(remote))
    finally:
        await channel.close()
