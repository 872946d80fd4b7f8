"""`FifoOrder` and `S3FifoOrder`: by time of arrival, to compare with and to fall back on.

Both keep the offered blocks in queues by a running number, with lazy deletion, so that a block
that is pinned for a while comes back to its old place.
"""

import heapq
import math
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from prefixfleet.store.chain import BlockHash

SMALL_SHARE = 0.1
MOST_FREQUENCY = 3
"""Of S3-FIFO (Yang et al., SOSP 2023): new blocks share a tenth of the room; two bits of hits."""


class OfferedQueue:
    """Offered slots, the least number first. Owned by one order."""

    def __init__(self) -> None:
        self._number: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    def add(self, slot: int, number: int) -> None:
        """Offer ``slot`` at the place of ``number``."""
        self._number[slot] = number
        if len(self._heap) > 2 * len(self._number) + 64:
            self._heap = [(n, s) for s, n in self._number.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (number, slot))

    def discard(self, slot: int) -> None:
        """Retract ``slot``, if it is here."""
        self._number.pop(slot, None)

    def first(self) -> int | None:
        """The slot with the least number; None when none is offered."""
        while self._heap:
            number, slot = self._heap[0]
            if self._number.get(slot) == number:
                return slot
            heapq.heappop(self._heap)
        return None


class FifoOrder:
    """First in, first out, leaf first. Owned by its pool; see `EvictionOrder`."""

    def __init__(self) -> None:
        self._numbers = 0
        self._number: dict[int, int] = {}
        self._queue = OfferedQueue()

    def observe(self, chain: Sequence[BlockHash], resident: int, *, now: float) -> None:
        """See `EvictionOrder`; not needed here."""

    def insert(self, slot: int, block: BlockHash, *, parent: BlockHash, now: float) -> None:
        """See `EvictionOrder`."""
        self._numbers += 1
        self._number[slot] = self._numbers

    def touch(self, slot: int, *, now: float) -> None:
        """See `EvictionOrder`; a hit changes nothing."""

    def offer(self, slot: int) -> None:
        """See `EvictionOrder`."""
        self._queue.add(slot, self._number[slot])

    def retract(self, slot: int) -> None:
        """See `EvictionOrder`."""
        self._queue.discard(slot)

    def remove(self, slot: int) -> None:
        """See `EvictionOrder`."""
        del self._number[slot]

    def soon(self, count: int) -> Sequence[int]:
        """See `EvictionOrder`; copies make no difference."""
        return ()

    def note_copies(self, slot: int, copies: int) -> bool:
        """See `EvictionOrder`."""
        return False

    def worth(self, block: BlockHash) -> float:
        """See `EvictionOrder`; everything is stored."""
        return math.inf

    def first(self, *, now: float, below: float = math.inf) -> int | None:
        """See `EvictionOrder`."""
        return self._queue.first()


class S3FifoOrder:
    """A small queue for what is new, a main one for what was hit in it or came back from the dead.

    Owned by its pool of ``num_slots``; see `EvictionOrder`. A block that leaves the small queue
    unhit is remembered as a ghost; while it is, it comes back into the main queue.
    """

    def __init__(self, num_slots: int) -> None:
        self._small_room = max(1, round(num_slots * SMALL_SHARE))
        self._ghost_room = num_slots
        self._ghosts: OrderedDict[BlockHash, None] = OrderedDict()
        self._numbers = 0
        self._number: dict[int, int] = {}
        self._hash: dict[int, BlockHash] = {}
        self._hits = array("B", [0]) * num_slots
        self._in_small: set[int] = set()
        self._small = OfferedQueue()
        self._main = OfferedQueue()

    def observe(self, chain: Sequence[BlockHash], resident: int, *, now: float) -> None:
        """See `EvictionOrder`; not needed here."""

    def insert(self, slot: int, block: BlockHash, *, parent: BlockHash, now: float) -> None:
        """See `EvictionOrder`."""
        self._renumber(slot)
        self._hash[slot] = block
        self._hits[slot] = 0
        if block in self._ghosts:
            del self._ghosts[block]
        else:
            self._in_small.add(slot)

    def touch(self, slot: int, *, now: float) -> None:
        """See `EvictionOrder`."""
        self._hits[slot] = min(MOST_FREQUENCY, self._hits[slot] + 1)

    def offer(self, slot: int) -> None:
        """See `EvictionOrder`."""
        queue = self._small if slot in self._in_small else self._main
        queue.add(slot, self._number[slot])

    def retract(self, slot: int) -> None:
        """See `EvictionOrder`."""
        self._small.discard(slot)
        self._main.discard(slot)

    def remove(self, slot: int) -> None:
        """See `EvictionOrder`."""
        block = self._hash.pop(slot)
        del self._number[slot]
        if slot in self._in_small:
            self._in_small.remove(slot)
            self._ghosts[block] = None
            if len(self._ghosts) > self._ghost_room:
                self._ghosts.popitem(last=False)

    def soon(self, count: int) -> Sequence[int]:
        """See `EvictionOrder`; copies make no difference."""
        return ()

    def note_copies(self, slot: int, copies: int) -> bool:
        """See `EvictionOrder`."""
        return False

    def worth(self, block: BlockHash) -> float:
        """See `EvictionOrder`; everything is stored."""
        return math.inf

    def first(self, *, now: float, below: float = math.inf) -> int | None:
        """See `EvictionOrder`. Moves on what earned another round; each hit buys one at most."""
        while True:
            small, main = self._small.first(), self._main.first()
            if small is not None and (main is None or len(self._in_small) > self._small_room):
                if self._hits[small] < 2:
                    return small
                self._in_small.remove(small)
                self._hits[small] = 0
                self._requeue(small, self._small)
            elif main is None or not self._hits[main]:
                return main
            else:
                self._hits[main] -= 1
                self._requeue(main, self._main)

    def _requeue(self, slot: int, before: OfferedQueue) -> None:
        before.discard(slot)
        self._renumber(slot)
        self._main.add(slot, self._number[slot])

    def _renumber(self, slot: int) -> None:
        self._numbers += 1
        self._number[slot] = self._numbers
