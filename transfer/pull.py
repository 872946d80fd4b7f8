"""`Puller`: the receiving side, and the one read path. It never raises for a pull that failed.

A pull reserves slots in our pool, leases the chain at one source or several, reads their slots
into ours in portions, proves every shard, and commits block after block in the order of the
chain. Whatever goes wrong ends in a shorter prefix and a reason; the caller recomputes the rest.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.errors import PullFailed
from prefixfleet.store.pool import SlotPool
from prefixfleet.store.slot import SlotLayout
from prefixfleet.transfer.assembly import Assembly
from prefixfleet.transfer.closing import Closing
from prefixfleet.transfer.flow import Flow
from prefixfleet.transfer.gather import LINK_FAILURES, Gathering, Others
from prefixfleet.transfer.link import Deadline, Link
from prefixfleet.transfer.paths import Acquaintance, Paths
from prefixfleet.transfer.peers import PeerCache
from prefixfleet.transfer.probe import Prober
from prefixfleet.transfer.reading import Read, learn
from prefixfleet.transfer.source import Reader

log = logging.getLogger(__name__)

PORTION_BYTES = 32 * 1024 * 1024
"""A portion costs both ends together 0.8 ms of processor time, however few bytes it brings."""
MULTI_BYTES = 2 * PORTION_BYTES
"""Pulls of at least so many bytes are made from several sources at once, if there are any."""
MAX_AT_ONCE = 3
SAMPLE_BLOCKS = 256
"""Blocks of a source that are remembered, to measure its other links with."""
CLOSE_S = 10.0
POOL_FULL = "pool_full"
"""Failure of a pull that got no slot here: the pool is full, or somebody else writes the block."""


@dataclass(frozen=True, slots=True)
class PullResult:
    """What a pull brought. ``blocks`` leading blocks of those asked for are in the pool now.

    ``bytes`` were committed, headers and padding included; ``link`` is that of the source that
    brought most, "" when none did. ``failure`` is "" or says why there are fewer blocks than
    asked for: the ``reason`` of an error of `prefixfleet.store.errors`, `MISSING` or `POOL_FULL`.
    """

    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    link: str = ""
    failure: str = ""


class Puller:
    """Pulls into one pool. Owned by the daemon's event loop, as the pool is.

    ``links`` are by name those this node can use, ``forced`` the only one it may use (None:
    chosen by what is known of the path).
    """

    def __init__(
        self,
        pool: SlotPool,
        segment: memoryview,
        layout: SlotLayout,
        *,
        links: Mapping[str, Link],
        forced: str | None = None,
        flow: Flow | None = None,
        beside: "Puller | None" = None,
    ) -> None:
        """Connections, bounds and what is known of the paths are shared with the puller that this
        one is ``beside``, which has the same ``links`` and closes them first."""
        self.counters: Counter[str] = Counter()  # pulls by outcome: "ok" or a failure
        self.paths: Paths = beside.paths if beside else Paths(links, forced, time.monotonic)
        self._pool = pool
        self._layout = layout
        self._afterwards: set[asyncio.Task[None]] = set()
        self._peers: PeerCache = beside._peers if beside else PeerCache(links)
        self._flow: Flow = beside._flow if beside else flow or Flow()
        self._is_guest = beside is not None
        self._reader = Reader(
            pool, segment, layout, peers=self._peers, flow=self._flow, later=self._later
        )
        self.prober = Prober(
            layout, paths=self.paths, peers=self._peers, flow=self._flow, later=self._later
        )

    async def pull(
        self,
        contacts: Mapping[str, str],
        *,
        namespace: bytes,
        epoch: int,
        parent: BlockHash,
        hashes: Sequence[BlockHash],
        deadline: Deadline,
        link: str | None = None,
        others: Others | None = None,
    ) -> PullResult:
        """Bring the leading ones of ``hashes``, a chain that follows ``parent`` (b"" at the
        root), from life ``epoch`` of the peer with these contacts (link name to address).

        ``others`` names more sources, which help with a long pull, and take over when one fails
        or lacks blocks. Ends by ``deadline``, in `time.monotonic` seconds. ``link`` forces one.
        Blocks that are here already count as brought; make room in the pool before. Never
        raises, except when it is cancelled; slots that were being read into come back to the
        pool by themselves.
        """
        started = time.monotonic()
        hashes = tuple(hashes)
        at_once = max(1, PORTION_BYTES // self._layout.slot_bytes)
        with (
            self._pool.pin([parent] if parent else []),
            self._pool.reserve(parent, hashes) as reservation,
        ):
            assembly = Assembly(reservation, self._pool, at_once)
            read = Read(
                contacts=contacts,
                epoch=epoch,
                namespace=namespace,
                hashes=hashes[: assembly.end],
                deadline=deadline,
                forced=link or self.paths.forced,
            )
            long = assembly.end * self._layout.slot_bytes >= MULTI_BYTES
            gathering = Gathering(
                assembly,
                read,
                others=others,
                at_once=MAX_AT_ONCE if long else 1,
                begin=self._read,
                ended=self._ended,
                later=self._later,
            )
            await gathering.run()
        blocks = assembly.blocks
        failure = gathering.failure
        if blocks == len(hashes):
            failure = ""
        elif assembly.finished:
            failure = POOL_FULL
        self.counters[failure or "ok"] += 1
        best = max(gathering.tried, key=lambda read: read.blocks, default=None)
        return PullResult(
            blocks=blocks,
            bytes=assembly.committed * self._layout.slot_bytes,
            seconds=time.monotonic() - started,
            link=best.link if best else "",
            failure=failure,
        )

    @property
    def closing(self) -> Closing:
        """Connections that are being closed, and those that do not close."""
        return self._peers.closing

    async def close(self) -> None:
        """Close every connection that is not another puller's. Pulls in flight must have ended
        or been cancelled."""
        if not self._is_guest:
            await self._peers.close()
        if self._afterwards:
            await asyncio.wait(self._afterwards, timeout=CLOSE_S)

    async def _read(self, read: Read, assembly: Assembly) -> None:
        read.started = time.monotonic()
        size_bytes = len(read.hashes) * self._layout.slot_bytes
        read.link = self.paths.choose(read.contacts, size_bytes, read.forced).link
        read.contact = read.contacts[read.link]
        await self._reader.run(read, assembly)

    def _ended(self, read: Read, task: "asyncio.Task[None]") -> str:
        """Learn from a source that is done with. Returns why it failed, "" if it did not."""
        try:
            task.result()
        except PullFailed as error:
            self.paths.failed[error.reason] += 1
            if error.reason in LINK_FAILURES:
                self.paths.lost(read.contact)
            log.info("pull from %s over %s: %s", read.node or "?", read.link or "?", error)
            return error.reason
        if read.blocks:
            learn(self.paths, read, self._layout.slot_bytes)
            hashes = read.hashes[: min(read.blocks, SAMPLE_BLOCKS)]
            met = Acquaintance(read.contacts, read.epoch, read.namespace, self._layout, hashes)
            self.paths.met(read.node, met)
        return ""

    def _later(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._afterwards.add(task)
        task.add_done_callback(self._afterwards.discard)
