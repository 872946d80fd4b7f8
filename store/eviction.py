"""`EvictionOrder`: which of the blocks that may go goes first; the plain one: least recently used.

The pool decides which blocks *may* go (unpinned, nothing follows them: leaf first holds for every
order); an order only ranks those. No clock and no I/O in here: the time is an argument.
"""

import heapq
import math
from array import array
from collections.abc import Sequence
from typing import Protocol

from prefixfleet.store.chain import BlockHash


class EvictionOrder(Protocol):
    """Ranks the blocks of one pool. Owned by its `SlotPool`, which alone calls it.

    A block is known by its slot from `insert` to `remove`; the slot may then come back with
    another block. Between the two, `offer` and `retract` alternate, `offer` first. ``now`` is in
    monotonic seconds and never goes back.
    """

    def insert(self, slot: int, block: BlockHash, *, parent: BlockHash, now: float) -> None:
        """A block became resident. ``parent`` is empty at the chain's root."""
        ...

    def observe(self, chain: Sequence[BlockHash], resident: int, *, now: float) -> None:
        """A request asks for ``chain``, from its root; ``resident`` leading blocks are here.
        Once a request, before its blocks are touched or inserted."""
        ...

    def touch(self, slot: int, *, now: float) -> None:
        """A resident block was used again: a hit."""
        ...

    def offer(self, slot: int) -> None:
        """The block may be evicted from now on: nobody pins it and no block follows it."""
        ...

    def retract(self, slot: int) -> None:
        """An offered block may not be evicted any more."""
        ...

    def remove(self, slot: int) -> None:
        """The block leaves, evicted or dropped. It is not offered when this is called."""
        ...

    def soon(self, count: int) -> Sequence[int]:
        """Up to ``count`` offered slots of which this order wants to know, before they go, whether
        other nodes hold their blocks too; none if it would make no difference."""
        ...

    def note_copies(self, slot: int, copies: int) -> bool:
        """``copies`` other nodes hold this resident block, as the index said of late. Whether
        that is news."""
        ...

    def worth(self, block: BlockHash) -> float:
        """What it is worth to store this block of the latest request; infinite: at any price."""
        ...

    def first(self, *, now: float, below: float = math.inf) -> int | None:
        """The offered block to evict first; None when no block is offered, or none is worth
        less than ``below`` (an order whose `worth` is always infinite has no prices, and takes
        no notice of it). Changes nothing that matters to the next answer: the pool retracts and
        removes what it takes."""
        ...


class LruOrder:
    """Least recently used leaf first; a tie goes to the lower slot.

    Owned by its pool. A heap of (last use, slot) with lazy deletion: an entry counts only while
    its slot is offered with that very time, and the heap is rebuilt when most of it is stale.
    """

    def __init__(self) -> None:
        self._used = array("d")  # by slot
        self._offered: set[int] = set()
        self._heap: list[tuple[float, int]] = []

    def insert(self, slot: int, block: BlockHash, *, parent: BlockHash, now: float) -> None:
        """See `EvictionOrder`; only the time counts here."""
        if slot >= len(self._used):
            self._used.extend([0.0] * (slot + 1 - len(self._used)))
        self._used[slot] = now

    def observe(self, chain: Sequence[BlockHash], resident: int, *, now: float) -> None:
        """See `EvictionOrder`; says nothing that `touch` does not."""

    def touch(self, slot: int, *, now: float) -> None:
        """See `EvictionOrder`."""
        self._used[slot] = now
        if slot in self._offered:
            self._push(slot)

    def offer(self, slot: int) -> None:
        """See `EvictionOrder`."""
        self._offered.add(slot)
        self._push(slot)

    def retract(self, slot: int) -> None:
        """See `EvictionOrder`."""
        self._offered.discard(slot)

    def remove(self, slot: int) -> None:
        """See `EvictionOrder`."""
        self._offered.discard(slot)

    def soon(self, count: int) -> Sequence[int]:
        """See `EvictionOrder`; the time of the last use is all that counts."""
        return ()

    def note_copies(self, slot: int, copies: int) -> bool:
        """See `EvictionOrder`."""
        return False

    def worth(self, block: BlockHash) -> float:
        """See `EvictionOrder`; what is new is used last, so it is worth most."""
        return math.inf

    def first(self, *, now: float, below: float = math.inf) -> int | None:
        """See `EvictionOrder`; whatever is ``below``: nothing here is worth as much as the new."""
        while self._heap:
            used, slot = self._heap[0]
            if slot in self._offered and self._used[slot] == used:
                return slot
            heapq.heappop(self._heap)
        return None

    def oldest(self, count: int) -> list[int]:
        """Up to ``count`` offered slots, the least recently used first."""
        found: list[int] = []
        entries: list[tuple[float, int]] = []
        while len(found) < count and self.first(now=0.0) is not None:
            entries.append(heapq.heappop(self._heap))
            found.append(entries[-1][1])
        for entry in entries:
            heapq.heappush(self._heap, entry)
        return list(dict.fromkeys(found))

    def _push(self, slot: int) -> None:
        if len(self._heap) > 2 * len(self._offered) + 64:
            self._heap = [(self._used[s], s) for s in self._offered]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (self._used[slot], slot))
