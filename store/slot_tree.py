"""Which block follows which, by slot number: parents, and children as doubly linked siblings.

Five arrays of 4 bytes a slot instead of an object a block. Must not know what a slot holds.
"""

from array import array
from collections.abc import Iterator

ROOT = -1
"""Parent of a chain's first block."""
ORPHAN = -2
"""Parent of a block whose parent went away before it was complete."""
_NONE = -1


class SlotTree:
    """A forest over slot numbers. Owned by one `SlotPool`."""

    def __init__(self, num_slots: int) -> None:
        self._parent = array("i", [ORPHAN]) * num_slots
        self._first_child = array("i", [_NONE]) * num_slots
        self._next = array("i", [_NONE]) * num_slots
        self._previous = array("i", [_NONE]) * num_slots
        self._depth = array("I", [0]) * num_slots

    def add(self, slot: int, parent: int) -> None:
        """Put a slot without children under ``parent``, a slot or `ROOT`."""
        self._parent[slot] = parent
        self._depth[slot] = 0 if parent == ROOT else self._depth[parent] + 1
        if parent == ROOT:
            return
        sibling = self._first_child[parent]
        self._next[slot] = sibling
        if sibling != _NONE:
            self._previous[sibling] = slot
        self._first_child[parent] = slot

    def remove(self, slot: int) -> int:
        """Take a slot out and make its children orphans. Returns the parent it had."""
        for child in list(self.children(slot)):
            self._cut(child)
        return self._cut(slot)

    def parent(self, slot: int) -> int:
        """A slot, `ROOT` or `ORPHAN`."""
        return self._parent[slot]

    def depth(self, slot: int) -> int:
        """Position in the chain; 0 at its first block. Kept when the slot becomes an orphan."""
        return self._depth[slot]

    def is_leaf(self, slot: int) -> bool:
        """Whether no slot follows this one."""
        return self._first_child[slot] == _NONE

    def children(self, slot: int) -> Iterator[int]:
        """The slots that follow this one directly."""
        child = self._first_child[slot]
        while child != _NONE:
            yield child
            child = self._next[child]

    def subtree(self, slot: int) -> list[int]:
        """The slot and all that follow it, each before those that follow it."""
        found = [slot]
        for member in found:  # grows while it is walked
            found.extend(self.children(member))
        return found

    def _cut(self, slot: int) -> int:
        parent, before, after = self._parent[slot], self._previous[slot], self._next[slot]
        if before != _NONE:
            self._next[before] = after
        elif parent >= 0:
            self._first_child[parent] = after
        if after != _NONE:
            self._previous[after] = before
        self._parent[slot] = ORPHAN
        self._previous[slot] = self._next[slot] = _NONE
        return parent
