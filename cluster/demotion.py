"""Demotion: blocks that leave the pool are written to disk first, if they are worth it.

A chain on disk is unbroken as it is in memory, so what lies before a block is written with it. In
batches, one after the other, and never more than a bounded number of blocks: what comes faster
than the disk takes it leaves without. Must not know what makes blocks leave.
"""

import asyncio
from collections.abc import Callable, Set

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.holds import Pin, Victims
from prefixfleet.store.pool import SlotPool
from prefixfleet.store.ssd import DiskWrite, SsdTier

BATCH_BLOCKS = 32
"""Blocks of one write: the slots of a batch share one flush of the device."""
WAITING_SHARE = 2
"""One slot of the pool in so many may wait for the disk."""
STALLED_S = 10.0
"""A batch that takes longer means that the disk has stopped answering."""


class Demotion:
    """Owned by the daemon's event loop. ``slot`` gives the bytes of a slot of the pool."""

    def __init__(
        self,
        pool: SlotPool,
        tier: SsdTier,
        slot: Callable[[int], memoryview],
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._tier = tier
        self._slot = slot
        self._clock = clock
        self._turn = asyncio.Lock()
        self._batch_since: float | None = None
        self.waiting = 0
        self.refused_busy = 0
        self.not_worth = 0

    @property
    def degraded(self) -> str:
        """Why blocks leave unwritten, empty if they do not."""
        since = self._batch_since
        if since is not None and self._clock() - since > STALLED_S:
            return f"disk: a write of {STALLED_S:g} s has not ended"
        return self._tier.degraded

    async def keep(self, victims: Victims, elsewhere: Set[BlockHash]) -> None:
        """Write what is worth it. ``victims`` stay in place until this returns; another node
        holds those of them that are ``elsewhere``."""
        worth = self._wanted(victims, elsewhere)
        most = max(1, self._pool.capacity // WAITING_SHARE)
        wanted = worth[: max(0, most - self.waiting)]  # what comes first in a chain
        self.refused_busy += len(worth) - len(wanted)
        if not wanted:
            return
        self.waiting += len(wanted)
        try:
            async with self._turn:
                await self._write(wanted)
        finally:
            self.waiting -= len(wanted)

    def _wanted(
        self, victims: Victims, elsewhere: Set[BlockHash]
    ) -> list[tuple[BlockHash, BlockHash, int]]:
        """(block, parent, slot) of what is to be written, parents first.

        While there is room on the disk everything is worth a write; then only the fleet's last
        copy of what a request found since it came, and what lies before that.
        """
        chosen: list[tuple[BlockHash, BlockHash, int]] = []
        above: set[BlockHash] = set()
        roomy = self._tier.roomy
        for block, parent, slot, uses in zip(
            victims.hashes, victims.parents, victims.slots, victims.uses, strict=True
        ):
            if self._tier.holds(block):
                continue
            if roomy or block in above or (uses and block not in elsewhere):
                above.add(parent)
                chosen.append((block, parent, slot))
            else:
                self.not_worth += 1
        return chosen[::-1]

    async def _write(self, wanted: list[tuple[BlockHash, BlockHash, int]]) -> None:
        pins: list[Pin] = []
        writes: dict[BlockHash, DiskWrite] = {}
        try:
            for block, parent, slot in wanted:
                for write, pin in self._before(parent, writes):
                    writes[write.block] = write
                    pins.append(pin)
                writes[block] = DiskWrite(block, parent, self._slot(slot))
            await self._store(list(writes.values()))
        finally:
            for pin in pins:
                pin.release()

    def _before(
        self, parent: BlockHash, planned: dict[BlockHash, DiskWrite]
    ) -> list[tuple[DiskWrite, Pin]]:
        """What of the chain up to ``parent`` is neither on disk nor planned, pinned in the pool."""
        found = []
        above = b""
        for block in [] if parent in planned else self._pool.chain_to(parent):
            if block not in planned and not self._tier.holds(block):
                pin = self._pool.pin([block], used=False)
                found.append((DiskWrite(block, above, self._slot(pin.slots[0])), pin))
            above = block
        return found

    async def _store(self, writes: list[DiskWrite]) -> None:
        for first in range(0, len(writes), BATCH_BLOCKS):
            if not self._tier.accepts:
                return
            self._batch_since = self._clock()
            try:
                await self._tier.store(writes[first : first + BATCH_BLOCKS])
            finally:
                self._batch_since = None
