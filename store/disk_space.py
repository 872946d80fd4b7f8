"""`DiskSpace`: how much of a node's disk each namespace has: the oldest goes first.

Each namespace keeps blocks of its own size in files of its own, and a file is given back as a
whole. There is one cap on all files together. While it is not reached, whoever writes takes one
more; then a file of the namespace goes whose blocks were not used for longest, as one LRU order
over all of them would have it, or the writer makes room among its own.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from prefixfleet.store.slab_shares import LEAST_AGE_S, OLDER

RETRY_S = 30.0
"""Who could not give a file is not asked for so long: blocks may have left for nothing."""

Name = TypeVar("Name")


@dataclass(frozen=True, slots=True)
class DiskPart(Generic[Name]):
    """What one namespace has: ``files``, and how long ago that was used which nobody used for
    longest."""

    name: Name
    files: int
    idle_s: float


def giver_of(taker: DiskPart[Name], others: Iterable[DiskPart[Name]]) -> Name | None:
    """Who gives a file to ``taker`` on a full disk; None: nobody, it evicts what it has.

    Blocks must be clearly older for it, else two that are equally busy take from each other in
    turn. Who has nothing gets one file of the oldest in any case, unless it is the last.
    """
    age_s = max(LEAST_AGE_S, OLDER * taker.idle_s)
    able = [o for o in others if o.files and _gives(o, age_s, in_any_case=not taker.files)]
    oldest = max(able, key=lambda o: (o.idle_s, o.files), default=None)
    return oldest.name if oldest else None


def _gives(part: DiskPart[Name], age_s: float, *, in_any_case: bool) -> bool:
    return part.idle_s > age_s or (in_any_case and part.files > 1)


class Holder(Protocol):
    """A namespace with files on the disk, open or not."""

    @property
    def open(self) -> bool:
        """Whether it takes files too. Who does not is no holder any more without one."""
        ...

    @property
    def files(self) -> int:
        """How many."""
        ...

    @property
    def held_bytes(self) -> int:
        """What they take."""
        ...

    def idle_s(self) -> float:
        """See `DiskPart`."""
        ...

    async def give(self) -> bool:
        """Delete one file; what it held left the index before. False if it is still there."""
        ...


class DiskSpace:
    """Owned by the node's event loop, as its ``holders`` are, which are by the namespace's digest.
    ``turn`` is held while files come or go; hold it to change the holders."""

    def __init__(self, cap_bytes: int, clock: Callable[[], float]) -> None:
        self.cap_bytes = cap_bytes
        self.holders: dict[bytes, Holder] = {}
        self.turn = asyncio.Lock()
        self.given_files = 0
        self._clock = clock
        self._stuck_until: dict[bytes, float] = {}

    @property
    def held_bytes(self) -> int:
        """What all files take, also those that are promised and not written yet."""
        return sum(holder.held_bytes for holder in self.holders.values())

    def has_room(self, size: int) -> bool:
        """Whether a file of ``size`` bytes fits beside what is there."""
        return self.held_bytes + size <= self.cap_bytes

    def gives_to(self, digest: bytes) -> bool:
        """Whether another namespace would give it a file now."""
        known = digest in self.holders
        return known and giver_of(self._part(digest), self._others(digest)) is not None

    async def obtain(self, digest: bytes, size: int, take: Callable[[], None]) -> bool:
        """Have room for one more file of ``size`` bytes, and ``take`` it: count it as held. False
        if that would take what is younger than what it has itself, or it is no holder any more."""
        async with self.turn:
            if digest not in self.holders:
                return False
            while not self.has_room(size):
                giver = giver_of(self._part(digest), self._others(digest))
                if giver is None or not await self._give(giver):
                    return False
            take()
            return True

    async def _give(self, digest: bytes) -> bool:
        holder = self.holders[digest]
        given = await holder.give()
        if given:
            self.given_files += 1
            if not (holder.open or holder.files):
                del self.holders[digest]
        else:
            self._stuck_until[digest] = self._clock() + RETRY_S
        return given

    def _others(self, digest: bytes) -> Iterable[DiskPart[bytes]]:
        now = self._clock()
        self._stuck_until = {d: at for d, at in self._stuck_until.items() if at > now}
        others = self.holders.keys() - {digest} - self._stuck_until.keys()
        return [self._part(other) for other in others]

    def _part(self, digest: bytes) -> DiskPart[bytes]:
        holder = self.holders[digest]
        return DiskPart(digest, holder.files, holder.idle_s())
