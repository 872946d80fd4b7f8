"""`Assembly`: what one pull still has to read, and which blocks have become whole. No I/O.

Portions may come from several sources and in any order; blocks are committed in the order of the
chain, since a block without those before it is of no use.
"""

import bisect
from collections.abc import Sequence

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.holds import NO_SLOT, Reservation
from prefixfleet.store.pool import SlotPool

Work = tuple[int, ...]
"""Blocks that one call reads: their positions in the pulled chain, ascending."""


class Assembly:
    """Owned by one pull. Ends before the first block that has no slot and is not here either.

    ``end`` blocks can be here at most, ``blocks`` leading ones are, ``committed`` of them came
    by this pull.
    """

    def __init__(self, reservation: Reservation, pool: SlotPool, blocks_at_once: int) -> None:
        self._reservation = reservation
        reads, self.end = _to_read(reservation, pool)
        self._todo = [
            tuple(reads[i : i + blocks_at_once]) for i in range(0, len(reads), blocks_at_once)
        ]
        self._after = dict(zip(reads, [*reads[1:], self.end], strict=False))
        self._proved: set[int] = set()
        self._under_way = 0  # blocks that somebody took and did not bring or give back yet
        self.blocks = reads[0] if reads else self.end
        self.committed = 0

    @property
    def finished(self) -> bool:
        """Whether every block is here that can be."""
        return self.blocks == self.end

    @property
    def settled(self) -> bool:
        """Whether it is finished and nobody writes into a slot of it any more."""
        return self.finished and not self._under_way

    @property
    def next(self) -> int | None:
        """The first block that nobody has taken."""
        return self._todo[0][0] if self._todo else None

    def take(self, have: int) -> Work | None:
        """The first work that nobody has taken, from a source of ``have`` leading blocks.

        Cut where the source ends; the rest stays. None when there is nothing for it to do.
        """
        if not self._todo or self._todo[0][0] >= have:
            return None
        work = self._todo.pop(0)
        cut = bisect.bisect_left(work, have)
        if cut < len(work):
            self._todo.insert(0, work[cut:])
        self._under_way += cut
        return work[:cut]

    def give_back(self, work: Work) -> None:
        """It was not read; somebody else may. Nothing may still write into its slots."""
        self._under_way -= len(work)
        if work[0] < self.end:
            bisect.insort(self._todo, work)

    def hashes(self, work: Work) -> list[BlockHash]:
        """Blocks of a work."""
        return [self._reservation.hashes[i] for i in work]

    def slots(self, work: Work) -> list[int]:
        """Where they belong."""
        return [self._reservation.slots[i] for i in work]

    def landed(self, work: Sequence[int]) -> None:
        """These blocks are read and proved: commit what is whole up to the first gap.

        If a block before them left the pool meanwhile, the assembly ends there.
        """
        self._under_way -= len(work)
        self._proved.update(work)
        while self.blocks in self._proved and self.blocks < self.end:
            if self._reservation.commit(self._reservation.hashes[self.blocks]):
                self.committed += 1
                self.blocks = self._after[self.blocks]
            else:
                self.end = self.blocks
                self._todo.clear()

    def quarantine(self, work: Work) -> list[int]:
        """Something may still write there: keep the slots from everybody. Returns them."""
        self._under_way -= len(work)
        slots = (self._reservation.quarantine(block) for block in self.hashes(work))
        return [slot for slot in slots if slot != NO_SLOT]


def _to_read(reservation: Reservation, pool: SlotPool) -> tuple[list[int], int]:
    """Positions of the blocks to read, and how many blocks are here when they are."""
    reads: list[int] = []
    for i, slot in enumerate(reservation.slots):
        if slot != NO_SLOT:
            reads.append(i)
        elif not pool.match([reservation.hashes[i]]):
            return reads, i
    return reads, len(reservation.slots)
