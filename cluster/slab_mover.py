"""`SlabMover`: gives a node's memory, slab by slab, to the namespace that needs it.

Before a slab changes hands its blocks leave as any others do: to disk, out of the index, then
free. It is given away only when nobody reads or writes in it: pins of engines, read leases of
peers, quarantine, broadcasts and blocks that are being written hold it back, and what takes too
long leaves it where it is. What somebody wished to keep does too, unless the taker has less than
its floor or the giver ends. Must not know engines, links or the index.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from prefixfleet.cluster.open_pool import OpenPool
from prefixfleet.cluster.sharing import MAX_KINDS
from prefixfleet.store.namespace import is_of_era
from prefixfleet.store.places import Absent, who_ends
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
"""A namespace of an engine's own ends when the engine was away for so long: nobody asks for it.
Any other ends only where there are more than a node has places."""
LOOK_AGAIN_S = 0.05
PAUSE_S = 0.1
"""From one move to the next: what a move changes must show first."""
BATCH_BLOCKS = 256
"""Blocks that leave a slab together."""


class SlabMover:
    """Which slab is whose. Owned by the daemon's event loop; the first pool has them all, and is
    never closed, but gives them too. ``end`` closes a pool that has none any more; False if it
    is wanted again."""

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
        self._ends: frozenset[bytes] = frozenset()  # as of the last look
        self._look = asyncio.Event()
        self.moved = 0
        self.stuck = 0

    def add(self, pool: OpenPool) -> None:
        """One more, without a slab; it gets some soon."""
        self._pools[pool.digest] = pool
        self._own[pool.digest] = set()
        self._needed_s[pool.digest] = self._served_s[pool.digest] = self._clock()
        self._look.set()

    def ends(self, digest: bytes) -> bool:
        """Whether a pool without an engine gives all that it has, to be closed."""
        return digest in self._ends

    def numbers(self, digest: bytes) -> dict[str, int]:
        """Slabs of a pool and their bytes, and those that no slot of it uses; whether it ends."""
        pool, own = self._pools[digest], self._own[digest]
        held = self._slabs.bytes_of(own)
        waste = held - pool.host.pool.capacity * pool.slot_bytes
        ends = self.ends(digest)
        return {"slabs": len(own), "bytes": held, "waste_bytes": waste, "ends": ends}

    async def run(self) -> None:
        """Move slabs until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._look.wait()
            self._look.clear()
            while move := next_move(self._holdings()):
                moved = await self._carry_out(move)
                self.moved += moved
                self.stuck += not moved
                if not moved:
                    self._stuck_s[move.giver] = self._clock() + RETRY_S
                await asyncio.sleep(PAUSE_S)
            await self._end_some()

    def _holdings(self) -> list[Holding[bytes]]:
        now = self._clock()
        self._served_s |= {pool.digest: now for pool in self._pools.values() if pool.engines}
        self._ends = self._ending(now)
        return [self._holding(pool, now) for pool in self._pools.values()]

    def _holding(self, pool: OpenPool, now: float) -> Holding[bytes]:
        if pool.cache.evictions.spare_slots < self._slabs.slab_bytes // pool.slot_bytes:
            self._needed_s[pool.digest] = now
        return Holding(
            pool.digest,
            slabs=len(self._own[pool.digest]),
            engines=pool.engines.total(),
            wants=pool.cache.evictions.short,
            idle_s=max(pool.host.pool.idle_s(), now - self._needed_s[pool.digest]),
            stuck=self._stuck_s.get(pool.digest, now) > now,
            ends=pool.digest in self._ends,
            least=self._least(pool),
        )

    def _least(self, pool: OpenPool) -> int:
        """What is on disk is read into memory: without any, peers would be told of blocks that
        they cannot have. Who is closed tells nobody of them any more."""
        closes = pool.digest in self._ends and pool is not self._first
        return 0 if pool.cache.tier is None or closes else 1

    def _ending(self, now: float) -> frozenset[bytes]:
        absent = [self._absent(pool, now) for pool in self._pools.values() if not pool.engines]
        return who_ends(absent, beyond=len(self._pools) - MAX_KINDS)

    def _absent(self, pool: OpenPool, now: float) -> Absent[bytes]:
        away_s = now - self._served_s[pool.digest]
        own = pool is not self._first and is_of_era(pool.host.kind.namespace)
        over, wished = own and away_s > ERA_S, len(pool.cache.retention) > 0
        return Absent(pool.digest, away_s, over=over, wished=wished)

    async def _end_some(self) -> None:
        for pool in list(self._pools.values()):
            gave_all = not self._own[pool.digest] and not pool.host.pool.capacity
            ends = pool is not self._first and pool.digest in self._ends
            if gave_all and ends and await self._end(pool):
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
