"""The cache of one node as its engines see it: claim a prefix, write new blocks, give both back.

Ties the pool's books to the pulls and to what the index is told. Must not know sockets, links or
where the index lives.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any

from prefixfleet.cluster.announcer import Announcer
from prefixfleet.cluster.claims import Claims, Prepared
from prefixfleet.cluster.evictions import Evictions
from prefixfleet.cluster.holders import Holders
from prefixfleet.cluster.node_disk import NodeDisk
from prefixfleet.cluster.peer_book import PeerBook
from prefixfleet.cluster.pulls import Pull, Pulls
from prefixfleet.cluster.writes import Writes
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.hit_times import HitTimes
from prefixfleet.store.pool import SlotPool
from prefixfleet.store.records import PullPlan
from prefixfleet.store.retention import Retention
from prefixfleet.store.ssd import SsdTier
from prefixfleet.transfer.pull import PullResult

EXPIRE_S = 1.0


class NodeCache:
    """Owned by the daemon's event loop. ``move`` makes one pull into the pool and never raises.
    ``examine`` looks at a block's bytes and calls `drop` if they are spoiled. ``tier`` is None
    without a disk; ``slot`` gives the bytes of a slot of the pool."""

    def __init__(
        self,
        pool: SlotPool,
        shards: int,
        tier: SsdTier | None,
        *,
        slot: Callable[[int], memoryview],
        peers: PeerBook,
        holders: Holders,
        announcer: Announcer,
        move: Callable[[Pull], Awaitable[PullResult]],
        examine: Callable[[BlockHash], None],
        clock: Callable[[], float],
    ) -> None:
        self.pool = pool
        self.tier = tier
        self._announcer = announcer
        self._move = move
        self._examine = examine
        self._clock = clock
        self._disk = (
            NodeDisk(pool, tier, slot, make_room=self._room_for, clock=clock) if tier else None
        )
        demotion = self._disk.demotion if self._disk else None
        self.evictions = Evictions(pool, announcer, demotion, on_disk=self._on_disk, clock=clock)
        self.retention = Retention(pool, clock)
        self._writes = Writes(pool, shards, clock)
        self._pulls = Pulls(
            peers=peers, holders=holders, match=pool.match, move=self._pull, clock=clock
        )
        self.hit_times = HitTimes(clock)
        self.claims = Claims(pool, self._bring, self._pulls.fetch, self.hit_times, clock=clock)
        self.asked_blocks = 0  # by requests
        self.found_blocks = 0  # of these, on this node
        self.committed_blocks = 0
        self.corrupt_blocks = 0

    async def prepare(
        self,
        session: int,
        request: str,
        chain: Sequence[BlockHash],
        plan: PullPlan | None,
        budget_s: float,
    ) -> Prepared:
        """Pin the leading blocks of ``chain`` that are here, or come here within the budget."""
        self.pool.observe(chain)
        deadline = self._clock() + min(budget_s, plan.budget_s if plan else budget_s)
        prepared = await self.claims.claim((session, request), chain, plan, deadline)
        self.asked_blocks += len(chain)
        self.found_blocks += max(0, len(prepared.slots) - prepared.pulled.blocks)
        return prepared

    def release(self, session: int, request: str) -> None:
        """Unpin what `prepare` pinned."""
        self.claims.release((session, request))
        self._let_go()

    async def reserve(
        self, session: int, rank: int, parent: BlockHash, hashes: Sequence[BlockHash]
    ) -> list[int]:
        """Slots for the blocks that follow ``parent``; -1: it is here already, or no room."""
        chain = [parent, *hashes] if parent else hashes
        with self.pool.pin(chain, used=False):  # else they may be what makes room
            wanted = sum(not self.pool.knows(block) for block in hashes)
            missing = self._writes.undecided(rank, parent, hashes)
            await self.evictions.admit(missing, patient=True)
            slots = self._writes.reserve(session, rank, parent, hashes)
        self.evictions.took(wanted)
        return slots

    def commit(self, session: int, rank: int, hashes: Sequence[BlockHash]) -> None:
        """One rank wrote its shards; blocks that are whole by that are published."""
        whole = self._writes.commit(session, rank, hashes)
        self.committed_blocks += len(whole)
        self.arrived(whole)

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
        self.evictions.start(self.pool.drop(block), spoiled=True)

    def disconnect(self, session: int) -> None:
        """Give back all that a session holds."""
        self.claims.disconnect(session)
        self._writes.disconnect(session)
        self._let_go()

    async def offer(self, hashes: Sequence[BlockHash], within_s: float) -> None:
        """A peer asks for ``hashes``, any part of a chain: have them in the pool if they are on
        disk, within its time."""
        if self._disk is None or not self._disk.adds_to(hashes):
            return
        with self.pool.pin(hashes, used=False):
            began_s = self._clock()
            await self._bring(hashes, began_s + within_s)
            self.hit_times.read(self.pool.match(hashes), self._clock() - began_s)

    async def left_disk(self, hashes: Sequence[BlockHash]) -> None:
        """These leave the disk: the index must not name those that are nowhere else here."""
        await self._announcer.withdraw(hashes, unless=self._in_pool)

    def resident(self) -> Iterator[BlockHash]:
        """Every block of this node, in the pool or on disk; one in both comes twice. Blocks that
        leave the pool are among them: they may be on disk soon, and are withdrawn if not."""
        on_disk = self.tier.pool.resident() if self.tier else iter(())
        held = (block for block, _ in itertools.chain(self.pool.resident(), on_disk))
        return itertools.chain(held, self.pool.leaving())

    def segments(self, hashes: Iterable[BlockHash]) -> dict[BlockHash, list[BlockHash]]:
        """Blocks of this node, grouped by the head of their index segment."""
        wanted = list(hashes)
        groups = self.pool.segments_of(wanted)
        if self.tier is not None:
            found = {block for group in groups.values() for block in group}
            rest = self.tier.pool.segments_of(block for block in wanted if block not in found)
            for head, blocks in rest.items():
                groups.setdefault(head, []).extend(blocks)
        return groups

    def numbers(self) -> dict[str, int]:
        """Counters and sizes, for status."""
        return {
            "committed_blocks": self.committed_blocks,
            "evicted_blocks": self.evictions.evicted_blocks,
            "corrupt_blocks": self.corrupt_blocks,
            "pool_full": self.evictions.full,
            "not_admitted_blocks": self.evictions.not_admitted,
            "claims": len(self.claims),
            "waiting_hints": self.claims.waiting_hints,
            "joined_hints": self.claims.joined_hints,
            "expired_hints": self.claims.expired_hints,
            "asked_blocks": self.asked_blocks,
            "found_blocks": self.found_blocks,
        }

    def disk_numbers(self) -> dict[str, Any]:
        """The disk tier for status; empty without one."""
        return self._disk.numbers() if self._disk else {}

    def room(self) -> dict[str, Any]:
        """How the pool is split between requests in flight, wishes and everything else."""
        return self.evictions.room() | self.retention.stats()

    async def run(self) -> None:
        """Keep slots free, and end wishes in time, until cancelled."""
        await asyncio.gather(self.evictions.run(), self._expire())

    async def close(self) -> None:
        """End pulls, claims, reads and evictions, then the disk tier."""
        await self._pulls.close()
        await self.claims.close()
        if self._disk is not None:
            await self._disk.close()
        await self.evictions.close()
        self.retention.close()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_S)
            self.retention.expire()
            self._writes.expire()

    async def _bring(self, hashes: Sequence[BlockHash], deadline: float) -> None:
        if self._disk is not None:
            await self._disk.bring(hashes, deadline)

    async def _room_for(self, hashes: Sequence[BlockHash]) -> int:
        """Room for blocks from disk, also those that will only pass through."""
        staying = await self.evictions.admit(hashes)
        await self.evictions.make_room(len(hashes))
        self.evictions.took(len(hashes))
        return staying

    async def _pull(self, pull: Pull) -> PullResult:
        await self.evictions.make_room(len(pull.hashes))
        pulled = await self._move(pull)
        self.arrived(pull.hashes[: pulled.blocks])
        self.evictions.took(pulled.blocks)
        return pulled

    def arrived(self, hashes: Sequence[BlockHash]) -> None:
        """Blocks are resident that were not."""
        self._announcer.publish(hashes)
        for block in hashes:
            self.retention.arrived(block)

    def _on_disk(self, block: BlockHash) -> bool:
        return self.tier is not None and self.tier.holds(block)

    def _in_pool(self, block: BlockHash) -> bool:
        return self.pool.match([block]) == 1

    def _let_go(self) -> None:
        """What was only read through for a request leaves with it."""
        if self._disk is not None:
            self.evictions.start(self._disk.let_go())
