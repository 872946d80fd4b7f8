"""`TierSpace`: the files that one namespace has of its disk: taken one by one, given back whole.

The pool's slots are here where their file is. Before a file goes its blocks leave as any others do.
"""

import logging
from collections.abc import Awaitable, Callable

from prefixfleet.store.block_files import BlockFiles
from prefixfleet.store.disk_space import DiskSpace
from prefixfleet.store.disk_threads import DiskThreads
from prefixfleet.store.holds import Victims
from prefixfleet.store.pool import SlotPool
from prefixfleet.store.slot_regions import oldest

log = logging.getLogger(__name__)

BATCH_BLOCKS = 256
"""Blocks that leave together."""


class TierSpace:
    """Owned by its `SsdTier`; a holder of the disk's ``space``. ``leave`` has blocks leave the
    index, then frees them in the ``pool``, which has no slot before this gives it some."""

    def __init__(
        self,
        digest: bytes,
        files: BlockFiles,
        pool: SlotPool,
        *,
        space: DiskSpace,
        threads: DiskThreads,
        leave: Callable[[Victims], Awaitable[None]],
        clock: Callable[[], float],
    ) -> None:
        self._digest = digest
        self._files = files
        self._pool = pool
        self._space = space
        self._threads = threads
        self._leave = leave
        self._clock = clock
        self._most = -(-files.num_slots // files.bucket_slots)
        self._own: set[int] = set()
        self._needed_s = clock()  # when room was asked for last

    @property
    def open(self) -> bool:
        """See `Holder`."""
        return True

    @property
    def files(self) -> int:
        """See `Holder`."""
        return len(self._own)

    @property
    def held_bytes(self) -> int:
        """See `Holder`."""
        return len(self._own) * self._files.bucket_bytes

    @property
    def roomy(self) -> bool:
        """Whether a block has room that costs this namespace none of its own."""
        if self._pool.free_slots > 0:
            return True
        more = self._space.has_room(self._files.bucket_bytes) or self._space.gives_to(self._digest)
        return more and len(self._own) < self._most

    def idle_s(self) -> float:
        """See `Holder`; a file's worth of free slots has an age too."""
        spare = self._pool.free_slots >= self._files.bucket_slots
        return max(self._pool.idle_s(), self._clock() - self._needed_s if spare else 0.0)

    def recovered(self) -> None:
        """The files that were found on the disk are here."""
        for number in reversed(self._files.buckets):  # the first slot is used first
            self._add(number)

    async def make_room(self, count: int) -> int:
        """Take files for ``count`` free slots, as far as they can be had; the slots that are
        missing then."""
        self._needed_s = self._clock()
        for _ in range(count):
            if self._pool.free_slots >= count or len(self._own) == self._most:
                break
            if not await self._space.obtain(self._digest, self._files.bucket_bytes, self._take):
                break
        return max(0, count - self._pool.free_slots)

    async def give(self) -> bool:
        """See `Holder`; of the oldest files the one with which fewest blocks go."""
        number = await oldest(self._pool, {n: self._slots(n) for n in sorted(self._own)})
        slots, gone = self._slots(number), False
        self._pool.shrink(slots)
        try:
            await self._empty(slots)
            if self._pool.absent(slots):
                await self._threads.in_order(self._files.delete, number)
                gone = True
        except OSError as error:
            log.warning("ssd tier: %s", error)
        finally:
            if gone:
                self._own.remove(number)
            else:
                self._pool.grow(reversed(slots))
        return gone

    async def _empty(self, slots: range) -> None:
        leaving = self._pool.standing_on(slots)
        for first in range(0, len(leaving), BATCH_BLOCKS):
            await self._leave(self._pool.expel(leaving[first : first + BATCH_BLOCKS]))

    def _take(self) -> None:
        self._add(next(n for n in range(self._most) if n not in self._own))

    def _add(self, number: int) -> None:
        self._own.add(number)
        self._pool.grow(reversed(self._slots(number)))

    def _slots(self, number: int) -> range:
        size = self._files.bucket_slots
        return range(number * size, min((number + 1) * size, self._files.num_slots))
