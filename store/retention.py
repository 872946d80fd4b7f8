"""`Retention`: prefixes that must stay for a while, by an operator's or a request's wish.

Keeping is a pin with an end. It covers blocks that are here and those that come later, and never
more than a quota of the pool, so that wishes cannot starve everybody else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.pool import Pin, SlotPool

MAX_TTL_S = 7 * 86_400.0
QUOTA_SHARE = 1 / 4


@dataclass(slots=True)
class _Kept:
    until: float
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
        self._quota = round(pool.num_slots * QUOTA_SHARE) if quota is None else quota
        self._kept: dict[BlockHash, _Kept] = {}

    def keep(self, chain: Sequence[BlockHash], ttl_s: float) -> int:
        """Keep ``chain``, from its root, for ``ttl_s`` seconds from now; 0 ends an earlier wish.

        Returns the number of leading blocks that are covered: the quota may end before the chain.
        A longer wish of before is not shortened.
        """
        now = self._clock()
        self.expire()
        if ttl_s <= 0:
            for block in chain:
                self._end(block)
            return 0
        until = now + min(ttl_s, MAX_TTL_S)
        covered = 0
        for block in chain:
            if (kept := self._kept.get(block)) is not None:
                kept.until = max(kept.until, until)
            elif len(self._kept) < self._quota:
                self._kept[block] = _Kept(until)
                self.arrived(block)
            else:
                break
            covered += 1
        return covered

    def arrived(self, block: BlockHash) -> None:
        """Call this for every block that becomes resident: a wish may wait for it."""
        kept = self._kept.get(block)
        if kept is not None and kept.pin is None and self._pool.match([block]):
            kept.pin = self._pool.pin([block])

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
        """Slots kept, wished for, and the quota."""
        here = sum(1 for kept in self._kept.values() if kept.pin is not None)
        return {"kept": here, "wished": len(self._kept), "quota": self._quota}

    def _end(self, block: BlockHash) -> None:
        kept = self._kept.pop(block, None)
        if kept is not None and kept.pin is not None:
            kept.pin.release()
