"""Promotion: blocks that a request wants and that lie on disk come into the pool.

A block is read once, however many requests want it. What the eviction order would not store for
its own sake is read through: it lies in the pool while the request uses it and leaves after.
Every failure is a shorter prefix. Must not know requests, nor who evicts.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.holds import NO_SLOT, Victims
from prefixfleet.store.pool import SlotPool
from prefixfleet.store.ssd import SsdTier

MAX_ROUNDS = 8
"""Reads of others that one request waits for, before it takes what is there."""
LOADING_SHARE = 2
"""One slot of the pool in so many may be waiting for the disk."""
BATCH_BLOCKS = 32
"""Blocks of one read, which are there together: a request whose time is over takes those that have
come, and a short read waits for a batch of a long one, not for its end."""
CLOSE_S = 5.0

MakeRoom = Callable[[Sequence[BlockHash]], Awaitable[int]]
"""Makes room for neighbouring blocks of a chain; how many of them are worth staying."""


class Promotion:
    """Reads in flight, by block. Owned by the daemon's event loop."""

    def __init__(
        self,
        pool: SlotPool,
        tier: SsdTier,
        slot: Callable[[int], memoryview],
        *,
        make_room: MakeRoom,
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._tier = tier
        self._slot = slot
        self._make_room = make_room
        self._clock = clock
        self._running: dict[BlockHash, asyncio.Task[None]] = {}
        self._passing: dict[BlockHash, None] = {}  # read through, parents first
        self.promoted_blocks = 0
        self.passed_blocks = 0
        self.refused_busy = 0

    async def bring(self, chain: Sequence[BlockHash], deadline: float) -> None:
        """Have what is on disk of ``chain``, from its root, in the pool by ``deadline``.

        The caller keeps the blocks that are there already pinned.
        """
        for block in chain[: self._pool.match(chain)]:
            self._passing.pop(block, None)  # asked for again: it may stay
        for _ in range(MAX_ROUNDS):
            here, on_disk = self._pool.match(chain), self._tier.pool.match(chain)
            if here >= on_disk or self._clock() >= deadline:
                return
            task = self._running.get(chain[here]) or self._start(chain, here, on_disk)
            if task is None:
                return
            await asyncio.wait({task}, timeout=max(0.0, deadline - self._clock()))
            if self._pool.match(chain) == here:
                return

    def let_go(self) -> Victims:
        """What was read through and is used no more leaves the pool: free it."""
        victims = self._pool.expel(list(self._passing)[::-1])
        for block in [b for b in self._passing if not self._pool.match([b])]:
            del self._passing[block]
        return victims

    async def close(self) -> None:
        """Wait a while for reads in flight: a thread that writes into a slot cannot be stopped."""
        if self._running:
            await asyncio.wait(set(self._running.values()), timeout=CLOSE_S)

    def _start(
        self, chain: Sequence[BlockHash], here: int, on_disk: int
    ) -> "asyncio.Task[None] | None":
        most = max(1, self._pool.capacity // LOADING_SHARE)
        room = most - len(self._running)
        if room <= 0:
            self.refused_busy += 1
            return None
        free = itertools.takewhile(lambda b: b not in self._running, chain[here:on_disk])
        hashes = list(itertools.islice(free, room))
        parent = chain[here - 1] if here else b""
        task = asyncio.create_task(self._load(parent, hashes))
        for block in hashes:
            self._running[block] = task
        task.add_done_callback(lambda _: self._ended(hashes))
        return task

    def _ended(self, hashes: Sequence[BlockHash]) -> None:
        for block in hashes:
            del self._running[block]

    async def _load(self, parent: BlockHash, hashes: Sequence[BlockHash]) -> None:
        with self._pool.pin([parent] if parent else [], used=False):
            worth_staying = await self._make_room(hashes)
            with self._pool.reserve(parent, hashes) as reservation:
                slots = list(itertools.takewhile(lambda s: s != NO_SLOT, reservation.slots))
                for first in range(0, len(slots), BATCH_BLOCKS):
                    batch = slots[first : first + BATCH_BLOCKS]
                    blocks = hashes[first : first + len(batch)]
                    loaded = await self._tier.load(blocks, [self._slot(slot) for slot in batch])
                    for number, block in enumerate(blocks[:loaded], first):
                        if reservation.commit(block):
                            self._count(block, stays=number < worth_staying)
                    if loaded < len(batch):
                        return

    def _count(self, block: BlockHash, *, stays: bool) -> None:
        if stays:
            self.promoted_blocks += 1
        else:
            self.passed_blocks += 1
            self._passing[block] = None
