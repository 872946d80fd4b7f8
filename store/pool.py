"""`SlotPool`: which block lies in which slot of a node's DRAM pool, and who forbids its eviction.

Numbers only: no bytes, no I/O. A block is *reserved* (being written), then *resident* (whole,
matched), then *leaving* (on its way out of the index, no longer matched), then gone. Resident
blocks always form unbroken chains from a root.
"""

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prefixfleet.store.chain import SEGMENT_BLOCKS, BlockHash
from prefixfleet.store.eviction import EvictionOrder
from prefixfleet.store.holds import NO_SLOT as NO_SLOT
from prefixfleet.store.holds import Pin as Pin
from prefixfleet.store.holds import Reservation as Reservation
from prefixfleet.store.slot_tree import ORPHAN, ROOT, SlotTree

_FREE, _RESERVED, _RESIDENT, _LEAVING, _GONE, _QUARANTINED = range(6)
"""States of a slot. Gone: withdrawn and forgotten, but a pin still reads it."""


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Slots by what they are used for. All but ``pinned`` add up to the size of the pool."""

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


class SlotPool:
    """The books of one pool of ``num_slots`` slots.

    Owned by the node daemon's event loop; not thread-safe. Takes about 60 bytes a slot, and a
    dict entry a block.
    """

    def __init__(self, num_slots: int, order: EvictionOrder, clock: Callable[[], float]) -> None:
        self.num_slots = num_slots
        self._order = order
        self._clock = clock
        self._slot_of: dict[BlockHash, int] = {}  # parents always before their children
        self._hash: list[BlockHash] = [b""] * num_slots
        self._head: list[BlockHash] = [b""] * num_slots
        self._state = bytearray(num_slots)
        self._pins = array("I", [0]) * num_slots
        self._offered = bytearray(num_slots)
        self._uses = bytearray(num_slots)
        self._tree = SlotTree(num_slots)
        self._free = array("i", range(num_slots - 1, -1, -1))

    @property
    def free_slots(self) -> int:
        """Slots that `reserve` can hand out now."""
        return len(self._free)

    @property
    def can_evict(self) -> bool:
        """Whether any block may leave now."""
        return self._order.first(now=self._clock()) is not None

    def match(self, chain: Sequence[BlockHash]) -> int:
        """Number of leading blocks of ``chain`` that are resident."""
        return len(self._run(chain))

    def pin(self, hashes: Sequence[BlockHash], *, used: bool = True) -> Pin:
        """Keep the leading resident run of ``hashes`` in place until the pin is released.

        You *must* release it; it is a context manager. Pinning counts as a use of each block,
        unless you say that they are not ``used``.
        """
        now = self._clock()
        slots = self._run(hashes)
        for slot in slots:
            self._pins[slot] += 1
            if self._offered[slot]:
                self._review(slot)
            if used:
                self._order.touch(slot, now=now)
        return Pin(tuple(hashes[: len(slots)]), tuple(slots), self._unpin)

    def reserve(self, parent: BlockHash, hashes: Sequence[BlockHash]) -> Reservation:
        """Free slots for ``hashes``, a chain that follows ``parent`` (empty at the root).

        Slots are aligned with ``hashes``: -1 for a block that is resident or reserved already,
        and for all from the first one on that cannot be had (no slot is free, the parent is not
        here, the block is leaving). Pin the parent first, or it may be evicted meanwhile.
        """
        slots = [NO_SLOT] * len(hashes)
        above = ROOT if parent == b"" else self._slot_of.get(parent, ORPHAN)
        for i, block in enumerate(hashes):
            if above != ROOT and not self._may_be_followed(above):
                break
            slot = self._slot_of.get(block)
            if slot is None:
                if not self._free:
                    break
                slot = slots[i] = self._occupy(block, above)
            above = slot
        return Reservation(tuple(hashes), tuple(slots), self._commit, self._abandon)

    def restore(self, blocks: Iterable[tuple[int, BlockHash, BlockHash]]) -> None:
        """Fill an empty pool with blocks that lie in known slots: (slot, hash, parent), each
        parent before its children. They are resident afterwards."""
        assert not self._slot_of, "only an empty pool can be restored"
        taken = bytearray(self.num_slots)
        for slot, block, parent in blocks:
            assert not taken[slot], f"slot {slot} is named twice"
            taken[slot] = True
            self._enter(slot, block, ROOT if parent == b"" else self._slot_of[parent])
            self._commit(slot)
        self._free = array("i", (s for s in range(self.num_slots - 1, -1, -1) if not taken[s]))

    def knows(self, block: BlockHash) -> bool:
        """Whether the block is here in any way: being written, resident or on its way out."""
        return block in self._slot_of

    def position_after(self, parent: BlockHash) -> int:
        """Place in its chain of what follows ``parent``; 0 after one that is not here."""
        slot = self._slot_of.get(parent, NO_SLOT)
        return self._tree.depth(slot) + 1 if slot >= 0 else 0

    def position(self, slot: int) -> int:
        """Place in its chain of the block in ``slot``; 0 at the root."""
        return self._tree.depth(slot)

    def observe(self, chain: Sequence[BlockHash]) -> None:
        """Tell the eviction order that a request asks for ``chain``, from its root. Once a
        request, and before its blocks are pinned: an order that learns lives on it."""
        here = self._run(chain)
        for slot in here:
            self._uses[slot] = min(255, self._uses[slot] + 1)
        self._order.observe(chain, len(here), now=self._clock())

    def chain_to(self, block: BlockHash) -> list[BlockHash]:
        """The resident blocks from the chain's root to ``block``; none if it is not resident."""
        slot = self._slot_of.get(block, NO_SLOT)
        path: list[BlockHash] = []
        while slot >= 0 and self._state[slot] == _RESIDENT:
            path.append(self._hash[slot])
            slot = self._tree.parent(slot)
        return path[::-1]

    def soon(self, count: int) -> tuple[BlockHash, ...]:
        """Up to ``count`` blocks of which the eviction order wants to know, before they go, whether
        other nodes hold them too: see `note_copies`."""
        return tuple(self._hash[slot] for slot in self._order.soon(count))

    def note_copies(self, copies: Mapping[BlockHash, int]) -> None:
        """So many other nodes hold these blocks, as the index said of late; and with a block all
        that lie before it, as every node evicts leaves first."""
        for block, others in copies.items():
            slot = self._slot_of.get(block, NO_SLOT)
            while slot >= 0 and self._state[slot] == _RESIDENT:
                news = self._order.note_copies(slot, others)
                slot = self._tree.parent(slot) if news and others else NO_SLOT

    def worth(self, block: BlockHash, position: int) -> float:
        """What the eviction order would give to store this block: see `EvictionOrder.worth`."""
        return self._order.worth(block, position=position)

    def choose_victims(self, count: int, *, below: float = math.inf) -> Victims:
        """Up to ``count`` blocks that leave, leaf first, in the pool's eviction order.

        Never a pinned block, nor one that others follow. Fewer come back when no more may go, or
        none is worth less than ``below``.
        """
        leaving: list[tuple[int, BlockHash]] = []
        now = self._clock()
        while len(leaving) < count:
            if (slot := self._order.first(now=now, below=below)) is None:
                break
            leaving.append((slot, self._leave(slot)))
        return self._victims(leaving)

    def expel(self, hashes: Iterable[BlockHash]) -> Victims:
        """Those of ``hashes`` that may go leave, whatever they are worth. Name leaves first."""
        slots = (self._slot_of.get(block, NO_SLOT) for block in hashes)
        return self._victims([(s, self._leave(s)) for s in slots if s >= 0 and self._offered[s]])

    def drop(self, block: BlockHash) -> Victims:
        """A corrupt block and every resident block after it leave, also where they are pinned.

        Nobody is given their slots before the last pin is released.
        """
        slot = self._slot_of.get(block)
        if slot is None or self._state[slot] != _RESIDENT:
            return Victims((), ())
        doomed = [s for s in self._tree.subtree(slot) if self._state[s] == _RESIDENT]
        doomed.reverse()  # leaf first
        return self._victims([(member, self._leave(member)) for member in doomed])

    def free(self, victims: Victims) -> None:
        """Give the slots of ``victims`` away. Call it once, after they are withdrawn."""
        for block, slot in zip(victims.hashes, victims.slots, strict=True):
            assert self._state[slot] == _LEAVING, f"slot {slot} was freed already"
            assert self._hash[slot] == block, f"slot {slot} holds another block"
            self._forget(slot, _GONE if self._pins[slot] else _FREE)

    def release_quarantine(self, slots: Iterable[int]) -> None:
        """Give slots away that `Reservation.quarantine` put aside: nothing writes there now."""
        for slot in slots:
            assert self._state[slot] == _QUARANTINED, f"slot {slot} is not in quarantine"
            self._set_free(slot)

    def segments_of(self, hashes: Iterable[BlockHash]) -> dict[BlockHash, list[BlockHash]]:
        """Blocks of the pool, leaving ones too, grouped by the head of their index segment."""
        groups: dict[BlockHash, list[BlockHash]] = {}
        for block in hashes:
            if (slot := self._slot_of.get(block)) is not None:
                groups.setdefault(self._head[slot], []).append(block)
        return groups

    def resident(self) -> Iterator[tuple[BlockHash, BlockHash]]:
        """Every resident block with its segment's head, parents first. Use it up before the
        pool changes."""
        for block, slot in self._slot_of.items():
            if self._state[slot] == _RESIDENT:
                yield block, self._head[slot]

    def chains(self) -> Iterator[list[BlockHash]]:
        """Each resident block that no resident block follows, with all before it, root first.
        Use it up before the pool changes."""
        for slot in range(self.num_slots):
            if self._state[slot] != _RESIDENT:
                continue
            if any(self._state[child] == _RESIDENT for child in self._tree.children(slot)):
                continue
            chain = []
            while slot >= 0:
                chain.append(self._hash[slot])
                slot = self._tree.parent(slot)
            yield chain[::-1]

    def counts(self) -> PoolCounts:
        """How many slots are in which state."""
        return PoolCounts(
            free=len(self._free),
            resident=self._state.count(_RESIDENT),
            reserved=self._state.count(_RESERVED),
            leaving=self._state.count(_LEAVING) + self._state.count(_GONE),
            quarantined=self._state.count(_QUARANTINED),
            pinned=self.num_slots - self._pins.count(0),
        )

    def check(self) -> None:
        """Prove that no slot is lost or used twice and that resident blocks form chains.

        Raises:
            AssertionError: a fault of this class.
        """
        free = Counter(self._free)
        for slot in range(self.num_slots):
            state = self._state[slot]
            assert free[slot] == (state == _FREE), f"slot {slot}: state {state}, free list differs"
            assert self._offered[slot] == self._evictable(slot), f"slot {slot}: order not told"
            if self._pins[slot]:
                assert state in (_RESIDENT, _LEAVING, _GONE), f"slot {slot}"
            known = state in (_RESERVED, _RESIDENT, _LEAVING)
            assert known == (self._slot_of.get(self._hash[slot]) == slot), (
                f"slot {slot}: state {state}"
            )
            self._check_place(slot, state)
        counts = self.counts()
        total = counts.free + counts.resident + counts.reserved + counts.leaving
        assert total + counts.quarantined == self.num_slots
        assert len(self._slot_of) == sum(
            self._state.count(s) for s in (_RESERVED, _RESIDENT, _LEAVING)
        )

    def _check_place(self, slot: int, state: int) -> None:
        parent = self._tree.parent(slot)
        if state not in (_RESERVED, _RESIDENT):
            assert parent == ORPHAN, f"slot {slot}: still in the tree"
            assert self._tree.is_leaf(slot), f"slot {slot}: still has children"
            return
        if parent >= 0:
            assert self._may_be_followed(parent), f"slot {slot}: parent {parent} is gone"
            assert slot in self._tree.children(parent)
            assert self._tree.depth(slot) == self._tree.depth(parent) + 1
        if state == _RESIDENT:
            assert parent == ROOT or self._state[parent] == _RESIDENT, f"slot {slot}: hole"

    def _run(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Slots of the leading resident blocks."""
        slots: list[int] = []
        for block in hashes:
            slot = self._slot_of.get(block, NO_SLOT)
            if slot == NO_SLOT or self._state[slot] != _RESIDENT:
                break
            slots.append(slot)
        return slots

    def _may_be_followed(self, slot: int) -> bool:
        return slot >= 0 and self._state[slot] in (_RESIDENT, _RESERVED)

    def _evictable(self, slot: int) -> bool:
        return self._state[slot] == _RESIDENT and not self._pins[slot] and self._tree.is_leaf(slot)

    def _review(self, slot: int) -> None:
        """Tell the order whether the block may go, if that changed."""
        evictable = self._evictable(slot)
        if evictable != self._offered[slot]:
            self._offered[slot] = evictable
            (self._order.offer if evictable else self._order.retract)(slot)

    def _occupy(self, block: BlockHash, parent: int) -> int:
        slot = self._free.pop()
        self._enter(slot, block, parent)
        return slot

    def _enter(self, slot: int, block: BlockHash, parent: int) -> None:
        self._slot_of[block] = slot
        self._hash[slot] = block
        self._state[slot] = _RESERVED
        self._tree.add(slot, parent)
        if self._tree.depth(slot) % SEGMENT_BLOCKS == 0:
            self._head[slot] = block
        else:
            self._head[slot] = self._head[parent]
        if parent != ROOT:
            self._review(parent)

    def _commit(self, slot: int) -> bool:
        parent = self._tree.parent(slot)
        if parent != ROOT and (parent == ORPHAN or self._state[parent] != _RESIDENT):
            self._abandon(slot, quarantine=False)
            return False
        self._state[slot] = _RESIDENT
        self._uses[slot] = 0
        self._order.insert(
            slot,
            self._hash[slot],
            parent=b"" if parent == ROOT else self._hash[parent],
            position=self._tree.depth(slot),
            now=self._clock(),
        )
        self._review(slot)
        return True

    def _abandon(self, slot: int, quarantine: bool) -> None:
        """Take a reserved slot back."""
        self._cut(slot)
        self._forget(slot, _QUARANTINED if quarantine else _FREE)

    def _leave(self, slot: int) -> BlockHash:
        """The block is on its way out; its parent."""
        parent = self._tree.parent(slot)
        self._state[slot] = _LEAVING
        self._review(slot)
        self._order.remove(slot)
        self._cut(slot)
        return b"" if parent == ROOT else self._hash[parent]

    def _cut(self, slot: int) -> None:
        parent = self._tree.remove(slot)
        if parent >= 0:
            self._review(parent)

    def _forget(self, slot: int, after: int) -> None:
        del self._slot_of[self._hash[slot]]
        self._hash[slot] = self._head[slot] = b""
        self._state[slot] = after
        if after == _FREE:
            self._set_free(slot)

    def _set_free(self, slot: int) -> None:
        self._state[slot] = _FREE
        self._free.append(slot)

    def _unpin(self, slot: int) -> None:
        self._pins[slot] -= 1
        if self._pins[slot]:
            return
        if self._state[slot] == _GONE:
            self._set_free(slot)
        else:
            self._review(slot)

    def _victims(self, leaving: Sequence[tuple[int, BlockHash]]) -> Victims:
        slots = tuple(slot for slot, _ in leaving)
        return Victims(
            hashes=tuple(self._hash[slot] for slot in slots),
            slots=slots,
            parents=tuple(parent for _, parent in leaving),
            uses=tuple(self._uses[slot] for slot in slots),
        )
