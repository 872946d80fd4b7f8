"""`Flow`: bounds on the bytes that all pulls of a node have asked for and not got yet. No I/O.

Whoever has moved least goes first: a short pull that a request waits for does not stand behind
the portions of a long one, nor behind anything that runs in the background.
"""

import asyncio
import itertools
from collections import Counter
from dataclasses import dataclass

MAX_BYTES = 256 * 1024 * 1024
MAX_PEER_BYTES = 128 * 1024 * 1024

Rank = tuple[bool, int]
"""(background, blocks brought so far); the smaller goes first."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Room for one portion, held until `leave`. Owned by who entered."""

    flow: "Flow"
    peer: str
    size_bytes: int

    def leave(self) -> None:
        """The portion is here, or never will be. Call it once."""
        self.flow.left(self)


class Flow:
    """Owned by one event loop. A portion larger than a bound goes when nothing else is under way
    within that bound."""

    def __init__(self, max_bytes: int = MAX_BYTES, max_peer_bytes: int = MAX_PEER_BYTES) -> None:
        self._max_bytes = max_bytes
        self._max_peer_bytes = max_peer_bytes
        self._numbers = itertools.count()
        self._waiting: dict[tuple[Rank, int], tuple[Turn, asyncio.Future[None]]] = {}
        self._peers: Counter[str] = Counter()
        self.bytes = 0  # under way

    async def enter(self, peer: str, size_bytes: int, rank: Rank) -> Turn:
        """Wait for room to read a portion from ``peer``."""
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
