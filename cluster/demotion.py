"""Demotion: blocks that leave the pool are written to disk first, if they are worth it.

A chain on disk is unbroken as it is in memory, so what lies before a block is written with it, even
if that has begun to leave too, and waits for its own turn. In batches, one after the other, and
never more than a bounded number of blocks: what comes faster than the disk takes it leaves without.
Must not know what makes blocks leave.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Set

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
        self._leaving: dict[BlockHash, tuple[BlockHash, int]] = {}  # its parent and its slot
        self._needed: Counter[BlockHash] = Counter()  # by what waits, since it follows them
        self._batch_since: float | None = None
        self.waiting = 0
        self.refused_busy = 0
        self.not_worth = 0

    @property
    def stalled(self) -> bool:
        """Whether the disk has stopped answering."""
        since = self._batch_since
        return since is not None and self._clock() - since > STALLED_S

    @property
    def degraded(self) -> str:
        """Why blocks leave unwritten, empty if they do not."""
        stalled = f"disk: a write of {STALLED_S:g} s has not ended"
        return stalled if self.stalled else self._tier.gate.degraded

    def expect(self, victims: Victims) -> None:
        """They will be given to `keep`. Until that returns they may be written with what left
        before them."""
        steps = zip(victims.hashes, victims.parents, victims.slots, strict=True)
        self._leaving |= {block: (parent, slot) for block, parent, slot in steps}

    def forget(self, victims: Victims) -> None:
        """They will not be written any more."""
        for block in victims.hashes:
            self._leaving.pop(block, None)

    async def keep(self, victims: Victims, elsewhere: Set[BlockHash]) -> None:
        """Write what is worth it. ``victims`` stay in place until this returns, and whether they
        are on disk is clear then; another node holds those of them that are ``elsewhere``."""
        try:
            wanted = self._chosen(victims, elsewhere)
            if wanted or any(block in self._needed for block in victims.hashes):
                await self._in_turn(wanted)
        finally:
            self.forget(victims)

    def _chosen(
        self, victims: Victims, elsewhere: Set[BlockHash]
    ) -> list[tuple[BlockHash, BlockHash, int]]:
        """What is wanted of these, as far as it may wait for the disk."""
        worth = self._wanted(victims, elsewhere)
        most = max(1, self._pool.capacity // WAITING_SHARE)
        wanted = worth[: max(0, most - self.waiting)]  # what comes first in a chain
        self.refused_busy += len(worth) - len(wanted)
        return wanted

    async def _in_turn(self, wanted: list[tuple[BlockHash, BlockHash, int]]) -> None:
        """Write what is wanted; without any, wait until those before have what they need."""
        parents = [parent for _, parent, _ in wanted]
        self.waiting += len(wanted)
        self._needed.update(parents)
        try:
            async with self._turn:
                await self._write(wanted)
        finally:
            self.waiting -= len(wanted)
            self._need_no_more(parents)

    def _need_no_more(self, blocks: Iterable[BlockHash]) -> None:
        self._needed.subtract(blocks)
        self._needed = +self._needed

    def _wanted(
        self, victims: Victims, elsewhere: Set[BlockHash]
    ) -> list[tuple[BlockHash, BlockHash, int]]:
        """(block, parent, slot) of what is to be written, parents first.

        While there is room on the disk everything is worth a write; then only the fleet's last
        copy, and what lies before that; and of what no request found since it came, only where
        the tier takes that too.
        """
        chosen: list[tuple[BlockHash, BlockHash, int]] = []
        above: set[BlockHash] = set()
        roomy, takes_unused = self._tier.roomy, self._tier.gate.takes_unused
        for block, parent, slot, uses in zip(
            victims.hashes, victims.parents, victims.slots, victims.uses, strict=True
        ):
            if self._tier.holds(block):
                continue
            needed = block in above or block in self._needed
            if roomy or needed or ((uses or takes_unused) and block not in elsewhere):
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
                if self._tier.holds(block):  # written with what follows it, which left first
                    continue
                pins += self._before(parent, writes)
                writes[block] = DiskWrite(block, parent, self._slot(slot))
            await self._store(list(writes.values()))
        finally:
            for pin in pins:
                self._need_no_more(pin.hashes)
                pin.release()

    def _before(self, parent: BlockHash, writes: dict[BlockHash, DiskWrite]) -> list[Pin]:
        """Add to ``writes`` what of the chain up to ``parent`` is missing; the pins of it."""
        leaving: list[DiskWrite] = []
        slots: list[int] = []
        while parent in self._leaving and not self._settled(parent, writes):
            above, slot = self._leaving[parent]
            leaving.insert(0, DiskWrite(parent, above, self._slot(slot)))
            slots.append(slot)
            parent = above
        chain = [] if self._settled(parent, writes) else self._pool.chain_to(parent)
        pin = self._pool.pin(chain, used=False)
        steps = zip(chain, (b"", *chain), pin.slots, strict=False)
        resident = [DiskWrite(block, above, self._slot(slot)) for block, above, slot in steps]
        writes |= {w.block: w for w in (*resident, *leaving) if not self._tier.holds(w.block)}
        pins = [pin, self._pool.pin_leaving(slots)]
        self._needed.update(block for pin in pins for block in pin.hashes)
        return pins

    def _settled(self, block: BlockHash, writes: dict[BlockHash, DiskWrite]) -> bool:
        """Whether what follows this block has it before it on disk."""
        return not block or block in writes or self._tier.holds(block)

    async def _store(self, writes: list[DiskWrite]) -> None:
        for first in range(0, len(writes), BATCH_BLOCKS):
            if not self._tier.gate.open:
                return
            self._batch_since = self._clock()
            try:
                await self._tier.store(writes[first : first + BATCH_BLOCKS])
            finally:
                self._batch_since = None
