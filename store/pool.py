"""`SlotPool`: who holds a block of a node's DRAM pool, who writes one, and which slots are here.

Numbers only: no bytes, no I/O. What may leave is the matter of `EvictableBlocks`, which block lies
where that of its `SlotTable`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.evictable import EvictableBlocks
from prefixfleet.store.eviction import EvictionOrder
from prefixfleet.store.holds import NO_SLOT, Pin, PoolCounts, Reservation
from prefixfleet.store.slot_table import (
    ABSENT,
    FREE,
    GONE,
    LEAVING,
    QUARANTINED,
    RESERVED,
    RESIDENT,
    SlotTable,
)
from prefixfleet.store.slot_tree import ORPHAN, ROOT

SAMPLE_OF_SOME = 64
"""Blocks by which a pool judges how deep in their chains neighbouring ones are, and how old."""


class SlotPool(EvictableBlocks):
    """The books of one pool of ``num_slots`` slots.

    Owned by the node daemon's event loop; not thread-safe. A pool that shares its memory with
    others begins ``absent``, without a slot; they come (`grow`) and go (`shrink`).
    """

    def __init__(
        self,
        num_slots: int,
        order: EvictionOrder,
        clock: Callable[[], float],
        *,
        absent: bool = False,
    ) -> None:
        super().__init__(SlotTable(num_slots, absent=absent), order, clock)

    @property
    def free_slots(self) -> int:
        """Slots that `reserve` can hand out now."""
        return len(self._table.free)

    @property
    def capacity(self) -> int:
        """Slots that are here now; all ``num_slots`` where the memory is not shared."""
        return self._table.present

    def match(self, chain: Sequence[BlockHash]) -> int:
        """Number of leading blocks of ``chain`` that are resident."""
        return len(self._table.run(chain))

    def pin(self, hashes: Sequence[BlockHash], *, used: bool = True) -> Pin:
        """Keep the leading resident run of ``hashes`` in place until the pin is released.

        You *must* release it; it is a context manager. Pinning counts as a use of each block,
        unless you say that they are not ``used``.
        """
        now = self._clock()
        slots = self._table.run(hashes)
        for slot in slots:
            self._pins[slot] += 1
            if self._offered[slot]:
                self._review(slot)
            if used:
                self._touch(slot, now)
        return Pin(tuple(hashes[: len(slots)]), tuple(slots), self._unpin)

    def pin_leaving(self, slots: Sequence[int]) -> Pin:
        """Keep what is on its way out of these slots in place: until the pin is released, `free`
        gives them to nobody."""
        for slot in slots:
            assert self._table.state[slot] == LEAVING, f"slot {slot} is not leaving"
            self._pins[slot] += 1
        return Pin(tuple(self._table.hash[slot] for slot in slots), tuple(slots), self._unpin)

    def reserve(self, parent: BlockHash, hashes: Sequence[BlockHash]) -> Reservation:
        """Free slots for ``hashes``, a chain that follows ``parent`` (empty at the root).

        Slots are aligned with ``hashes``: -1 for a block that is resident or reserved already,
        and for all from the first one on that cannot be had (no slot is free, the parent is not
        here, the block is leaving). Pin the parent first, or it may be evicted meanwhile.
        """
        table = self._table
        slots = [NO_SLOT] * len(hashes)
        above = ROOT if parent == b"" else table.slot_of.get(parent, ORPHAN)
        for i, block in enumerate(hashes):
            if above != ROOT and not table.may_be_followed(above):
                break
            slot = table.find(block)
            if slot == NO_SLOT:
                if not table.free:
                    break
                slot = slots[i] = table.occupy(block, above)
                if above != ROOT:
                    self._review(above)
            above = slot
        return Reservation(tuple(hashes), tuple(slots), self._commit, self._abandon)

    def restore(self, blocks: Iterable[tuple[int, BlockHash, BlockHash]]) -> None:
        """Fill an empty pool with blocks that lie in known slots: (slot, hash, parent), each
        parent before its children. They are resident afterwards."""
        for slot in self._table.fill(blocks):
            if (parent := self._table.tree.parent(slot)) != ROOT:
                self._review(parent)
            self._commit(slot)

    def may_follow(self, parent: BlockHash) -> bool:
        """Whether new blocks may come after ``parent``, empty at the root."""
        return parent == b"" or self._table.may_be_followed(self._table.find(parent))

    def knows(self, block: BlockHash) -> bool:
        """Whether the block is here in any way: being written, resident or on its way out."""
        return self._table.find(block) != NO_SLOT

    def position(self, slot: int) -> int:
        """Place in its chain of the block in ``slot``; 0 at the root."""
        return self._table.tree.depth(slot)

    def chain_to(self, block: BlockHash) -> list[BlockHash]:
        """The resident blocks from the chain's root to ``block``; none if it is not resident."""
        return self._table.chain_to(self._table.find(block))

    def release_quarantine(self, slots: Iterable[int]) -> None:
        """Give slots away that `Reservation.quarantine` put aside: nothing writes there now."""
        for slot in slots:
            assert self._table.state[slot] == QUARANTINED, f"slot {slot} is not in quarantine"
            self._table.set_free(slot)

    def grow(self, slots: Iterable[int]) -> None:
        """Slots that were absent are here, free; those of them that were to go stay."""
        self._table.come(slots)

    def shrink(self, slots: Iterable[int]) -> None:
        """Slots go: the free ones now, the others when nobody reads or writes them any more. What
        is resident in them stays until it is evicted: see `standing_on`."""
        self._table.call(slots)

    def absent(self, slots: range) -> bool:
        """Whether none of these slots is here: their memory is somebody else's."""
        return self._table.states(slots).count(ABSENT) == len(slots)

    def held(self, slots: range) -> int:
        """Those of ``slots`` that no eviction frees now: pinned, being written, in quarantine."""
        states = self._table.states(slots)
        unpinned = self._pins[slots.start : slots.stop].count(0)
        return len(slots) - unpinned + states.count(RESERVED) + states.count(QUARANTINED)

    def in_use(self, slots: range) -> int:
        """Those of ``slots`` that are here and not free."""
        states = self._table.states(slots)
        return len(slots) - states.count(FREE) - states.count(ABSENT)

    def depth_in(self, slots: range) -> float:
        """Average place in their chains of the blocks in ``slots``, of a sample: the deeper they
        are, the fewer follow them. 0 where there is none."""
        step = max(1, len(slots) // SAMPLE_OF_SOME)
        depths = [self.position(slot) for slot in slots[::step] if self._table.is_resident(slot)]
        return sum(depths) / len(depths) if depths else 0.0

    def age_in(self, slots: range) -> float:
        """Average seconds since the blocks in ``slots`` were used, of a sample; infinite where
        there is none."""
        now = self._clock() - self._began
        step = max(1, len(slots) // SAMPLE_OF_SOME)
        used = [self._used_s[slot] for slot in slots[::step] if self._table.is_resident(slot)]
        return now - sum(used) / len(used) if used else math.inf

    def standing_on(self, slots: Iterable[int], *, most: int | None = None) -> list[BlockHash]:
        """The resident blocks in ``slots`` and all that follow them, leaves first: those whom
        `expel` must let go before the slots are free. With ``most``, it gives up beyond so many:
        then what comes back is longer, and not all."""
        return self._table.standing_on(slots, most)

    def segments_of(self, hashes: Iterable[BlockHash]) -> dict[BlockHash, list[BlockHash]]:
        """Blocks of the pool, leaving ones too, grouped by the head of their index segment."""
        return self._table.segments_of(hashes)

    def resident(self) -> Iterator[tuple[BlockHash, BlockHash]]:
        """Every resident block with its segment's head, parents first. Use it up before the
        pool changes."""
        return self._table.resident()

    def leaving(self) -> Iterator[BlockHash]:
        """Every block on its way out; it may be elsewhere on this node when it has left. Use it up
        before the pool changes."""
        return self._table.leaving()

    def chains(self) -> Iterator[list[BlockHash]]:
        """Each resident block that no resident block follows, with all before it, root first.
        Use it up before the pool changes."""
        return self._table.chains()

    def counts(self) -> PoolCounts:
        """How many slots are in which state, of those that are here."""
        return PoolCounts(
            free=len(self._table.free),
            resident=self._table.count(RESIDENT),
            reserved=self._table.count(RESERVED),
            leaving=self._table.count(LEAVING, GONE),
            quarantined=self._table.count(QUARANTINED),
            pinned=self.num_slots - self._pins.count(0),
        )

    def check(self) -> None:
        """Prove that no slot is lost or used twice, that resident blocks form chains, and that
        the eviction order knows what may go.

        Raises:
            AssertionError: a fault of this class.
        """
        self._table.check()
        for slot, state in enumerate(self._table.state):
            assert self._offered[slot] == self._evictable(slot), f"slot {slot}: order not told"
            assert not self._pins[slot] or state in (RESIDENT, LEAVING, GONE), f"slot {slot}"

    def _commit(self, slot: int) -> bool:
        if not self._table.settle(slot):
            self._abandon(slot, quarantine=False)
            return False
        self._enter(slot)
        return True

    def _abandon(self, slot: int, quarantine: bool) -> None:
        """Take a reserved slot back."""
        self._cut(slot)
        self._table.forget(slot, QUARANTINED if quarantine else FREE)

    def _unpin(self, slot: int) -> None:
        self._pins[slot] -= 1
        if self._pins[slot]:
            return
        if self._table.state[slot] == GONE:
            self._table.set_free(slot)
        else:
            self._review(slot)
