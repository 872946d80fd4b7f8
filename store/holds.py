"""What a pool hands out and gets back: pins on blocks that are there, reservations for new ones,
victims that leave.

Pins and reservations are context managers and may be given back early. Owned by who asked for
them, used on the pool's event loop.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from prefixfleet.store.chain import BlockHash

NO_SLOT = -1


class Pin:
    """Blocks that stay in place until `release`, and their slots, aligned."""

    __slots__ = ("_unpin", "hashes", "slots")

    def __init__(
        self, hashes: tuple[BlockHash, ...], slots: tuple[int, ...], unpin: Callable[[int], None]
    ) -> None:
        self.hashes = hashes
        self.slots = slots
        self._unpin: Callable[[int], None] | None = unpin

    def release(self) -> None:
        """Let them go; repeated calls do nothing."""
        unpin, self._unpin = self._unpin, None
        if unpin is not None:
            for slot in self.slots:
                unpin(slot)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Reservation:
    """Slots for blocks that are being written, aligned with ``hashes``; -1: not yours to write.

    Leaving it as a context manager abandons what was not committed.
    """

    __slots__ = ("_commit", "_give_back", "_open", "hashes", "slots")

    def __init__(
        self,
        hashes: tuple[BlockHash, ...],
        slots: tuple[int, ...],
        commit: Callable[[int], bool],
        give_back: Callable[[int, bool], None],
    ) -> None:
        self.hashes = hashes
        self.slots = slots
        self._open = {b: s for b, s in zip(hashes, slots, strict=True) if s != NO_SLOT}
        self._commit = commit
        self._give_back = give_back

    def commit(self, block: BlockHash) -> bool:
        """The slot holds the whole block: it becomes resident. False, and the slot is given
        back, when its parent is not resident; False too for a block that is not held here."""
        slot = self._open.pop(block, NO_SLOT)
        return slot != NO_SLOT and self._commit(slot)

    def abandon(self, block: BlockHash) -> None:
        """Give the slot back unused; nothing happens for a block that is not held here."""
        if (slot := self._open.pop(block, NO_SLOT)) != NO_SLOT:
            self._give_back(slot, False)

    def quarantine(self, block: BlockHash) -> int:
        """Put the slot aside until `SlotPool.release_quarantine`: something may still write
        there. Returns the slot, -1 for a block that is not held here."""
        slot = self._open.pop(block, NO_SLOT)
        if slot != NO_SLOT:
            self._give_back(slot, True)
        return slot

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for block in reversed(list(self._open)):
            self.abandon(block)


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Slots by what they are used for. All but ``pinned`` add up to the pool's capacity."""

    free: int
    resident: int
    reserved: int
    leaving: int
    quarantined: int
    pinned: int  # resident or leaving, and read by somebody


@dataclass(frozen=True, slots=True)
class Victims:
    """Blocks on their way out: withdraw ``hashes`` from the index, then `SlotPool.free` this,
    once, whatever the withdrawal did (in a ``finally``)."""

    hashes: tuple[BlockHash, ...]
    slots: tuple[int, ...]
    parents: tuple[BlockHash, ...] = ()  # of each, empty at a chain's root
    uses: tuple[int, ...] = ()  # requests that found each since it came, 255 at most

    def __add__(self, others: "Victims") -> "Victims":
        return Victims(
            self.hashes + others.hashes,
            self.slots + others.slots,
            self.parents + others.parents,
            self.uses + others.uses,
        )
