"""`NodeDisk`: a node's disk tier with the ways into it and out of it. Must not know requests, nor
who makes room in the pool."""

from collections.abc import Callable, Sequence
from typing import Any

from prefixfleet.cluster.demotion import Demotion
from prefixfleet.cluster.promotion import MakeRoom, Promotion
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.holds import Victims
from prefixfleet.store.pool import SlotPool
from prefixfleet.store.ssd import SsdTier


class NodeDisk:
    """Owned by the `NodeCache` of ``pool``; whoever opened ``tier`` closes it after this.
    ``slot`` gives the bytes of a slot of the pool."""

    def __init__(
        self,
        pool: SlotPool,
        tier: SsdTier,
        slot: Callable[[int], memoryview],
        *,
        make_room: MakeRoom,
        clock: Callable[[], float],
    ) -> None:
        self.tier = tier
        self.demotion = Demotion(pool, tier, slot, clock)
        self._pool = pool
        self._promotion = Promotion(pool, tier, slot, make_room=make_room, clock=clock)

    def adds_to(self, hashes: Sequence[BlockHash]) -> bool:
        """Whether the first of ``hashes`` that the pool lacks is here."""
        return bool(self.tier.pool.match(hashes[self._pool.match(hashes) :]))

    async def bring(self, hashes: Sequence[BlockHash], deadline: float) -> None:
        """Have what is here of ``hashes`` in the pool. They may be any part of a chain: what the
        pool lacks before them is read too."""
        here = self._pool.match(hashes)
        on_disk = self.tier.pool.match(hashes[here:])
        chain = self.tier.pool.chain_to(hashes[here + on_disk - 1]) if on_disk else hashes
        await self._promotion.bring(chain, deadline)

    def let_go(self) -> Victims:
        """What was only read through leaves the pool, once it is used no more: free it."""
        return self._promotion.let_go()

    def numbers(self) -> dict[str, Any]:
        """Figures for status, and why nothing is written, if that is so."""
        return self.tier.stats() | {
            "promoted_blocks": self._promotion.promoted_blocks,
            "passed_blocks": self._promotion.passed_blocks,
            "waiting_blocks": self.demotion.waiting,
            "not_worth_blocks": self.demotion.not_worth,
            "refused_busy": self.demotion.refused_busy + self._promotion.refused_busy,
            "degraded": self.demotion.degraded,
        }

    async def close(self) -> None:
        """Wait a while for reads in flight."""
        await self._promotion.close()
