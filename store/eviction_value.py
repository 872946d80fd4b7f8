"""`ValueOrder`: the block goes first whose absence is likely to cost least.

Worth of a block = reuses a second it is worth keeping for (`ReuseModel.index` of the class and age
of its last use) x what is lost when it is asked for and not here: to compute it or, where another
node holds a copy, to fetch it, if that is less: the last copy in the fleet is worth more than the
fifth. Each block counts as equally dear to compute (DESIGN 19). New blocks compete like all others:
one that is worth less than what it would push out is better not stored (`store/admission.py`).

As evidence grows, this learns by itself what LRU cannot know: that a conversation's next turn comes
after a while, not at once; that a scan never returns; which templates bring talkative users. When
it has served fewer hits than LRU would have, it ranks by last use until it has proved itself anew.
Where the model sees no clear difference it does what LRU does, but for copies: one goes before last
copies that were used a little before it. Time: a few samples an eviction,
like LRU in Redis, and a heap; a request costs O(its blocks).
"""

import math
import random
from array import array
from collections.abc import Sequence

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.eviction import LruOrder
from prefixfleet.store.eviction_guard import Guard
from prefixfleet.store.eviction_history import UseHistory
from prefixfleet.store.reuse import UNKNOWN, bucket

SAMPLES = 8
CLEARLY_LESS = 0.5
"""A block goes before the one that LRU would take when it is worth less than this part of it."""
A_TIE_IS_ENOUGH = 1.001
FETCH_SHARE = 0.25
"""Of the seconds to compute a block, those to fetch it. A pull is planned only where it is cheaper;
measured on CPUs it took a tenth (`make demo`), at 1.25 GB/s and 8 x A800 about a half."""
LOSS = (1.0, FETCH_SHARE)
"""What a block costs that is asked for and not here, in blocks computed: when no other node holds
it, and when one does."""


class ValueOrder:
    """See `EvictionOrder`. Owned by its pool of ``num_slots``; equal seeds, equal choices."""

    def __init__(self, num_slots: int, *, seed: int = 0) -> None:
        self._history = UseHistory(num_slots)
        self._guard = Guard()
        self._by_age = LruOrder()
        self._copied = LruOrder()  # of those that other nodes hold too
        self._copies = bytearray(num_slots)
        self._draw = random.Random(seed)
        self._hash: list[BlockHash] = [b""] * num_slots
        self._used = array("d", [0.0]) * num_slots
        self._class = array("H", [UNKNOWN]) * num_slots
        self._offered = array("I")
        self._place = array("I", [0]) * num_slots  # of a slot in ``_offered``
        self._is_offered = bytearray(num_slots)
        self._resident = 0
        self._last_offered = 0
        self._chosen = (0, -math.inf, 0.0)  # slot, time, rank

    def observe(self, chain: Sequence[BlockHash], resident: int, *, now: float) -> None:
        """See `EvictionOrder`."""
        self._guard.follow(resident, self._history.observe(chain, now, self._resident))

    def insert(self, slot: int, block: BlockHash, *, parent: BlockHash, now: float) -> None:
        """See `EvictionOrder`."""
        self._resident += 1
        self._hash[slot] = block
        self._copies[slot] = 0
        for order in (self._by_age, self._copied):
            order.insert(slot, block, parent=parent, now=now)
        self.touch(slot, now=now)

    def touch(self, slot: int, *, now: float) -> None:
        """See `EvictionOrder`."""
        self._used[slot] = now
        self._by_age.touch(slot, now=now)
        self._copied.touch(slot, now=now)
        self._class[slot] = self._history.class_of(self._hash[slot])

    def soon(self, count: int) -> Sequence[int]:
        """See `EvictionOrder`: those used longest ago."""
        return self._by_age.oldest(count)

    def note_copies(self, slot: int, copies: int) -> bool:
        """See `EvictionOrder`."""
        if self._copies[slot] == min(255, copies):
            return False
        self._copies[slot] = min(255, copies)
        if self._is_offered[slot]:
            (self._copied.offer if copies else self._copied.retract)(slot)
        return True

    def offer(self, slot: int) -> None:
        """See `EvictionOrder`."""
        self._by_age.offer(slot)
        if self._copies[slot]:
            self._copied.offer(slot)
        self._place[slot] = len(self._offered)
        self._offered.append(slot)
        self._is_offered[slot] = True
        self._last_offered = slot

    def retract(self, slot: int) -> None:
        """See `EvictionOrder`."""
        self._by_age.retract(slot)
        self._copied.retract(slot)
        last = self._offered.pop()
        if last != slot:
            place = self._offered[self._place[slot]] = last
            self._place[place] = self._place[slot]
        self._is_offered[slot] = False

    def remove(self, slot: int) -> None:
        """See `EvictionOrder`."""
        self._resident -= 1

    def worth(self, block: BlockHash) -> float:
        """See `EvictionOrder`. A tie goes to what is new: so it does in LRU."""
        if not self._guard.trusts:
            return math.inf
        index = self._history.model.index(self._history.class_of(block))
        return index[0] * LOSS[0] * A_TIE_IS_ENOUGH

    def first(self, *, now: float, below: float = math.inf) -> int | None:
        """See `EvictionOrder`. The least of a few that are drawn, if it is clearly less than the
        one used longest ago; but when the last answer was taken and its parent is worth no more,
        the parent: a chain goes as a whole."""
        slot, at, rank = self._chosen
        if at != now or not self._is_offered[slot]:
            heir = self._last_offered
            if not self._offered:
                return None
            if at != now or not self._is_offered[heir] or self._rank(heir, now) > rank:
                heir = self._least(now)
            slot, rank = heir, self._rank(heir, now)
            self._chosen = (slot, now, rank)
        return slot if rank < below else None

    def _least(self, now: float) -> int:
        oldest = self._oldest(now)
        if not self._guard.trusts:
            return oldest
        drawn = self._draw_least(now)
        return drawn if self._rank(drawn, now) < CLEARLY_LESS * self._rank(oldest, now) else oldest

    def _oldest(self, now: float) -> int:
        """What LRU would take, if a copy counted as used as much longer ago as it costs less."""
        oldest, copy = self._by_age.first(now=now), self._copied.first(now=now)
        assert oldest is not None, "something is offered"
        if copy is None or self._copies[oldest]:
            return oldest
        longer = LOSS[0] / LOSS[self._copies[copy] > 0]
        return copy if longer * (now - self._used[copy]) >= now - self._used[oldest] else oldest

    def _draw_least(self, now: float) -> int:
        offered, count, draw = self._offered, len(self._offered), self._draw.random
        if count <= SAMPLES:
            drawn = list(offered)
        else:
            drawn = [offered[int(draw() * count)] for _ in range(SAMPLES)]
            if self._is_offered[self._last_offered]:
                drawn.append(self._last_offered)
        ranks = [self._rank(slot, now) for slot in drawn]
        return drawn[ranks.index(min(ranks))]

    def _rank(self, slot: int, now: float) -> float:
        age_s = now - self._used[slot]
        if not self._guard.trusts:
            return -age_s
        index = self._history.model.index(self._class[slot])
        return index[bucket(age_s)] * LOSS[self._copies[slot] > 0]
