"""`SlabMover`: gives a node's memory, slab by slab, to the namespace that needs it.

Before a slab changes hands its blocks leave as any others do: to disk, out of the index, then
free. It is given away only when nobody reads or writes in it: pins of engines, read leases of
peers, quarantine, broadcasts and blocks that are being written hold it back, and what takes too
long leaves it where it is. What somebody wished to keep does too, unless the taker has less than
its floor. Must not know engines, links or the index.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from prefixfleet.cluster.open_pool import OpenPool
from prefixfleet.cluster.sharing import MAX_KINDS
from prefixfleet.store.namespace import is_of_era
from prefixfleet.store.slab_shares import Holding, Move, next_move
from prefixfleet.store.slabs import Slabs
from prefixfleet.store.slot_regions import cheapest

log = logging.getLogger(__name__)

LOOK_S = 1.0
EMPTY_S = 10.0
"""A slab that is not empty after so long stays where it is."""
RETRY_S = 30.0
"""After that its owner gives nothing for so long: blocks were lost for nothing."""
ERA_S = 10.0
"""A namespace of an engine's own ends when the engine was away for so long: nobody asks for it."""
AWAY_S = 600.0
"""Any other, and only where a node has no place for one more."""
LOOK_AGAIN_S = 0.05
PAUSE_S = 0.1
"""From one move to the next: what a move changes must show first."""
BATCH_BLOCKS = 256
"""Blocks that leave a slab together."""


class SlabMover:
    """Which slab is whose. Owned by the daemon's event loop; the first pool has them all, and never
    ends. ``end`` closes a pool that has none any more; False if it is wanted again."""

    def __init__(
        self,
        slabs: Slabs,
        first: OpenPool,
        clock: Callable[[], float],
        end: Callable[[OpenPool], Awaitable[bool]],
    ) -> None:
        self._slabs = slabs
        self._clock = clock
        self._end = end
        self._first = first
        self._pools: dict[bytes, OpenPool] = {first.digest: first}
        self._own: dict[bytes, set[int]] = {first.digest: set(range(slabs.count))}
        # when each had no slab to spare, or got one, last: free memory has an age too
        self._needed_s: dict[bytes, float] = {first.digest: clock()}
        self._served_s: dict[bytes, float] = {first.digest: clock()}  # when it had an engine last
        self._stuck_s: dict[bytes, float] = {}  # until when it gives nothing
        self._look = asyncio.Event()
        self.moved = 0
        self.stuck = 0

    def add(self, pool: OpenPool) -> None:
        """One more, without a slab; it gets some soon."""
        self._pools[pool.digest] = pool
        self._own[pool.digest] = set()
        self._needed_s[pool.digest] = self._served_s[pool.digest] = self._clock()
        self._look.set()

    def numbers(self, digest: bytes) -> dict[str, int]:
        """Slabs of a pool and their bytes, and those that no slot of it uses."""
        pool, own = self._pools[digest], self._own[digest]
        held = self._slabs.bytes_of(own)
        used = pool.host.pool.capacity * pool.slot_bytes
        return {"slabs": len(own), "bytes": held, "waste_bytes": held - used}

    async def run(self) -> None:
        """Move slabs until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._look.wait()
            self._look.clear()
            while move := next_move([self._holding(pool) for pool in self._pools.values()]):
                moved = await self._carry_out(move)
                self.moved += moved
                self.stuck += not moved
                if not moved:
                    self._stuck_s[move.giver] = self._clock() + RETRY_S
                await asyncio.sleep(PAUSE_S)
            await self._end_some()

    def _holding(self, pool: OpenPool) -> Holding[bytes]:
        now = self._clock()
        if pool.engines:
            self._served_s[pool.digest] = now
        if pool.cache.evictions.spare_slots < self._slabs.slab_bytes // pool.slot_bytes:
            self._needed_s[pool.digest] = now
        return Holding(
            pool.digest,
            slabs=len(self._own[pool.digest]),
            engines=pool.engines.total(),
            wants=pool.cache.evictions.short,
            idle_s=max(pool.host.pool.idle_s(), now - self._needed_s[pool.digest]),
            stuck=self._stuck_s.get(pool.digest, now) > now,
            ends=self._ends(pool, now - self._served_s[pool.digest]),
        )

    def _ends(self, pool: OpenPool, away_s: float) -> bool:
        if pool is self._first or len(pool.cache.retention):
            return False
        of_era = is_of_era(pool.host.kind.namespace)
        return away_s > ERA_S if of_era else away_s > AWAY_S and len(self._pools) >= MAX_KINDS

    async def _end_some(self) -> None:
        for pool in list(self._pools.values()):
            gave_all = not self._own[pool.digest] and not pool.host.pool.capacity
            if gave_all and self._holding(pool).ends and await self._end(pool):
                for known in (self._pools, self._own, self._needed_s, self._served_s):
                    del known[pool.digest]
                self._stuck_s.pop(pool.digest, None)

    async def _carry_out(self, move: Move[bytes]) -> bool:
        """Whether the slab was moved; if not, all is as it was, but for what was evicted."""
        giver, taker = self._pools[move.giver], self._pools[move.taker]
        slab = await self._cheapest(giver)
        giver.host.pool.shrink(self._slots(slab, giver))
        emptied = False
        try:
            emptied = await self._empty(slab, giver, due=move.due)
        finally:
            if emptied:
                self._own[giver.digest].remove(slab)
            else:
                giver.cache.retention.resume()
            owner = taker if emptied else giver
            own = self._own[owner.digest]
            own.add(slab)
            self._needed_s[owner.digest] = self._clock()
            owner.host.pool.grow(self._slabs.whole(slab, own, owner.slot_bytes))
        level = logging.INFO if emptied else logging.WARNING
        what = "goes" if emptied else f"is in use and stays for {RETRY_S:g} s; it should go"
        log.log(level, "slab %d %s from %s to %s", slab, what, giver.name, taker.name)
        return emptied

    async def _cheapest(self, giver: OpenPool) -> int:
        places = {slab: self._slots(slab, giver) for slab in sorted(self._own[giver.digest])}
        return await cheapest(giver.host.pool, places)

    async def _empty(self, slab: int, giver: OpenPool, *, due: bool) -> bool:
        slots, deadline = self._slots(slab, giver), self._clock() + EMPTY_S
        pool = giver.host.pool
        while not pool.absent(slots):
            if self._clock() >= deadline:
                return False
            leaving = pool.standing_on(slots)
            if due:
                giver.cache.retention.give_way(leaving)
            for first in range(0, len(leaving), BATCH_BLOCKS):
                await giver.cache.evictions.expel(leaving[first : first + BATCH_BLOCKS])
            if not pool.absent(slots):
                await asyncio.sleep(LOOK_AGAIN_S)
        return True

    def _slots(self, slab: int, pool: OpenPool) -> range:
        return self._slabs.touching(slab, pool.slot_bytes)
