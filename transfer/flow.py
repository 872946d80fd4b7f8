"""`Flow`: bounds on the bytes that all pulls of a node have asked for and not got yet. No I/O.

Whoever has moved least goes first, and short pulls have room of their own: one that a request
waits for does not stand behind the portions of long ones, which may have filled the bounds, nor
behind anything that runs in the background.
"""

import asyncio
import itertools
from collections import Counter
from dataclasses import dataclass

MAX_BYTES = 256 * 1024 * 1024
MAX_PEER_BYTES = 128 * 1024 * 1024
SHORT_PART = 16
"""Up to this part of a peer's bound is short."""
SHORT_ROOM = 4
"""Short portions have this part of the bounds, besides."""

Rank = tuple[bool, int]
"""(background, blocks brought so far); the smaller goes first."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Room for one portion, held until `leave`. Owned by who entered."""

    queue: "_Queue"
    peer: str
    size_bytes: int

    def leave(self) -> None:
        """The portion is here, or never will be. Call it once."""
        self.queue.left(self)


class Flow:
    """Owned by one event loop. A portion larger than a bound goes when nothing else is under way
    within that bound."""

    def __init__(self, max_bytes: int = MAX_BYTES, max_peer_bytes: int = MAX_PEER_BYTES) -> None:
        self._short_bytes = max_peer_bytes // SHORT_PART
        self._long = _Queue(max_bytes, max_peer_bytes)
        self._short = _Queue(max_bytes // SHORT_ROOM, max_peer_bytes // SHORT_ROOM)

    @property
    def bytes(self) -> int:
        """Under way."""
        return self._long.bytes + self._short.bytes

    def is_short(self, size_bytes: int) -> bool:
        """Whether a pull of so many bytes is served beside the long ones."""
        return size_bytes <= self._short_bytes

    async def enter(self, peer: str, size_bytes: int, rank: Rank) -> Turn:
        """Wait for room to read a portion from ``peer``."""
        background, _ = rank
        short = self.is_short(size_bytes) and not background
        return await (self._short if short else self._long).enter(peer, size_bytes, rank)


class _Queue:
    """Portions that share bounds. Owned by its `Flow`."""

    def __init__(self, max_bytes: int, max_peer_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_peer_bytes = max_peer_bytes
        self._numbers = itertools.count()
        self._waiting: dict[tuple[Rank, int], tuple[Turn, asyncio.Future[None]]] = {}
        self._peers: Counter[str] = Counter()
        self.bytes = 0  # under way

    async def enter(self, peer: str, size_bytes: int, rank: Rank) -> Turn:
        """See `Flow.enter`."""
        turn = Turn(self, peer, size_bytes)
        place = (rank, next(self._numbers))
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[place] = (turn, admitted)
        self._admit()
        try:
            await admitted
        except BaseException:
            if self._waiting.pop(place, None) is None:
                self.left(turn)
            else:
                self._admit()  # it may have kept others from going
            raise
        return turn

    def left(self, turn: Turn) -> None:
        """See `Turn.leave`."""
        self.bytes -= turn.size_bytes
        self._peers[turn.peer] -= turn.size_bytes
        if not self._peers[turn.peer]:
            del self._peers[turn.peer]
        self._admit()

    def _admit(self) -> None:
        for place in sorted(self._waiting):
            turn, admitted = self._waiting[place]
            if self.bytes and self.bytes + turn.size_bytes > self._max_bytes:
                return  # a smaller one behind it must not slip past for ever
            of_peer = self._peers[turn.peer]
            if of_peer and of_peer + turn.size_bytes > self._max_peer_bytes:
                continue
            del self._waiting[place]
            self.bytes += turn.size_bytes
            self._peers[turn.peer] += turn.size_bytes
            if not admitted.done():
                admitted.set_result(None)
