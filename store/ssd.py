"""`SsdTier`: the blocks of one namespace that a node keeps on disk. Books in a `SlotPool`, bytes in
`SlotFiles`.

The tier never waits for a disk on the event loop, and never takes the node down: a full or failing
disk stops the writes for a while (`WriteGate`, told in `stats`), and everything that cannot be read
is a miss. What it says it holds, it verifies when it is read.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from prefixfleet.store.block_files import BlockFiles
from prefixfleet.store.bucket_file import DiskBlock
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.disk_space import DiskSpace
from prefixfleet.store.disk_threads import DiskThreads
from prefixfleet.store.errors import CorruptBlock
from prefixfleet.store.eviction import EvictionOrder
from prefixfleet.store.holds import Reservation, Victims
from prefixfleet.store.pool import SlotPool
from prefixfleet.store.tier_space import BATCH_BLOCKS, TierSpace
from prefixfleet.store.wear import WearBudget
from prefixfleet.store.write_gate import WriteGate

log = logging.getLogger(__name__)

COUNTERS = (
    "written_blocks",
    "written_bytes",
    "read_blocks",
    "evicted_blocks",
    "refused_degraded",
    "refused_wear",
    "corrupt",
    "read_error",
    "write_error",
)


@dataclass(frozen=True, slots=True)
class DiskWrite:
    """One block to keep: ``slot`` is its whole slot, which the caller keeps in place meanwhile."""

    block: BlockHash
    parent: BlockHash
    slot: memoryview


@dataclass(frozen=True, slots=True)
class SharedDisk:
    """What the tiers of several namespaces have in common: owned by who opened the disk."""

    threads: DiskThreads
    budget: WearBudget
    space: DiskSpace
    takes_all: bool = False  # when it is full, also what nobody asked for since it came


class SsdTier:
    """Owned by the node daemon's event loop. `open` recovers, `close` closes its files; whoever
    calls them holds the turn of the disk's space, where others write to it.

    ``pool`` has the books: others ask it, and change nothing. ``gate`` says whether it writes.
    ``leaving`` is awaited with the blocks that leave the disk, before their slots are used again.
    """

    def __init__(
        self,
        files: BlockFiles,
        namespace: bytes,
        order: EvictionOrder,
        *,
        disk: SharedDisk,
        leaving: Callable[[Sequence[BlockHash]], Awaitable[None]],
        clock: Callable[[], float],
    ) -> None:
        self._files = files
        self._namespace = namespace
        self.pool = SlotPool(files.num_slots, order, clock, absent=True)
        self._disk = disk
        self._budget = disk.budget
        self._threads = disk.threads
        self.space = TierSpace(
            namespace,
            files,
            self.pool,
            space=disk.space,
            threads=disk.threads,
            leave=self._evict,
            clock=clock,
        )
        self.gate = WriteGate(disk.budget, clock, takes_all=disk.takes_all)
        self._leaving = leaving
        self._counts: Counter[str] = Counter()

    async def open(self) -> int:
        """Bring back what the disk holds, and be a holder of its space; returns the number of
        blocks. Raises `ConfigError`."""
        try:
            found = await self._threads.in_order(self._files.recover)
        except BaseException:  # also who waits no longer: the thread goes on and opens them
            self._threads.close_later(self._files)
            raise
        self.space.recovered()
        self.pool.restore((e.slot, e.block, e.parent) for e in found)
        self._disk.space.holders[self._namespace] = self.space
        return len(found)

    async def close(self) -> None:
        """See `DiskThreads.close_files`."""
        await self._threads.close_files(self._files)

    async def retire(self) -> None:
        """All blocks leave the index, and stay on the disk for who opens it again."""
        while (victims := self.pool.choose_victims(BATCH_BLOCKS)).hashes:
            try:
                await self._leaving(victims.hashes)
            finally:
                self.pool.free(victims)

    def holds(self, block: BlockHash) -> bool:
        """Whether this block is on disk."""
        return self.pool.match([block]) == 1

    @property
    def roomy(self) -> bool:
        """Whether there is room without eviction, and at least half of the wear budget is left."""
        return self.space.roomy and self._budget.left >= 0.5

    async def store(self, writes: Sequence[DiskWrite]) -> list[BlockHash]:
        """Write these blocks, a parent before its children; returns those that are committed.

        Fewer come back when the parent is not on disk, the wear budget is used up, no slot can
        be had, or the disk fails.
        """
        if not self.gate.open:
            self._counts["refused_degraded"] += len(writes)
            return []
        writes = self._affordable(writes)
        above = [self.pool.pin([w.parent], used=False) for w in writes if w.parent]
        try:
            await self._make_room(len(writes))
            return await self._write(self._reserve(writes))
        finally:
            for pin in above:
                pin.release()

    def _reserve(self, writes: Sequence[DiskWrite]) -> list[tuple[DiskWrite, Reservation]]:
        reserved: list[tuple[DiskWrite, Reservation]] = []
        for write in writes:
            reservation = self.pool.reserve(write.parent, [write.block])
            if reservation.slots[0] < 0:
                continue
            if not self._budget.take(self._files.layout.slot_bytes):  # another batch took it
                reservation.abandon(write.block)
                self._counts["refused_wear"] += 1
                continue
            reserved.append((write, reservation))
        return reserved

    def _affordable(self, writes: Sequence[DiskWrite]) -> Sequence[DiskWrite]:
        """Before anything leaves the disk for them."""
        count = self.gate.affords(self._files.layout.slot_bytes, len(writes))
        self._counts["refused_wear"] += len(writes) - count
        return writes[:count]

    async def load(self, hashes: Sequence[BlockHash], targets: Sequence[memoryview]) -> int:
        """Read ``hashes[i]`` into ``targets[i]``, verified; returns how many leading ones came.

        A block that cannot be read or is not what it should be leaves the tier.
        """
        with self.pool.pin(hashes) as pin:
            reads = [
                self._threads.read(self._files, self._namespace, slot, block, target)
                for block, slot, target in zip(pin.hashes, pin.slots, targets, strict=False)
            ]
            results = await asyncio.gather(*reads, return_exceptions=True)
        for i, result in enumerate(results):
            if isinstance(result, CorruptBlock | OSError):
                reason = "corrupt" if isinstance(result, CorruptBlock) else "read_error"
                self._counts[reason] += 1
                log.warning("ssd tier: block %s dropped: %s", pin.hashes[i].hex(), result)
                await self.drop(pin.hashes[i])
                return i
            if isinstance(result, BaseException):
                raise result
        self._counts["read_blocks"] += len(results)
        return len(results)

    async def drop(self, block: BlockHash) -> None:
        """This block, and all that follow it on the disk, leave the tier."""
        await self._leave(self.pool.drop(block))

    def stats(self) -> dict[str, Any]:
        """Figures for status: slots, bytes, counters, and why writes are stopped, if they are."""
        counts = self.pool.counts()
        return {
            "slots": self.pool.capacity,
            "bytes": self.space.held_bytes,
            "resident": counts.resident,
            "pinned": counts.pinned,
            "direct_io": self._files.direct,
            "degraded": self.gate.degraded,
            "wear_left": self._budget.left,
            **dict.fromkeys(COUNTERS, 0),
            **self._counts,
        }

    async def _write(self, reserved: list[tuple[DiskWrite, Reservation]]) -> list[BlockHash]:
        if not reserved:
            return []
        position = self.pool.position
        blocks = [
            (DiskBlock(r.slots[0], w.block, w.parent, position(r.slots[0])), w.slot)
            for w, r in reserved
        ]
        try:
            await self._threads.write(self._files, blocks, self._budget.left_bytes)
        except BaseException as error:
            for write, reservation in reversed(reserved):
                reservation.abandon(write.block)
            if not isinstance(error, OSError):
                raise
            self._counts["write_error"] += 1
            self.gate.failed(error)
            return []
        self.gate.wrote()
        done = [w.block for w, reservation in reserved if reservation.commit(w.block)]
        self._counts["written_blocks"] += len(done)
        self._counts["written_bytes"] += len(done) * self._files.layout.slot_bytes
        return done

    async def _make_room(self, count: int) -> None:
        if self.pool.free_slots < count and (missing := await self.space.make_room(count)):
            await self._evict(self.pool.choose_victims(missing))

    async def _evict(self, victims: Victims) -> None:
        self._counts["evicted_blocks"] += len(victims.hashes)
        await self._leave(victims)

    async def _leave(self, victims: Victims) -> None:
        try:
            if victims.hashes:
                self._files.forget(victims.slots)
                await self._leaving(victims.hashes)
        finally:
            self.pool.free(victims)
