"""`Retention`: prefixes that must stay for a while, by an operator's or a request's wish.

Keeping is a pin with an end. It covers blocks that are here and those that come later, and never
more than a quota of the pool, so that wishes cannot starve everybody else. No eviction order ranks
what is kept: a wish's priority says which wishes the quota holds when it cannot hold them all.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.holds import Pin
from prefixfleet.store.pool import SlotPool

MAX_TTL_S = 7 * 86_400.0
MAX_PRIORITY = 100
QUOTA_SHARE = 1 / 4


@dataclass(slots=True)
class _Kept:
    until: float
    priority: int
    position: int  # in its chain
    pin: Pin | None = None  # None while the block is not here


class Retention:
    """The wishes of one pool. Owned by the node daemon's event loop.

    ``quota`` is the number of slots that may be kept by wishes; a quarter of the pool by default.
    """

    def __init__(
        self, pool: SlotPool, clock: Callable[[], float], *, quota: int | None = None
    ) -> None:
        self._pool = pool
        self._clock = clock
        self._fixed_quota = quota
        self._kept: dict[BlockHash, _Kept] = {}
        self.displaced_blocks = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def _quota(self) -> int:
        """Of a pool that has shrunk, wishes beyond it end by their time."""
        if self._fixed_quota is not None:
            return self._fixed_quota
        return round(self._pool.capacity * QUOTA_SHARE)

    def keep(self, chain: Sequence[BlockHash], ttl_s: float, priority: int = 0) -> int:
        """Keep ``chain``, from its root, for ``ttl_s`` seconds from now; 0 ends an earlier wish.

        Where the quota is full, wishes of a lower ``priority`` end for it, the lowest first and
        of each the end of its chain. Returns the number of leading blocks that are covered: the
        quota may end before the chain. A block that several wishes cover is kept for the longest
        of their times at the highest of their priorities.
        """
        now = self._clock()
        self.expire()
        if ttl_s <= 0:
            for block in chain:
                self._end(block)
            return 0
        until = now + min(ttl_s, MAX_TTL_S)
        known = [kept for block in chain if (kept := self._kept.get(block))]
        for kept in known:
            kept.until, kept.priority = max(kept.until, until), max(kept.priority, priority)
        self._end_lower(priority, len(chain) - len(known))
        for position, block in enumerate(chain):
            if block in self._kept:
                continue
            if len(self._kept) >= self._quota:
                return position
            self._kept[block] = _Kept(until, priority, position)
            self.arrived(block)
        return len(chain)

    def arrived(self, block: BlockHash) -> None:
        """Call this for every block that becomes resident: a wish may wait for it."""
        kept = self._kept.get(block)
        if kept is not None and kept.pin is None and self._pool.match([block]):
            kept.pin = self._pool.pin([block])

    def give_way(self, hashes: Iterable[BlockHash]) -> None:
        """These may leave although they are kept; their wishes go on, and wait for them."""
        for block in hashes:
            kept = self._kept.get(block)
            if kept is not None and kept.pin is not None:
                kept.pin.release()
                kept.pin = None
                self.displaced_blocks += 1

    def resume(self) -> None:
        """Keep again what gave way and is still here."""
        for block in self._kept:
            self.arrived(block)

    def expire(self) -> None:
        """End what is over. Call it now and then; nothing is kept longer than until then."""
        now = self._clock()
        for block in [b for b, kept in self._kept.items() if kept.until <= now]:
            self._end(block)

    def close(self) -> None:
        """End every wish."""
        for block in list(self._kept):
            self._end(block)

    def stats(self) -> dict[str, int]:
        """Slots kept, wished for, and the quota; how many so far were kept no more for a wish of
        a higher priority, or for a model that had no memory."""
        here = sum(1 for kept in self._kept.values() if kept.pin is not None)
        return {
            "kept": here,
            "wished": len(self._kept),
            "quota": self._quota,
            "displaced_blocks": self.displaced_blocks,
        }

    def _end_lower(self, priority: int, wanted: int) -> None:
        """Make room for ``wanted`` more, if wishes of a lower priority hold it."""
        lacking = wanted - (self._quota - len(self._kept))
        if lacking <= 0:
            return
        lower = [(k.priority, -k.position, b) for b, k in self._kept.items()]
        for _, _, block in heapq.nsmallest(lacking, (e for e in lower if e[0] < priority)):
            self._end(block)
            self.displaced_blocks += 1

    def _end(self, block: BlockHash) -> None:
        kept = self._kept.pop(block, None)
        if kept is not None and kept.pin is not None:
            kept.pin.release()
