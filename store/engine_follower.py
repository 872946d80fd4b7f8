"""Follows one engine's KV events over ZeroMQ and says what the engine holds.

What is believed after a loss: a gap is replayed; where that is not possible, everything known is
dropped. After a new connection the engine may be another life with a sequence of its own. It is
the old one only if it replays the last batch exactly as it came; else everything is dropped and
replayed from the start.
"""

import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from prefixfleet.store.engine_mirror import Change, EngineMirror, Follow, joined
from prefixfleet.store.engine_replay import Message, ReplayFailed, read_message, replay
from prefixfleet.store.errors import ProtocolError

HIGH_WATER = 100_000  # batches that may wait here; vLLM's own mark
LAST_RECONNECT_MS = 2_000
HEARTBEAT_MS = 5_000  # a host that vanished closes no connection: twice this, and it counts as lost

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Losses:
    """What went wrong while following, counted."""

    gaps: int = 0
    restarts: int = 0
    malformed: int = 0
    failed_replays: int = 0
    overflows: int = 0  # more blocks than anybody follows


class Following(Protocol):
    """Who follows an engine, by whatever way its events come."""

    @property
    def whole(self) -> bool:
        """Whether all that the engine holds is known."""

    @property
    def connected(self) -> bool:
        """Whether it answers at the moment."""

    @property
    def batches(self) -> int:
        """How often it told something."""

    @property
    def losses(self) -> Losses:
        """What went wrong, counted."""


def numbers_of(following: Following, mirror: EngineMirror) -> dict[str, Any]:
    """Blocks that the engine holds, what is known of them and what was lost, for status."""
    return {
        "resident": len(mirror),
        "whole": following.whole,
        "connected": following.connected,
        "unfollowed_blocks": mirror.unfollowed,
        "batches": following.batches,
    } | asdict(following.losses)


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
        self._context: zmq.asyncio.Context
        self.losses = Losses()
        self.batches = 0
        self.connected = False
        self.whole = False

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
        self._last_digest, self.whole = b"", False
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
                change = await self._resume() if self.connected else Change()
            else:
                change = await self._hear(await socket.recv_multipart())
            yield change  # also an empty one: what it was made of is counted in the mirror

    async def _resume(self) -> Change:
        """After a new connection: catch up with the same life of the engine, or start anew."""
        expected, self._last_live = self._mirror.expected, -1
        try:
            if expected:
                past = await replay(self._context, self._replay, expected - 1)
                if past and past[0].digest == self._last_digest:
                    return self._apply(past[1:])
                self.losses.restarts += 1
            return self._anew(await replay(self._context, self._replay, 0))
        except ReplayFailed as error:
            return self._lost(error)

    async def _hear(self, frames: Sequence[bytes]) -> Change:
        """One live batch."""
        try:
            message = read_message(frames)
        except ProtocolError as error:
            self.losses.malformed += 1
            log.warning("%s: a batch is dropped, and all that was known: %s", self._events, error)
            return self.forget()
        expected, sequence = self._mirror.expected, message.batch.sequence
        went_back, self._last_live = sequence <= self._last_live, sequence
        if went_back:
            self.losses.restarts += 1
            return await self._catch_up(0, message)
        if expected is None or sequence == expected:
            return self._apply([message])
        if sequence < expected:
            return Change()  # a replay had it already
        self.losses.gaps += 1
        return await self._catch_up(expected, message)

    async def _catch_up(self, start: int, live: Message) -> Change:
        """Fetch what is missing before ``live``, from sequence ``start`` on."""
        try:
            past = await replay(self._context, self._replay, start)
        except ReplayFailed as error:
            return joined(self._lost(error), self._apply([live]))
        if start and past and past[0].batch.sequence == start:
            return self._apply([*past, live])
        return self._anew([*past, live])

    def _lost(self, error: ReplayFailed) -> Change:
        if self._replay:
            self.losses.failed_replays += 1
            log.warning("%s: the past cannot be replayed: %s", self._events, error)
        return self.forget()

    def _anew(self, past: Sequence[Message]) -> Change:
        """Drop everything, then take ``past`` as the engine's history."""
        return joined(self.forget(), self._apply(past))

    def _apply(self, messages: Sequence[Message]) -> Change:
        """Batches in order; those that were applied before do nothing."""
        total = Change()
        for message in messages:
            outcome, change = self._mirror.follow(message.batch)
            if outcome is Follow.GAP:  # missing in the replay itself
                change = joined(self.forget(), self._mirror.follow(message.batch)[1])
            if outcome is not Follow.REPEATED:
                self.batches += 1
                self.whole = self.whole or message.batch.sequence == 0
                self._last_digest = message.digest
            total = joined(total, change)
        return total
