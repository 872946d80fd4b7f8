"""The disk of a simulated node: what it holds and how long its reads take. A model.

Least recently used first, as on a real node's disk, and a chain's end before its beginning. Reads
come one after the other, each at the whole speed of the disk. Writes take no time: a node writes in
the background, in batches, what leaves its memory. A full disk takes all of that here, a node's
only what was asked for again, which finds less (DESIGN 12 has figures).
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from prefixfleet.store.chain import BlockHash


@dataclass(slots=True)
class SimulatedDisk:
    """Owned by its node. ``block_s`` seconds to read a block; times are simulated seconds."""

    blocks: int
    block_s: float
    _held: OrderedDict[BlockHash, None] = field(default_factory=OrderedDict)
    _busy_until: float = 0.0

    def held(self) -> tuple[BlockHash, ...]:
        """All blocks, those that would leave first in front."""
        return tuple(self._held)

    def keep(self, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Write these, which left memory, last ones first; the blocks that left the disk for it."""
        for block in hashes:
            self._held[block] = None
            self._held.move_to_end(block)
        return [self._held.popitem(last=False)[0] for _ in range(len(self._held) - self.blocks)]

    def match(self, chain: Sequence[BlockHash]) -> int:
        """How many leading blocks of ``chain`` are here."""
        return next((i for i, b in enumerate(chain) if b not in self._held), len(chain))

    def read(self, chain: Sequence[BlockHash], ready_s: float, until_s: float) -> tuple[int, float]:
        """Read the leading blocks of ``chain`` that are here, not before ``ready_s`` and those
        only that are read by ``until_s``: how many, and when they are there."""
        here = self.match(chain)
        begins_s = max(ready_s, self._busy_until)
        in_time = max(0.0, until_s - begins_s)
        count = here if here * self.block_s <= in_time else int(in_time / self.block_s)
        if not count:
            return 0, ready_s
        for block in reversed(chain[:count]):
            self._held.move_to_end(block)
        self._busy_until = begins_s + count * self.block_s
        return count, self._busy_until
