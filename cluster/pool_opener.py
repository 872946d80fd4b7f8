"""`PoolOpener`: opens a node's pool of each namespace for its first engine, with disk, pulls and
replication, and holds them from then on."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from prefixfleet.cluster.announcer import Announcer
from prefixfleet.cluster.disk_tiers import DiskTiers
from prefixfleet.cluster.holders import Holders
from prefixfleet.cluster.kinds_report import Counts, counts_of, together
from prefixfleet.cluster.leftovers import SHARED_MEMORY, pool_prefix
from prefixfleet.cluster.links import Links
from prefixfleet.cluster.node_cache import NodeCache
from prefixfleet.cluster.open_pool import OpenPool
from prefixfleet.cluster.peer_book import PeerBook
from prefixfleet.cluster.pool_host import Kind, PoolHost
from prefixfleet.cluster.pool_memory import PoolMemory
from prefixfleet.cluster.pulls import Pull
from prefixfleet.cluster.replication import replicate_pool
from prefixfleet.cluster.settings import NodeSettings
from prefixfleet.cluster.sharing import BACK_S, check_alike, check_first, check_place, check_shared
from prefixfleet.cluster.slab_mover import SlabMover
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.namespace import is_of_era
from prefixfleet.store.ssd import SsdTier
from prefixfleet.transfer.pull import Puller, PullResult

log = logging.getLogger(__name__)


class PoolOpener:
    """Owned by the node daemon. ``pools`` are by the digest of their namespace, the first one
    first; ``memory`` and ``mover`` are None before it; ``disks`` is None without a disk.
    ``ended`` has the counts of the pools that were closed, of which there are ``ended_pools``;
    ``ended_wished_blocks`` were to be kept in them."""

    def __init__(
        self,
        settings: NodeSettings,
        links: Links,
        *,
        peers: PeerBook,
        holders: Holders,
        saw_pull: Callable[[PullResult], None],
        start: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"],
    ) -> None:
        """``start`` runs a loop for as long as the daemon lives, or until it is cancelled."""
        self.pools: dict[bytes, OpenPool] = {}
        self.memory: PoolMemory | None = None
        self.mover: SlabMover | None = None
        self.disks: DiskTiers | None = None
        self.ended: Counts = {}
        self.ended_pools = 0
        self.ended_wished_blocks = 0
        self._settings = settings
        self._links = links
        self._peers = peers
        self._holders = holders
        self._saw_pull = saw_pull
        self._start = start
        self._opening = asyncio.Lock()
        self._ending: bytes | None = None  # the digest of the pool that is being closed

    async def open_for(self, kind: Kind, announcer: Announcer) -> OpenPool:
        """The pool of ``kind``, opened and told to the fleet if this is its first use.

        Raises:
            ConfigError: its memory cannot be had, or `check_place`, `check_shared`, or engines
                here differ.
        """
        pool = self._known(kind) if kind.digest != self._ending else None
        if pool is None:
            async with self._opening:
                pool = self._known(kind) or await self._open(kind, announcer)
        pool.host.check_same(kind)
        return pool

    def taking(self, digest: bytes) -> OpenPool | None:
        """The pool of a namespace, unless it ends: what it is told now would be lost with it."""
        pool = self.pools.get(digest)
        if pool is None or pool.engines:
            return pool
        return pool if self.mover and not self.mover.ends(digest) else None

    def resident(self) -> Iterator[BlockHash]:
        """Every block that the node holds."""
        return (block for pool in self.pools.values() for block in pool.cache.resident())

    def segments(self, hashes: Iterable[BlockHash]) -> dict[BlockHash, list[BlockHash]]:
        """Those that the node holds, by the head of their index segment."""
        wanted = list(hashes)
        found: dict[BlockHash, list[BlockHash]] = {}
        for pool in self.pools.values():  # a head is of one namespace, as every block is
            found |= pool.cache.segments(wanted)
        return found

    async def close(self) -> None:
        """Close the pools, their memory, and all links."""
        for pool in self.pools.values():
            await pool.stop()
        for pool in self.pools.values():  # the first one closes the connections of all
            await pool.close()
        if self.disks is not None:
            await self.disks.close()
        if self.memory is not None:
            await self.memory.close()
        for link in self._links.by_name.values():
            await link.close()

    def _known(self, kind: Kind) -> OpenPool | None:
        check_alike(kind, [pool.host.kind for pool in self.pools.values() if pool.engines])
        here = {pool.digest for pool in self.pools.values() if self._keeps_place(pool, kind)}
        if kind.digest not in here:
            check_place(len(here))
        return self.pools.get(kind.digest)

    def _keeps_place(self, pool: OpenPool, newcomer: Kind) -> bool:
        """One that runs the same model otherwise comes in place of what left."""
        if pool.engines:
            return True
        otherwise = pool.host.kind.namespace.weights == newcomer.namespace.weights
        return not otherwise and time.monotonic() - pool.engines.left_s < BACK_S

    async def _open(self, kind: Kind, announcer: Announcer) -> OpenPool:
        try:
            opened = await (self._open_next if self.pools else self._open_first)(kind, announcer)
        except BaseException:
            await self._close_disk(kind)
            raise
        opened.host.server.epoch = announcer.epoch  # it may have joined meanwhile
        self.pools[kind.digest] = opened
        announcer.publish(opened.cache.resident())  # what the disk kept
        announcer.refresh()
        return opened

    async def _open_first(self, kind: Kind, announcer: Announcer) -> OpenPool:
        name, folder = self._settings.name, self._settings.runtime_dir
        check_first(kind, self._settings.pool_bytes)
        path = SHARED_MEMORY / f"{pool_prefix(folder)}{name}"
        memory = await asyncio.to_thread(  # reserving it takes a while
            PoolMemory.create, path, self._settings.pool_bytes
        )
        try:
            host = await self._host(kind, memory, shared=False)
            memory.servers.add(host.server)
            await memory.listen(list(self._links.by_name.values()), self._settings.host)
            opened = self._around(host, await self._open_disk(kind), announcer)
        except BaseException:
            await memory.close()
            raise
        self.memory = memory
        self.mover = SlabMover(memory.slabs, opened, time.monotonic, partial(self._end, announcer))
        self._start(self.mover.run())
        return opened

    async def _open_next(self, kind: Kind, announcer: Announcer) -> OpenPool:
        assert self.memory is not None
        assert self.mover is not None
        check_shared(self.memory.slabs, kind, [pool.host.kind for pool in self.pools.values()])
        host = await self._host(kind, self.memory, shared=True)
        opened = self._around(host, await self._open_disk(kind), announcer)
        self.memory.servers.add(host.server)
        self.mover.add(opened)
        return opened

    async def _end(self, announcer: Announcer, pool: OpenPool) -> bool:
        """Close a pool that has no slot and no engine; False if an engine of it came."""
        async with self._opening:
            if pool.engines:
                return False
            assert self.memory is not None
            self._ending, wished = pool.digest, len(pool.cache.retention)
            await pool.stop()
            await self._close_disk(pool.host.kind)
            del self.pools[pool.digest]
            self.memory.servers.remove(pool.host.server)
            self.ended = together([self.ended, counts_of(pool)])
            self.ended_pools += 1
            self.ended_wished_blocks += wished
            announcer.refresh()
            await pool.close()
            self._ending = None
        what = "namespace %s has no engine and no place here any more; %d blocks were to be kept"
        log.log(logging.WARNING if wished else logging.INFO, what, pool.name, wished)
        return True

    async def _host(self, kind: Kind, memory: PoolMemory, *, shared: bool) -> PoolHost:
        return await asyncio.to_thread(
            PoolHost.open,
            kind,
            memory,
            shared=shared,
            node=self._settings.name,
            eviction=self._settings.eviction,
            on_corrupt=partial(self._drop, kind.digest),
            bring=partial(self._bring, kind.digest),
        )

    def _around(self, host: PoolHost, tier: SsdTier | None, announcer: Announcer) -> OpenPool:
        """All that works on the pool; its loops begin when nothing can fail any more."""
        layout, digest = host.kind.layout, host.kind.digest
        puller = Puller(
            host.pool,
            host.segment.view,
            layout,
            links=self._links.by_name,
            forced=self._links.forced,
            beside=next((pool.puller for pool in self.pools.values()), None),
        )
        cache = NodeCache(
            host.pool,
            layout.shards,
            tier,
            slot=host.slot,
            peers=self._peers,
            holders=self._holders,
            announcer=announcer,
            move=partial(self._move, digest),
            examine=host.examine,
            clock=time.monotonic,
        )
        link, publish = self._links.by_name["tcp"], cache.arrived
        replicator = replicate_pool(self._settings, host, link, self._peers, publish)
        replicator.open()
        loops = self._start(cache.run()), self._start(puller.prober.run())
        return OpenPool(host, cache, puller, replicator, self._saw_pull, loops)

    async def _open_disk(self, kind: Kind) -> SsdTier | None:
        if self.disks is None:
            return None
        return await self.disks.open(kind, partial(self._left_disk, kind.digest))

    async def _close_disk(self, kind: Kind) -> None:
        """What it holds stays there, but for a namespace that no engine will come with again."""
        if self.disks is not None:
            await self.disks.end(kind.digest, keep=not is_of_era(kind.namespace))

    async def _left_disk(self, digest: bytes, hashes: Sequence[BlockHash]) -> None:
        if (pool := self.pools.get(digest)) is not None:  # else nothing was told of it
            await pool.cache.left_disk(hashes)

    async def _bring(self, digest: bytes, hashes: Sequence[BlockHash], within_s: float) -> None:
        if (pool := self.pools.get(digest)) is not None:
            await pool.cache.offer(hashes, within_s)

    async def _move(self, digest: bytes, pull: Pull) -> PullResult:
        return await self.pools[digest].move(pull)

    def _drop(self, digest: bytes, block: BlockHash) -> None:
        self.pools[digest].cache.drop(block)
