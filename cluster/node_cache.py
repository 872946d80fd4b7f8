"""The cache of one node as its engines see it: claim a prefix, write new blocks, give both back.

Ties the pool's books to the pulls and to what the index is told. Must not know sockets, links or
where the index lives.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from prefixfleet.cluster.announcer import Announcer
from prefixfleet.cluster.claims import Claims, Prepared
from prefixfleet.cluster.holders import Holders
from prefixfleet.cluster.peer_book import PeerBook
from prefixfleet.cluster.pulls import Pull, Pulls
from prefixfleet.cluster.writes import Writes
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.pool import SlotPool, Victims
from prefixfleet.store.records import PullPlan
from prefixfleet.transfer.pull import PullResult

SPARE_SHARE = 32
"""One slot in so many is kept free, so that a new block seldom waits for the index."""
MAX_SPARE_SLOTS = 64

NO_CACHE = dict.fromkeys(
    (
        "committed_blocks",
        "evicted_blocks",
        "corrupt_blocks",
        "pool_full",
        "claims",
        "waiting_hints",
        "joined_hints",
        "expired_hints",
    ),
    0,
)
"""`NodeCache.numbers` of a node without an engine."""


class NodeCache:
    """Owned by the daemon's event loop. ``move`` makes one pull into the pool and never raises.
    ``examine`` looks at a block's bytes and calls `drop` if they are spoiled."""

    def __init__(
        self,
        pool: SlotPool,
        shards: int,
        *,
        peers: PeerBook,
        holders: Holders,
        announcer: Announcer,
        move: Callable[[Pull], Awaitable[PullResult]],
        examine: Callable[[BlockHash], None],
        clock: Callable[[], float],
    ) -> None:
        self.pool = pool
        self._announcer = announcer
        self._move = move
        self._examine = examine
        self._clock = clock
        self._writes = Writes(pool, shards)
        self._pulls = Pulls(
            peers=peers, holders=holders, match=pool.match, move=self._pull, clock=clock
        )
        self.claims = Claims(pool, self._pulls.fetch, clock=clock)
        self._spare = min(MAX_SPARE_SLOTS, max(1, pool.num_slots // SPARE_SHARE))
        self._low = asyncio.Event()
        self._evictions: set[asyncio.Task[None]] = set()
        self.evicted_blocks = 0
        self.committed_blocks = 0
        self.corrupt_blocks = 0
        self.full = 0

    async def prepare(
        self,
        session: int,
        request: str,
        chain: Sequence[BlockHash],
        plan: PullPlan | None,
        budget_s: float,
    ) -> Prepared:
        """Pin the leading blocks of ``chain`` that are here, or come here within the budget."""
        deadline = self._clock() + min(budget_s, plan.budget_s if plan else budget_s)
        return await self.claims.claim((session, request), chain, plan, deadline)

    def release(self, session: int, request: str) -> None:
        """Unpin what `prepare` pinned."""
        self.claims.release((session, request))

    async def reserve(
        self, session: int, rank: int, parent: BlockHash, hashes: Sequence[BlockHash]
    ) -> list[int]:
        """Slots for the blocks that follow ``parent``; -1: it is here already, or no room."""
        chain = [parent, *hashes] if parent else hashes
        with self.pool.pin(chain) as here:  # else they may be what makes room
            await self._make_room(len(chain) - len(here.hashes))
            slots = self._writes.reserve(session, rank, parent, hashes)
        self._keep_spare()
        return slots

    def commit(self, session: int, rank: int, hashes: Sequence[BlockHash]) -> None:
        """One rank wrote its shards; blocks that are whole by that are published."""
        whole = self._writes.commit(session, rank, hashes)
        self.committed_blocks += len(whole)
        self._announcer.publish(whole)

    def abandon(self, session: int, rank: int, hashes: Sequence[BlockHash]) -> None:
        """One rank will not write these blocks."""
        self._writes.abandon(session, rank, hashes)

    def discard(self, hashes: Sequence[BlockHash]) -> None:
        """An engine found these damaged: those that are leave the pool."""
        for block in hashes:
            self._examine(block)

    def drop(self, block: BlockHash) -> None:
        """A spoiled block, and all that follow it, leave the pool and the index."""
        self.corrupt_blocks += 1
        self._start_leaving(self.pool.drop(block))

    def disconnect(self, session: int) -> None:
        """Give back all that a session holds."""
        self.claims.disconnect(session)
        self._writes.disconnect(session)

    def numbers(self) -> dict[str, int]:
        """Counters and sizes, for status."""
        return {
            "committed_blocks": self.committed_blocks,
            "evicted_blocks": self.evicted_blocks,
            "corrupt_blocks": self.corrupt_blocks,
            "pool_full": self.full,
            "claims": len(self.claims),
            "waiting_hints": self.claims.waiting_hints,
            "joined_hints": self.claims.joined_hints,
            "expired_hints": self.claims.expired_hints,
        }

    async def run(self) -> None:
        """Keep a few slots free until cancelled."""
        while True:
            await self._low.wait()
            self._low.clear()
            await self._evict(self._spare - self.pool.free_slots)

    async def close(self) -> None:
        """End pulls, claims and evictions."""
        await self._pulls.close()
        await self.claims.close()
        await asyncio.gather(*self._evictions, return_exceptions=True)

    async def _pull(self, pull: Pull) -> PullResult:
        await self._make_room(len(pull.hashes))
        pulled = await self._move(pull)
        self._announcer.publish(pull.hashes[: pulled.blocks])
        self._keep_spare()
        return pulled

    async def _make_room(self, slots: int) -> None:
        missing = min(slots, self.pool.num_slots) - self.pool.free_slots
        if missing > 0:
            await self._evict(missing)

    def _keep_spare(self) -> None:
        if self.pool.free_slots < self._spare:
            self._low.set()

    async def _evict(self, count: int) -> None:
        """Withdraw first, then free. Goes on to its end even if the caller is cancelled."""
        victims = self.pool.choose_victims(count)
        if len(victims.hashes) < count:
            self.full += 1
        if not victims.hashes:
            return
        await asyncio.shield(self._start_leaving(victims))

    def _start_leaving(self, victims: Victims) -> "asyncio.Task[None]":
        task = asyncio.create_task(self._withdraw_and_free(victims))
        self._evictions.add(task)
        task.add_done_callback(self._evictions.discard)
        return task

    async def _withdraw_and_free(self, victims: Victims) -> None:
        try:
            if victims.hashes:
                await self._announcer.withdraw(victims.hashes)
        finally:
            self.pool.free(victims)
            self.evicted_blocks += len(victims.hashes)
