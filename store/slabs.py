"""`Slabs`: how one segment is cut so that blocks of several sizes share it. Pure arithmetic.

Every namespace counts slots of its own size from the start of the segment (offset = number x size),
and the segment is cut into slabs, each of which belongs to one namespace at a time. A slot exists
for a namespace where every slab that it touches is its own. So the bytes of a slab that no slot
uses are less than a slot at each end, and none where a neighbour has the same owner.
"""

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Self

from prefixfleet.store.slot import ALIGN_BYTES

SLABS = 32
MOST_WASTE = 1 / 16
"""Of a slab's bytes; that of slots of a 32nd of it at both ends."""


@dataclass(frozen=True, slots=True)
class Slabs:
    """``count`` slabs of ``slab_bytes``, a multiple of a page; the last one has the rest too."""

    size_bytes: int
    slab_bytes: int
    count: int

    @classmethod
    def of(cls, size_bytes: int) -> Self:
        """`SLABS` slabs, fewer in a segment of fewer pages."""
        slab_bytes = max(ALIGN_BYTES, size_bytes // SLABS // ALIGN_BYTES * ALIGN_BYTES)
        return cls(size_bytes, slab_bytes, max(1, min(SLABS, size_bytes // slab_bytes)))

    @property
    def most_slot_bytes(self) -> int:
        """The largest slot for which a slab wastes at most `MOST_WASTE` of its bytes."""
        return int(self.slab_bytes * MOST_WASTE / 2)

    def least_size(self, slot_bytes: int) -> int:
        """Bytes of a segment that is large enough to share with slots of this size."""
        least = -(-int(2 * slot_bytes / MOST_WASTE) // ALIGN_BYTES) * ALIGN_BYTES
        return least * SLABS

    def bounds(self, slab: int) -> tuple[int, int]:
        """Offsets of the slab's first byte, and of the one after its last."""
        start = slab * self.slab_bytes
        return start, self.size_bytes if slab == self.count - 1 else start + self.slab_bytes

    def touched(self, slot: int, slot_bytes: int) -> range:
        """The slabs that a slot has bytes in."""
        first, last = slot * slot_bytes, (slot + 1) * slot_bytes - 1
        return range(self._at(first), self._at(last) + 1)

    def touching(self, slab: int, slot_bytes: int) -> range:
        """The slots that have bytes in a slab."""
        start, end = self.bounds(slab)
        slots = self.size_bytes // slot_bytes
        return range(min(slots, start // slot_bytes), min(slots, -(-end // slot_bytes)))

    def whole(self, slab: int, own: Set[int], slot_bytes: int) -> Iterator[int]:
        """The slots that exist with bytes in ``slab``, for who owns the slabs ``own``."""
        start, end = self.bounds(slab)
        inside = range(-(-start // slot_bytes), end // slot_bytes)
        for slot in self.touching(slab, slot_bytes) if slab in own else ():
            if slot in inside or all(other in own for other in self.touched(slot, slot_bytes)):
                yield slot

    def bytes_of(self, own: Set[int]) -> int:
        """Size of the slabs ``own`` together."""
        return sum(end - start for start, end in map(self.bounds, own))

    def _at(self, offset: int) -> int:
        return min(self.count - 1, offset // self.slab_bytes)
