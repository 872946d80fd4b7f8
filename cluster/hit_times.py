"""Seconds that a block found on this node takes until its engine has it, learned from real loads.

The index does not say in which tier a block lies: hits in memory and hits that are read from disk
first are averaged as they come, and the routers price what this node holds by that. Pure.
"""

from dataclasses import dataclass
from typing import Any

KEPT_BLOCKS = 4_096
"""Blocks over which the averages go, about: older ones fade."""
OUTLIER = 8.0
"""A load counts at most so many times what is known, and what is known at least as `FLOOR_S`."""
FLOOR_S = 1e-4


@dataclass(slots=True)
class _Average:
    """Seconds a block, over blocks."""

    blocks: float = 0.0
    seconds: float = 0.0

    @property
    def block_s(self) -> float:
        return self.seconds / self.blocks if self.blocks else 0.0

    def saw(self, blocks: int, seconds: float) -> None:
        if blocks < 1:
            return
        if self.blocks:
            seconds = min(seconds, OUTLIER * max(self.block_s, FLOOR_S) * blocks)
        kept = min(1.0, KEPT_BLOCKS / (self.blocks + blocks))
        self.blocks, self.seconds = (self.blocks + blocks) * kept, (self.seconds + seconds) * kept


class HitTimes:
    """Of one pool, that is of one namespace. Owned by the daemon's event loop."""

    def __init__(self) -> None:
        self._read, self._copied = _Average(), _Average()

    def read(self, blocks: int, seconds: float) -> None:
        """So many blocks of this node were in its pool, together, ``seconds`` after the question:
        none at all where they were in memory."""
        self._read.saw(blocks, seconds)

    def copied(self, blocks: int, seconds: float) -> None:
        """An engine copied so many blocks out of the pool in ``seconds``."""
        self._copied.saw(blocks, seconds)

    def numbers(self) -> dict[str, Any]:
        """For the node's record: ``block_s`` is what the routers count, the sum of the others."""
        read_s, copy_s = self._read.block_s, self._copied.block_s
        return {"block_s": read_s + copy_s, "read_s": read_s, "copy_s": copy_s}


NO_HITS = HitTimes().numbers()
"""Of a node without an engine."""
