"""`SlotTable`: which block lies in which slot of a pool and in which state, and what it follows.

A block is *reserved* (being written), then *resident* (whole, matched), then *leaving* (on its way
out of the index, no longer matched), then gone. A slot whose memory is somebody else's is *absent*.
Must not know who reads a block or what goes first.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator

from prefixfleet.store.chain import SEGMENT_BLOCKS, BlockHash
from prefixfleet.store.holds import NO_SLOT
from prefixfleet.store.slot_tree import ORPHAN, ROOT, SlotTree

FREE, RESERVED, RESIDENT, LEAVING, GONE, QUARANTINED, ABSENT = range(7)
"""States of a slot. Gone: withdrawn and forgotten, but a pin still reads it."""
KNOWN = (RESERVED, RESIDENT, LEAVING)


class SlotTable:
    """Owned by one `SlotPool`, which reads what is public here and changes it by calls only.

    Takes about 60 bytes a slot, and a dict entry a block.
    """

    def __init__(self, num_slots: int, *, absent: bool = False) -> None:
        """``absent``: it has no slot before one comes (`come`)."""
        self.num_slots = num_slots
        self.present = 0 if absent else num_slots
        self.slot_of: dict[BlockHash, int] = {}  # parents always before their children
        self.hash: list[BlockHash] = [b""] * num_slots
        self.state = bytearray([ABSENT if absent else FREE]) * num_slots
        self.tree = SlotTree(num_slots)
        self.free = array("i", () if absent else range(num_slots - 1, -1, -1))
        self._called = bytearray(num_slots)  # goes as soon as it is free
        self._head: list[BlockHash] = [b""] * num_slots

    def find(self, block: BlockHash) -> int:
        """The slot of a block that is here in any way, or `NO_SLOT`."""
        return self.slot_of.get(block, NO_SLOT)

    def is_resident(self, slot: int) -> bool:
        """False for `NO_SLOT`, `ROOT` and `ORPHAN`."""
        return slot >= 0 and self.state[slot] == RESIDENT

    def may_be_followed(self, slot: int) -> bool:
        """Whether a new block may come after this one."""
        return slot >= 0 and self.state[slot] in (RESIDENT, RESERVED)

    def run(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Slots of the leading resident blocks."""
        slots: list[int] = []
        for block in hashes:
            slot = self.slot_of.get(block, NO_SLOT)
            if slot == NO_SLOT or self.state[slot] != RESIDENT:
                break
            slots.append(slot)
        return slots

    def parent_hash(self, slot: int) -> BlockHash:
        """Of a block whose parent is known; empty at a chain's root."""
        parent = self.tree.parent(slot)
        return b"" if parent == ROOT else self.hash[parent]

    def occupy(self, block: BlockHash, parent: int) -> int:
        """A free slot, reserved for ``block``, which follows ``parent``, a slot or `ROOT`."""
        slot = self.free.pop()
        self._enter(slot, block, parent)
        return slot

    def fill(self, blocks: Iterable[tuple[int, BlockHash, BlockHash]]) -> Iterator[int]:
        """Reserve known slots of an empty table: (slot, hash, parent), each parent before its
        children. Yields each slot; use it up."""
        assert not self.slot_of, "only an empty pool can be restored"
        taken = bytearray(self.num_slots)
        for slot, block, parent in blocks:
            assert not taken[slot], f"slot {slot} is named twice"
            assert self.state[slot] == FREE, f"slot {slot} is not here"
            taken[slot] = True
            self._enter(slot, block, ROOT if parent == b"" else self.slot_of[parent])
            yield slot
        self.free = array("i", (slot for slot in self.free if not taken[slot]))

    def settle(self, slot: int) -> bool:
        """A reserved block becomes resident, if its parent is."""
        parent = self.tree.parent(slot)
        if parent != ROOT and not self.is_resident(parent):
            return False
        self.state[slot] = RESIDENT
        return True

    def leave(self, slot: int) -> None:
        """A resident block is matched no more."""
        self.state[slot] = LEAVING

    def forget(self, slot: int, after: int) -> None:
        """Nobody finds the block any more; the slot is free, gone or in quarantine."""
        del self.slot_of[self.hash[slot]]
        self.hash[slot] = self._head[slot] = b""
        self.state[slot] = after
        if after == FREE:
            self.set_free(slot)

    def set_free(self, slot: int) -> None:
        """Nobody uses the slot: it can be handed out, or goes if it was called."""
        if self._called[slot]:
            self._go(slot)
            return
        self.state[slot] = FREE
        self.free.append(slot)

    def come(self, slots: Iterable[int]) -> None:
        """These slots are here from now on; what was called of them stays."""
        for slot in slots:
            self._called[slot] = False
            if self.state[slot] == ABSENT:
                self.present += 1
                self.set_free(slot)

    def call(self, slots: Iterable[int]) -> None:
        """These slots go: now where they are free, else as soon as they are."""
        called = set(slots)
        going = [slot for slot in called if self.state[slot] == FREE]
        for slot in called:
            self._called[slot] = self.state[slot] not in (FREE, ABSENT)
        self.free = array("i", (slot for slot in self.free if slot not in called))
        for slot in going:
            self._go(slot)

    def _go(self, slot: int) -> None:
        self.state[slot] = ABSENT
        self._called[slot] = False
        self.present -= 1

    def chain_to(self, slot: int) -> list[BlockHash]:
        """The resident blocks from the chain's root to ``slot``; none if that one is not."""
        path: list[BlockHash] = []
        while self.is_resident(slot):
            path.append(self.hash[slot])
            slot = self.tree.parent(slot)
        return path[::-1]

    def chains(self) -> Iterator[list[BlockHash]]:
        """Each resident block that no resident block follows, with all before it, root first."""
        for slot in range(self.num_slots):
            if self.state[slot] != RESIDENT:
                continue
            if not any(self.state[child] == RESIDENT for child in self.tree.children(slot)):
                yield self.chain_to(slot)

    def resident(self) -> Iterator[tuple[BlockHash, BlockHash]]:
        """Every resident block with its segment's head, parents first."""
        for block, slot in self.slot_of.items():
            if self.state[slot] == RESIDENT:
                yield block, self._head[slot]

    def leaving(self) -> Iterator[BlockHash]:
        """Every block that is on its way out."""
        return (block for block, slot in self.slot_of.items() if self.state[slot] == LEAVING)

    def segments_of(self, hashes: Iterable[BlockHash]) -> dict[BlockHash, list[BlockHash]]:
        """Blocks that are here in any way, grouped by the head of their index segment."""
        groups: dict[BlockHash, list[BlockHash]] = {}
        for block in hashes:
            if (slot := self.slot_of.get(block)) is not None:
                groups.setdefault(self._head[slot], []).append(block)
        return groups

    def states(self, slots: range) -> bytearray:
        """The states of neighbouring slots."""
        return self.state[slots.start : slots.stop]

    def standing_on(self, slots: Iterable[int], most: int | None) -> list[BlockHash]:
        """The resident blocks in ``slots`` and all that follow them, leaves first; it stops
        beyond ``most``."""
        found: dict[int, None] = {}
        for slot in slots:
            if self.is_resident(slot) and slot not in found:
                found.update(dict.fromkeys(filter(self.is_resident, self.tree.subtree(slot))))
                if most is not None and len(found) > most:
                    break
        leaves_first = sorted(found, key=self.tree.depth, reverse=True)
        return [self.hash[slot] for slot in leaves_first]

    def count(self, *states: int) -> int:
        """Slots in any of these states."""
        return sum(self.state.count(state) for state in states)

    def check(self) -> None:
        """Prove that no slot is lost or used twice and that resident blocks form chains.

        Raises:
            AssertionError: a fault of this class.
        """
        free = Counter(self.free)
        for slot, state in enumerate(self.state):
            assert free[slot] == (state == FREE), f"slot {slot}: state {state}, free list differs"
            known = self.slot_of.get(self.hash[slot]) == slot
            assert known == (state in KNOWN), f"slot {slot}: state {state}"
            assert not self._called[slot] or state not in (FREE, ABSENT), f"slot {slot}: stayed"
            self._check_place(slot, state)
        assert self.present == self.num_slots - self.count(ABSENT)
        assert len(self.slot_of) == self.count(*KNOWN)

    def _check_place(self, slot: int, state: int) -> None:
        parent = self.tree.parent(slot)
        if state not in (RESERVED, RESIDENT):
            assert parent == ORPHAN, f"slot {slot}: still in the tree"
            assert self.tree.is_leaf(slot), f"slot {slot}: still has children"
            return
        if parent >= 0:
            assert self.may_be_followed(parent), f"slot {slot}: parent {parent} is gone"
            assert slot in self.tree.children(parent)
            assert self.tree.depth(slot) == self.tree.depth(parent) + 1
        if state == RESIDENT:
            assert parent == ROOT or self.is_resident(parent), f"slot {slot}: hole"

    def _enter(self, slot: int, block: BlockHash, parent: int) -> None:
        self.slot_of[block] = slot
        self.hash[slot] = block
        self.state[slot] = RESERVED
        self.tree.add(slot, parent)
        begins = self.tree.depth(slot) % SEGMENT_BLOCKS == 0
        self._head[slot] = block if begins else self._head[parent]
