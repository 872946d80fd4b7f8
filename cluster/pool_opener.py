"""`PoolOpener`: opens a node's pool for its first engine, with disk, pulls and replication, and
holds it from then on."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any

from prefixfleet.cluster.announcer import Announcer
from prefixfleet.cluster.disk import Disk, open_tier
from prefixfleet.cluster.holders import Holders
from prefixfleet.cluster.leftovers import SHARED_MEMORY, pool_prefix
from prefixfleet.cluster.links import Links
from prefixfleet.cluster.node_cache import NodeCache
from prefixfleet.cluster.open_pool import OpenPool
from prefixfleet.cluster.peer_book import PeerBook
from prefixfleet.cluster.pool_host import Kind, PoolHost
from prefixfleet.cluster.pulls import Pull
from prefixfleet.cluster.replication import replicate_pool
from prefixfleet.cluster.settings import NodeSettings
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.ssd import SsdTier
from prefixfleet.transfer.pull import Puller, PullResult

log = logging.getLogger(__name__)


class PoolOpener:
    """Owned by the node daemon. ``pool`` is None until an engine came; ``disk`` is the folder that
    the daemon holds, None without one; ``disk_fault`` says why it is not used."""

    def __init__(
        self,
        settings: NodeSettings,
        links: Links,
        *,
        peers: PeerBook,
        holders: Holders,
        saw_pull: Callable[[PullResult], None],
        start: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        """``start`` runs a loop for as long as the daemon lives."""
        self.pool: OpenPool | None = None
        self.disk: Disk | None = None
        self.disk_fault = ""
        self._settings = settings
        self._links = links
        self._peers = peers
        self._holders = holders
        self._saw_pull = saw_pull
        self._start = start
        self._opening = asyncio.Lock()

    async def open_for(self, kind: Kind, announcer: Announcer) -> OpenPool:
        """The pool, opened for blocks of ``kind`` and told to the fleet if this is its first use.

        Raises:
            ConfigError: its memory cannot be had, or it is open for blocks of another kind.
        """
        async with self._opening:
            if self.pool is None:
                opened = await self._open(kind, announcer)
                opened.host.server.epoch = announcer.epoch  # it may have joined meanwhile
                self.pool = opened
                announcer.publish(self.resident())  # what the disk kept
                announcer.refresh()
        self.pool.host.check_same(kind)
        return self.pool

    def resident(self) -> Iterator[BlockHash]:
        """Every block that the node holds."""
        return self.pool.cache.resident() if self.pool else iter(())

    def segments(self, hashes: Iterable[BlockHash]) -> dict[BlockHash, list[BlockHash]]:
        """Those that the node holds, by the head of their index segment."""
        return self.pool.cache.segments(hashes) if self.pool else {}

    async def close(self) -> None:
        """Close the pool, and all links."""
        if self.pool is not None:
            await self.pool.close()
        for link in self._links.by_name.values():
            await link.close()

    async def _open(self, kind: Kind, announcer: Announcer) -> OpenPool:
        name, folder = self._settings.name, self._settings.runtime_dir
        host = await asyncio.to_thread(  # reserving the memory takes a while
            PoolHost.open,
            kind,
            SHARED_MEMORY / f"{pool_prefix(folder)}{name}",
            self._settings.pool_bytes,
            node=name,
            eviction=self._settings.eviction,
            on_corrupt=self._drop,
            bring=self._bring,
        )
        try:
            await host.listen(list(self._links.by_name.values()), self._settings.host)
            return self._around(host, await self._open_disk(kind), announcer)
        except BaseException:
            await host.close()
            raise

    def _around(self, host: PoolHost, tier: SsdTier | None, announcer: Announcer) -> OpenPool:
        """All that works on the pool; its loops begin when nothing can fail any more."""
        layout = host.kind.layout
        puller = Puller(
            host.pool,
            host.segment.view,
            layout,
            links=self._links.by_name,
            forced=self._links.forced,
        )
        cache = NodeCache(
            host.pool,
            layout.shards,
            tier,
            slot=host.slot,
            peers=self._peers,
            holders=self._holders,
            announcer=announcer,
            move=self._move,
            examine=host.examine,
            clock=time.monotonic,
        )
        link, publish = self._links.by_name["tcp"], cache.arrived
        replicator = replicate_pool(self._settings, host, link, self._peers, publish)
        replicator.open()
        self._start(cache.run())
        self._start(puller.prober.run())
        return OpenPool(host, cache, puller, replicator, self._saw_pull)

    async def _open_disk(self, kind: Kind) -> SsdTier | None:
        """The disk tier, if there is one. A disk that fails leaves the node without, and shows."""
        if self.disk is None:
            return None
        try:
            return await open_tier(self.disk, self._settings, kind, self._left_disk)
        except ConfigError as error:
            log.error("no disk tier: %s", error)
            self.disk_fault = f"no disk tier: {error}"
            return None

    async def _left_disk(self, hashes: Sequence[BlockHash]) -> None:
        assert self.pool is not None
        await self.pool.cache.left_disk(hashes)

    async def _bring(self, hashes: Sequence[BlockHash], within_s: float) -> None:
        if self.pool is not None:
            await self.pool.cache.offer(hashes, within_s)

    async def _move(self, pull: Pull) -> PullResult:
        assert self.pool is not None
        return await self.pool.move(pull)

    def _drop(self, block: BlockHash) -> None:
        assert self.pool is not None
        self.pool.cache.drop(block)
