"""Follows one engine's KV events over ZeroMQ and says what the engine holds.

What is believed after a loss: a gap is replayed; where that is not possible, everything known is
dropped. After a new connection the engine may be another life with a sequence of its own. It is
the old one only if it replays the last batch exactly as it came; else everything is dropped and
replayed from the start.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from prefixfleet.store.engine_events import EventBatch
from prefixfleet.store.engine_mirror import MAX_COPIES, Change, EngineMirror, Follow
from prefixfleet.store.engine_replay import Message, ReplayFailed, read_message, replay
from prefixfleet.store.errors import ProtocolError
from prefixfleet.store.event_slices import slices, turns
from prefixfleet.store.following import Losses

HIGH_WATER = 10_000  # batches that may wait here, besides the publisher's own; as many are replayed
LAST_RECONNECT_MS = 2_000
HEARTBEAT_MS = 5_000  # a host that vanished closes no connection: twice this, and it counts as lost

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Heard:
    """Batches to apply in order; ``is_anew``: they are all that is known of the engine."""

    messages: Sequence[Message] = ()
    is_anew: bool = False


class EngineFollower:
    """Owned by one event loop. ``events`` and ``replay`` are ZeroMQ endpoints, tcp://host:port.

    ``replay`` may be empty: then each loss drops what was known. ``batches`` counts those applied;
    ``whole`` says whether the engine's first batch was among them: if not, what it stored before
    is unknown.
    """

    def __init__(self, mirror: EngineMirror, events: str, replay: str = "") -> None:
        self._mirror = mirror
        self._events = events
        self._replay = replay
        self._last_live = -1
        self._last_digest = b""
        self._was_full = False
        self._context: zmq.asyncio.Context
        self.losses = Losses()
        self.batches = 0
        self.connected = False
        self.whole = False

    @property
    def fault(self) -> str:
        """What is wrong at the moment with what is believed; empty if all is well."""
        if not self._mirror.is_full:
            return ""
        return (
            f"{self._events}: the engine told more than the {MAX_COPIES} copies of blocks that "
            f"are followed; {self._mirror.refused} were left out, and count as not held"
        )

    async def changes(self) -> AsyncGenerator[Change, None]:
        """What the engine holds now and did not before, and back; until the caller stops.

        Close the iterator (`contextlib.aclosing`): it holds sockets.
        """
        self._context = zmq.asyncio.Context()
        try:
            socket = self._context.socket(zmq.SUB)
            socket.set_hwm(HIGH_WATER)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, LAST_RECONNECT_MS)
            socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            socket.subscribe(b"")
            watched = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
            monitor = socket.get_monitor_socket(watched)
            socket.connect(self._events)
            async for change in self._follow(socket, monitor):
                yield change
        finally:
            self._context.destroy(linger=0)

    def forget(self) -> Change:
        """Nothing is known any more; `changes` may be called again."""
        self._last_digest, self._was_full, self.whole = b"", False, False
        return self._mirror.forget()

    async def _follow(
        self, socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket
    ) -> AsyncGenerator[Change, None]:
        poller = zmq.asyncio.Poller()
        for either in (socket, monitor):
            poller.register(either, zmq.POLLIN)
        while True:
            ready = dict(await poller.poll())
            if monitor in ready:  # first: what came after a new connection is judged as such
                event = await recv_monitor_message(monitor)
                self.connected = event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
                heard = await self._resume() if self.connected else _Heard()
            else:
                heard = await self._hear(await socket.recv_multipart())
            async with aclosing(self._apply(heard)) as changes:
                async for change in changes:
                    yield change
                    await asyncio.sleep(0)  # a batch may tell a lot: others must not wait for it

    async def _resume(self) -> _Heard:
        """After a new connection: catch up with the same life of the engine, or start anew."""
        expected, self._last_live = self._mirror.expected, -1
        try:
            if expected:
                past = await replay(self._context, self._replay, expected - 1)
                if past and await past[0].digest() == self._last_digest:
                    return _Heard(past[1:])
                self.losses.restarts += 1
            return _Heard(await replay(self._context, self._replay, 0), is_anew=True)
        except ReplayFailed as error:
            self._note_failure(error)
            return _Heard(is_anew=True)

    async def _hear(self, frames: Sequence[bytes]) -> _Heard:
        """One live batch, and what is missing before it."""
        try:
            message = read_message(frames)
        except ProtocolError as error:
            self._note_malformed(error)
            return _Heard(is_anew=True)
        expected, sequence = self._mirror.expected, message.sequence
        went_back, self._last_live = sequence <= self._last_live, sequence
        if went_back:
            self.losses.restarts += 1
            return await self._catch_up(0, message)
        if expected is None or sequence == expected:
            return _Heard([message])
        if sequence < expected:
            return _Heard()  # a replay had it already
        self.losses.gaps += 1
        return await self._catch_up(expected, message)

    async def _catch_up(self, start: int, live: Message) -> _Heard:
        """Fetch what is missing before ``live``, from sequence ``start`` on."""
        try:
            past = await replay(self._context, self._replay, start)
        except ReplayFailed as error:
            self._note_failure(error)
            return _Heard([live], is_anew=True)
        is_continued = bool(start and past and past[0].sequence == start)
        return _Heard([*past, live], is_anew=not is_continued)

    def _note_failure(self, error: ReplayFailed) -> None:
        if self._replay:
            self.losses.failed_replays += 1
            log.warning("%s: the past cannot be replayed: %s", self._events, error)

    def _note_malformed(self, error: ProtocolError) -> None:
        self.losses.malformed += 1
        log.warning("%s: a batch is dropped, and all that was known: %s", self._events, error)

    async def _apply(self, heard: _Heard) -> AsyncGenerator[Change, None]:
        """In turns. At least one change, also an empty one: what it was made of is counted."""
        if heard.is_anew:
            for turn in turns(self.forget()):
                yield turn
        for message in heard.messages:
            try:
                batch = await message.batch()
            except ProtocolError as error:
                self._note_malformed(error)
                for turn in turns(self.forget()):
                    yield turn
                continue
            for change in self._take(batch):
                for turn in turns(change):
                    yield turn
            if self._mirror.expected == batch.sequence + 1:  # all of it: half is not the last one
                self._last_digest = await message.digest()
        yield Change()

    def _take(self, batch: EventBatch) -> Iterator[Change]:
        """One batch in slices, after those before it; one that was applied before does nothing."""
        pieces = slices(batch.events)
        first = EventBatch(batch.sequence, next(pieces, ()))
        outcome, change = self._mirror.follow(first)
        if outcome is Follow.GAP:  # missing in the replay itself
            yield self.forget()
            change = self._mirror.follow(first)[1]
        elif outcome is Follow.REPEATED:
            return
        self.batches += 1
        self.whole = self.whole or batch.sequence == 0
        yield self._counted(change)
        for piece in pieces:
            yield self._counted(self._mirror.more(piece))

    def _counted(self, change: Change) -> Change:
        """Notes that the engine came to hold more than is followed."""
        self.losses.overflows += self._mirror.is_full and not self._was_full
        self._was_full = self._mirror.is_full
        self.whole = self.whole and not self._mirror.is_full
        return change
