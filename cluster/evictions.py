"""Evictions of one node: to disk, out of the index, then free; ahead of the need where possible.

Must not know who wants the room.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence

from prefixfleet.cluster.announcer import Announcer
from prefixfleet.cluster.demotion import Demotion
from prefixfleet.store import watermark
from prefixfleet.store.admission import ASKED_BLOCKS, make_room
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.holds import Victims
from prefixfleet.store.pool import SlotPool

LOOK_S = 1.0
"""How often the mark is looked at while nothing is taken: it goes down by itself."""
BUSY = 1 / 60
"""Slots a second from which on a pool counts as one that stores."""
WAIT_S = 1.0
"""Whoever needs room waits so long for the index and the disk, then takes what is free."""


class Evictions:
    """Owned by the daemon's event loop. ``demotion`` is None without a disk tier; ``on_disk``
    says whether a block would still be on this node when it has left the pool."""

    def __init__(
        self,
        pool: SlotPool,
        announcer: Announcer,
        demotion: Demotion | None,
        *,
        on_disk: Callable[[BlockHash], bool],
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._announcer = announcer
        self._demotion = demotion
        self._on_disk = on_disk
        self._clock = clock
        self._mark = watermark.start(pool.capacity, clock())
        self._waiting = 0
        self._taken = 0
        self._refused = 0
        self._low = asyncio.Event()
        self._asked_at = -math.inf
        self._copied = 0
        self._leaving: set[asyncio.Task[None]] = set()
        self.evicted_blocks = 0
        self.full = 0
        self.not_admitted = 0

    async def make_room(self, slots: int) -> None:
        """Have ``slots`` slots free, or as many as can be had within `WAIT_S`."""
        missing = min(slots, self._pool.capacity) - self._pool.free_slots
        if missing > 0:
            self._waiting += missing
            try:
                await self._wait(self._evict(missing))
            finally:
                self._waiting -= missing

    async def admit(self, missing: Sequence[BlockHash], *, patient: bool = False) -> int:
        """Make room for those of a chain's neighbouring blocks that are worth more than what must
        go for them; how many these are. Who is ``patient`` has others in the room of what is
        leaving already, if it is gone within `WAIT_S`."""
        room = make_room(self._pool, missing)
        leaving, blocks = self.start(room.victims), room.blocks
        if patient and blocks < len(missing) and not (self._demotion and self._demotion.stalled):
            await self._until_free(len(missing))
            blocks = max(blocks, min(len(missing), self._pool.free_slots))
        else:
            await self._wait(leaving)
        if self._pool.can_evict:
            self.not_admitted += len(missing) - blocks
        else:
            self._short_of(len(missing) - blocks)
        return blocks

    def start(self, victims: Victims, *, spoiled: bool = False) -> "asyncio.Task[None] | None":
        """Begin what `SlotPool.choose_victims` and its like ask for. ``spoiled`` blocks are not
        written to disk."""
        if not victims.hashes:
            self._pool.free(victims)
            return None
        if self._demotion is not None and not spoiled:
            self._demotion.expect(victims)
        task = asyncio.create_task(self._let_leave(victims, spoiled))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        return task

    async def expel(self, hashes: Sequence[BlockHash]) -> None:
        """Those of ``hashes``, leaves first, that may go leave, whatever they are worth."""
        await self._wait(self.start(self._pool.expel(hashes)))

    @property
    def short(self) -> bool:
        """Whether what is stored pushes something out: no slot is free beyond the mark."""
        return self._pool.free_slots <= self._mark.keep_free and self._mark.taken_per_s > BUSY

    @property
    def spare_slots(self) -> int:
        """Free slots beyond the mark."""
        return self._pool.free_slots - self._mark.keep_free

    def took(self, slots: int) -> None:
        """Call it after so many slots were taken: the mark of free slots follows."""
        self._taken += slots
        self._follow()
        if self._pool.free_slots < self._mark.keep_free:
            self._low.set()

    async def run(self) -> None:
        """Keep as many slots free as the load asks for, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._low.wait()
            self._low.clear()
            self._follow()
            await self._learn_copies()
            if (missing := self._mark.keep_free - self._pool.free_slots) > 0:
                await self._wait(self._evict(missing))

    def room(self) -> dict[str, float]:
        """For status: free slots to keep, the load that this mark follows, and how many of the
        next `ASKED_BLOCKS` to go another node holds too."""
        return {
            "keep_free": self._mark.keep_free,
            "taken_per_s": round(self._mark.taken_per_s, 3),
            "next_held_elsewhere": self._copied,
        }

    async def close(self) -> None:
        """Wait a while for blocks that are on their way out."""
        await self._wait(*self._leaving)

    async def _learn_copies(self) -> None:
        """Before the last copies go, those go of which the fleet has more: ask which these are."""
        soon = self._mark.keep_free + ASKED_BLOCKS >= self._pool.free_slots
        if soon and self._clock() - self._asked_at >= LOOK_S:
            self._asked_at = self._clock()
            blocks = self._pool.soon(ASKED_BLOCKS)
            elsewhere = await self._announcer.elsewhere(blocks) if blocks else set()
            self._pool.note_copies({block: block in elsewhere for block in blocks})
            self._copied = len(elsewhere)

    def _evict(self, count: int) -> "asyncio.Task[None] | None":
        victims = self._pool.choose_victims(count)
        self._short_of(count - len(victims.hashes))
        return self.start(victims)

    def _short_of(self, slots: int) -> None:
        """Some of what was asked for cannot be had."""
        self.full += slots > 0
        self._refused += slots

    def _follow(self) -> None:
        self._mark = watermark.follow(
            watermark.resize(self._mark, self._pool.capacity),
            taken=self._taken,
            waiting=self._waiting,
            refused=self._refused,
            now=self._clock(),
        )
        self._taken = self._refused = 0

    async def _wait(self, *tasks: "asyncio.Task[None] | None") -> None:
        """They go on to their end even if nobody waits."""
        if waiting := {task for task in tasks if task is not None}:
            done, _ = await asyncio.wait(waiting, timeout=WAIT_S)
            for task in done:
                task.result()

    async def _until_free(self, slots: int) -> None:
        """Wait for what leaves until so many are, for `WAIT_S` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                while self._leaving and self._pool.free_slots < slots:
                    first = asyncio.FIRST_COMPLETED
                    done, _ = await asyncio.wait(self._leaving, return_when=first)
                    for task in done:
                        task.result()

    async def _let_leave(self, victims: Victims, spoiled: bool) -> None:
        """To disk, withdraw, free: in this order, and the last in any case."""
        try:
            if self._demotion is not None and not spoiled:
                await self._to_disk(self._demotion, victims)
            await self._announcer.withdraw(victims.hashes, unless=self._on_disk)
        finally:
            self._pool.free(victims)
            self.evicted_blocks += len(victims.hashes)

    async def _to_disk(self, demotion: Demotion, victims: Victims) -> None:
        try:
            elsewhere = await self._announcer.elsewhere(victims.hashes)
            await demotion.keep(victims, elsewhere)
        finally:
            demotion.forget(victims)
