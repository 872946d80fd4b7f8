"""What a node says to the index: its lease, its record, the blocks it holds.

One loop and one lock for all of it, so that what is withdrawn is never published again behind the
evictor's back. Must not know engines, links or slots: it gets hashes and gives hashes.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.errors import Fenced, IndexUnavailable
from prefixfleet.store.index import Membership, PrefixIndex
from prefixfleet.store.records import NodeRecord

log = logging.getLogger(__name__)

RENEW_S = 1.0
PUBLISH_BLOCKS = 256
"""Blocks a round: keeps one call short, and with `PAUSE_S` bounds what a node asks of Redis."""
PAUSE_S = 0.005

Segments = Callable[[Iterable[BlockHash]], Mapping[BlockHash, Sequence[BlockHash]]]


class Announcer:
    """Keeps the index in step with the pool: publish after commit, withdraw before free.

    Owned by the daemon's event loop. ``joined`` is told each new epoch. Without the index it goes
    on trying each second, keeps the last epoch (peers that were told it may still pull), and
    remembers what to say later. A life whose blocks could not be withdrawn is void: the next
    contact joins anew and says everything.
    """

    def __init__(
        self,
        index: PrefixIndex,
        *,
        record: Callable[[], NodeRecord],
        resident: Callable[[], Iterable[BlockHash]],
        segments: Segments,
        joined: Callable[[int], None],
        clock: Callable[[], float],
    ) -> None:
        self._index = index
        self._record = record
        self._resident = resident
        self._segments = segments
        self._on_joined = joined
        self._clock = clock
        self._pending: dict[BlockHash, None] = {}  # never more than the pool holds
        self._lock = asyncio.Lock()
        self._wake = asyncio.Event()
        self._member: Membership | None = None
        self._joined = False
        self._renewed_at = float("-inf")
        self.degraded = ""
        self.joins = 0
        self.published_blocks = 0
        self.withdrawn_blocks = 0

    @property
    def epoch(self) -> int:
        """Epoch of the latest life, also while the index is away; 0 before the first."""
        return self._member.epoch if self._member else 0

    @property
    def member(self) -> Membership | None:
        """The life that the index knows; None while there is none."""
        return self._member if self._joined else None

    @property
    def pending(self) -> int:
        """Blocks that are held and not in the index yet."""
        return len(self._pending)

    def publish(self, hashes: Iterable[BlockHash]) -> None:
        """Say soon that these blocks are here. Call it after they are committed."""
        self._pending.update(dict.fromkeys(hashes))
        self._wake.set()

    def refresh(self) -> None:
        """Send the node's record now and not only with the next renewal."""
        self._renewed_at = float("-inf")
        self._wake.set()

    async def withdraw(
        self, hashes: Sequence[BlockHash], unless: Callable[[BlockHash], bool] = lambda _: False
    ) -> None:
        """Say that these blocks go, ``unless`` one is still, or again, on this node. When it
        returns, the index no longer names the others for the current life, or that life is void.
        """
        if all(map(unless, hashes)):
            return
        async with self._lock:  # what came back while this waited is published already
            gone = [block for block in hashes if not unless(block)]
            for block in gone:
                self._pending.pop(block, None)
            if not gone or self._member is None or not self._joined:
                return
            try:
                await self._index.withdraw(self._member, self._segments(gone))
                self.withdrawn_blocks += len(gone)
            except (Fenced, IndexUnavailable) as error:
                self._end_life(f"blocks could not be withdrawn: {error}")

    async def elsewhere(self, hashes: Sequence[BlockHash]) -> set[BlockHash]:
        """Those of this node's blocks that another node holds too, as far as the index says now."""
        if self._member is None or not self._joined:
            return set()
        try:
            copies = await self._index.copies(self._segments(hashes))
        except IndexUnavailable as error:
            self._degrade(f"index unavailable: {error}")
            return set()
        return {b for b, count in copies.items() if count > (b not in self._pending)}

    async def run(self) -> None:
        """Join, renew and publish until cancelled."""
        while True:
            try:
                async with self._lock:
                    await self._keep_lease()
                    await self._publish_some()
                self._recovered()
            except Fenced as error:
                self._end_life(str(error))
            except IndexUnavailable as error:
                self._degrade(f"index unavailable: {error}")
            await self._rest()

    async def leave(self) -> None:
        """End this life at once, if the index answers."""
        async with self._lock:
            if self._member is not None and self._joined:
                self._joined = False
                await self._index.leave(self._member)

    async def _keep_lease(self) -> None:
        if not self._joined:
            await self._join()
        elif self._clock() - self._renewed_at >= RENEW_S and self._member:
            self._renewed_at = self._clock()
            await self._index.renew(self._member, self._record())

    async def _join(self) -> None:
        record = self._record()
        for member, other in await self._index.members():
            if self._member and member.node == record.node and member.epoch != self.epoch:
                raise IndexUnavailable(
                    f"node name {record.node!r} is taken by a daemon on {other.host}; "
                    "set PREFIXFLEET_NODE_NAME so that every daemon has its own"
                )
        self._member = await self._index.join(record)
        self._joined = True
        self._renewed_at = self._clock()
        self._pending = dict.fromkeys(self._resident())
        self.joins += 1
        self._on_joined(self.epoch)
        log.info("joined as %s, epoch %d", record.node, self.epoch)

    async def _publish_some(self) -> None:
        batch = list(self._pending)[:PUBLISH_BLOCKS]
        if not batch or self._member is None:
            return
        await self._index.publish(self._member, self._segments(batch))
        self.published_blocks += len(batch)
        for block in batch:
            self._pending.pop(block, None)

    async def _rest(self) -> None:
        """Until there is something to say; the pause bounds the calls a second."""
        await asyncio.sleep(RENEW_S if self.degraded else PAUSE_S)
        if self._pending or self.degraded:
            return
        due_s = self._renewed_at + RENEW_S - self._clock()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, due_s)):
                await self._wake.wait()
        self._wake.clear()

    def _end_life(self, why: str) -> None:
        self._joined = False
        log.warning("epoch %d is void, joining anew: %s", self.epoch, why)
        self._wake.set()

    def _degrade(self, why: str) -> None:
        if not self.degraded:
            log.warning("degraded, serving from this node's own pool: %s", why)
        self.degraded = why

    def _recovered(self) -> None:
        if self.degraded:
            log.info("the index answers again")
        self.degraded = ""
