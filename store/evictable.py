"""`EvictableBlocks`: which of a pool's blocks may leave, which goes next, and how they go.

One half of the books of a `SlotPool`; who holds blocks is the other. Resident blocks always form
unbroken chains from a root, so what leaves is a leaf.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.eviction import EvictionOrder
from prefixfleet.store.holds import NO_SLOT, Victims
from prefixfleet.store.slot_table import FREE, GONE, LEAVING, SlotTable

SAMPLE = 1024
"""Blocks by which a pool judges how long what it holds was not used."""


class EvictableBlocks:
    """The base of `SlotPool`, which pins and writes what this lets go."""

    def __init__(self, table: SlotTable, order: EvictionOrder, clock: Callable[[], float]) -> None:
        self.num_slots = table.num_slots
        self._table = table
        self._order = order
        self._clock = clock
        self._began = clock()
        self._pins = array("I", [0]) * table.num_slots
        self._offered = bytearray(table.num_slots)
        self._uses = bytearray(table.num_slots)
        self._used_s = array("f", [0.0]) * table.num_slots  # since the beginning

    @property
    def can_evict(self) -> bool:
        """Whether any block may leave now."""
        return self._order.first(now=self._clock()) is not None

    def observe(self, chain: Sequence[BlockHash]) -> None:
        """Tell the eviction order that a request asks for ``chain``, from its root. Once a
        request, and before its blocks are pinned: an order that learns lives on it."""
        here = self._table.run(chain)
        for slot in here:
            self._uses[slot] = min(255, self._uses[slot] + 1)
        self._order.observe(chain, len(here), now=self._clock())

    def soon(self, count: int) -> tuple[BlockHash, ...]:
        """Up to ``count`` blocks of which the eviction order wants to know, before they go, whether
        other nodes hold them too: see `note_copies`."""
        return tuple(self._table.hash[slot] for slot in self._order.soon(count))

    def note_copies(self, copies: Mapping[BlockHash, int]) -> None:
        """So many other nodes hold these blocks, as the index said of late; and with a block all
        that lie before it, as every node evicts leaves first."""
        for block, others in copies.items():
            slot = self._table.find(block)
            while self._table.is_resident(slot):
                news = self._order.note_copies(slot, others)
                slot = self._table.tree.parent(slot) if news and others else NO_SLOT

    def worth(self, block: BlockHash) -> float:
        """What the eviction order would give to store this block: see `EvictionOrder.worth`."""
        return self._order.worth(block)

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
        slots = (self._table.find(block) for block in hashes)
        return self._victims([(s, self._leave(s)) for s in slots if s >= 0 and self._offered[s]])

    def drop(self, block: BlockHash) -> Victims:
        """A corrupt block and every resident block after it leave, also where they are pinned.

        Nobody is given their slots before the last pin is released.
        """
        table = self._table
        slot = table.find(block)
        if not table.is_resident(slot):
            return Victims((), ())
        doomed = [member for member in table.tree.subtree(slot) if table.is_resident(member)]
        doomed.reverse()  # leaf first
        return self._victims([(member, self._leave(member)) for member in doomed])

    def free(self, victims: Victims) -> None:
        """Give the slots of ``victims`` away. Call it once, after they are withdrawn."""
        for block, slot in zip(victims.hashes, victims.slots, strict=True):
            assert self._table.state[slot] == LEAVING, f"slot {slot} was freed already"
            assert self._table.hash[slot] == block, f"slot {slot} holds another block"
            self._table.forget(slot, GONE if self._pins[slot] else FREE)

    def idle_s(self) -> float:
        """How long ago the block was used that nobody asked for longest, of `SAMPLE` that are
        resident and not pinned; 0 where there is none."""
        step = max(1, self.num_slots // SAMPLE)
        used = [
            self._used_s[slot]
            for slot in range(0, self.num_slots, step)
            if self._table.is_resident(slot) and not self._pins[slot]
        ]
        return self._clock() - self._began - min(used) if used else 0.0

    def _enter(self, slot: int) -> None:
        """The block in ``slot`` is resident now."""
        now = self._clock()
        self._uses[slot] = 0
        self._used_s[slot] = now - self._began
        table = self._table
        self._order.insert(slot, table.hash[slot], parent=table.parent_hash(slot), now=now)
        self._review(slot)

    def _touch(self, slot: int, now: float) -> None:
        """The block in ``slot`` was used."""
        self._used_s[slot] = now - self._began
        self._order.touch(slot, now=now)

    def _evictable(self, slot: int) -> bool:
        leaf = self._table.tree.is_leaf(slot)
        return leaf and not self._pins[slot] and self._table.is_resident(slot)

    def _review(self, slot: int) -> None:
        """Tell the order whether the block may go, if that changed."""
        evictable = self._evictable(slot)
        if evictable != self._offered[slot]:
            self._offered[slot] = evictable
            (self._order.offer if evictable else self._order.retract)(slot)

    def _leave(self, slot: int) -> BlockHash:
        """The block is on its way out; its parent."""
        parent = self._table.parent_hash(slot)
        self._table.leave(slot)
        self._review(slot)
        self._order.remove(slot)
        self._cut(slot)
        return parent

    def _cut(self, slot: int) -> None:
        parent = self._table.tree.remove(slot)
        if parent >= 0:
            self._review(parent)

    def _victims(self, leaving: Sequence[tuple[int, BlockHash]]) -> Victims:
        slots = tuple(slot for slot, _ in leaving)
        return Victims(
            hashes=tuple(self._table.hash[slot] for slot in slots),
            slots=slots,
            parents=tuple(parent for _, parent in leaving),
            uses=tuple(self._uses[slot] for slot in slots),
        )
