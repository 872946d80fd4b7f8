"""Seconds that a block found on this node takes until its engine has it, learned from real loads.

The index does not say in which tier a block lies: hits in memory and hits that are read from disk
first are averaged as they come, and the routers price what this node holds by that. Routers ask a
node for nothing whose blocks seem slower than computing them, so that it would never learn that its
disk is fast again: what no load confirms fades. Pure; the clock is an argument.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

KEPT_BLOCKS = 4_096
"""Blocks over which the averages go, about: older ones fade."""
OUTLIER = 8.0
"""A load counts at most so many times what is known, and what is known at least as `FLOOR_S`."""
FLOOR_S = 1e-4
HALF_S = 60.0
"""In so many seconds what is known counts half as much; without any load it is half as slow."""


@dataclass(slots=True)
class _Average:
    """Seconds a block, over blocks."""

    blocks: float = 0.0
    seconds: float = 0.0
    seen_s: float = 0.0

    @property
    def block_s(self) -> float:
        return self.seconds / self.blocks if self.blocks else 0.0

    def weight(self, now: float) -> float:
        """How much of it is left: less and less from the last load on."""
        return float(0.5 ** (max(0.0, now - self.seen_s) / HALF_S))

    def saw(self, blocks: int, seconds: float, now: float) -> None:
        if blocks < 1:
            return
        if self.blocks:
            seconds = min(seconds, OUTLIER * max(self.block_s, FLOOR_S) * blocks)
        left, self.seen_s = self.weight(now), now
        blocks_now, seconds_now = self.blocks * left + blocks, self.seconds * left + seconds
        kept = min(1.0, KEPT_BLOCKS / blocks_now)
        self.blocks, self.seconds = blocks_now * kept, seconds_now * kept


class HitTimes:
    """Of one pool, that is of one namespace. Owned by the daemon's event loop. ``clock`` is
    monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._read, self._copied = _Average(), _Average()

    def read(self, blocks: int, seconds: float) -> None:
        """So many blocks of this node were in its pool, together, ``seconds`` after the question:
        none at all where they were in memory."""
        self._read.saw(blocks, seconds, self._clock())

    def copied(self, blocks: int, seconds: float) -> None:
        """An engine copied so many blocks out of the pool in ``seconds``."""
        self._copied.saw(blocks, seconds, self._clock())

    def numbers(self) -> dict[str, Any]:
        """For the node's record: ``block_s`` is what the routers count, the sum of the others."""
        now = self._clock()
        read_s, copy_s = (one.block_s * one.weight(now) for one in (self._read, self._copied))
        return {"block_s": read_s + copy_s, "read_s": read_s, "copy_s": copy_s}


NO_HITS = HitTimes(lambda: 0.0).numbers()
"""Of a node without an engine."""
