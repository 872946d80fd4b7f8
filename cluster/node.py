"""The node daemon: owns one node's pool, its links, its engines' socket and its place in the index.

Puts the parts together and opens and closes them in order; each part is a file of its own. Plain
asyncio, no Ray: an actor, a terminal or a test may host it.
"""

import asyncio
import contextlib
import logging
import time
from typing import Any, Self

from prefixfleet.cluster.announcer import Announcer
from prefixfleet.cluster.disk import held_disk
from prefixfleet.cluster.disk_tiers import DiskTiers
from prefixfleet.cluster.engine_caches import EngineCaches
from prefixfleet.cluster.engine_questions import Hello
from prefixfleet.cluster.engine_server import EngineServer
from prefixfleet.cluster.handover import HandedOver, Leaving, hand_over
from prefixfleet.cluster.holders import Holders
from prefixfleet.cluster.links import Links
from prefixfleet.cluster.lock_file import only_daemon
from prefixfleet.cluster.loops import Loops
from prefixfleet.cluster.node_cache import NodeCache
from prefixfleet.cluster.node_http import NodeHttp
from prefixfleet.cluster.node_report import NodeReport
from prefixfleet.cluster.node_stats import NodeStats
from prefixfleet.cluster.open_pool import OpenPool
from prefixfleet.cluster.peer_book import PeerBook
from prefixfleet.cluster.pool_host import Kind
from prefixfleet.cluster.pool_opener import PoolOpener
from prefixfleet.cluster.settings import NodeSettings
from prefixfleet.store.errors import IndexUnavailable, ProtocolError
from prefixfleet.store.index import PrefixIndex
from prefixfleet.store.keep import Keep
from prefixfleet.store.namespace import hash_key
from prefixfleet.store.prefetch import Prefetch, prefetch_key
from prefixfleet.store.records import NodeRecord

log = logging.getLogger(__name__)

PEERS_S = 5.0
"""How often the peers' addresses are read again, for the time when the index is away."""


class NodeDaemon:
    """One node of the fleet. Owned by one event loop; an async context manager.

    Needs no engine and no index to start: without an engine it has no pool, without the index it
    serves its own engines and joins later. `wait` returns when it is told to stop.
    """

    def __init__(
        self,
        settings: NodeSettings,
        secret: bytes,
        index: PrefixIndex,
        links: Links,
        engine_index: PrefixIndex | None = None,
    ) -> None:
        """``engine_index`` is told what engines hold themselves; without it nobody is."""
        self.settings = settings
        self.stats = NodeStats()
        self.url = ""
        self._secret = secret
        self._index = index
        self._loops = Loops()
        self._stack = contextlib.AsyncExitStack()
        self._peers = PeerBook(index.members, clock=time.monotonic)
        self._opener = PoolOpener(
            settings,
            links,
            peers=self._peers,
            holders=Holders(index.match, self._peers, settings.name),
            saw_pull=self.stats.saw_pull,
            start=self._loops.start,
        )
        self._announcer = Announcer(
            index,
            record=self.record,
            resident=self._opener.resident,
            segments=self._opener.segments,
            joined=self._joined,
            clock=time.monotonic,
        )
        self._engine_caches = (
            EngineCaches(engine_index, secret, settings.host, time.monotonic)
            if engine_index
            else None
        )
        self._engines = EngineServer(
            settings.socket_path,
            welcome=self._welcome,
            gone=self._gone,
            outcome=self.stats.saw_outcome,
        )
        self._report = NodeReport(
            settings.name,
            self.stats,
            opener=self._opener,
            announcer=self._announcer,
            links=links,
            engines=self._engines,
            engine_caches=self._engine_caches,
        )
        self._http = NodeHttp(
            secret=secret,
            status=self.status,
            prefetch=self._prefetch,
            hand_over=self.hand_over,
            keep=self._keep,
        )

    async def __aenter__(self) -> Self:
        async with self._stack:
            self._stack.enter_context(only_daemon(self.settings))
            if (disk := self._stack.enter_context(held_disk(self.settings))) is not None:
                self._opener.disks = DiskTiers(disk, self.settings)
            self.url = await self._http.open(self.settings.host, self.settings.port)
            self._stack.push_async_callback(self._http.close)
            self._stack.push_async_callback(self._opener.close)
            if self._engine_caches:
                self._stack.push_async_callback(self._engine_caches.close)
            await self._engines.open()
            self._stack.push_async_callback(self._engines.close)
            self._loops.start(self._announcer.run())
            self._loops.start(self._read_peers())
            self._stack.push_async_callback(self._leave)
            self._stack = self._stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def epoch(self) -> int:
        """Epoch of this life in the index; 0 before it has joined."""
        return self._announcer.epoch

    async def wait(self, stop: asyncio.Event) -> None:
        """Return when ``stop`` is set; raises what ended one of the daemon's own loops."""
        await self._loops.wait(stop)

    async def hand_over(self, within_s: float) -> HandedOver:
        """Let peers pull what only this node has; the node serves on meanwhile."""
        deadline = asyncio.get_running_loop().time() + within_s
        if (member := self._announcer.member) is None:
            return HandedOver(0, 0)
        key, giving = prefetch_key(self._secret), []
        for digest, opened in self._opener.pools.items():
            pool, leaving = opened.host.pool, Leaving(member=member, namespace=digest, key=key)
            chains = list(pool.chains())
            giving.append(hand_over(leaving, self._index, chains, pool.segments_of, deadline))
        done = sum(await asyncio.gather(*giving), HandedOver(0, 0))  # none waits for another
        log.info("%d of %d last copies are with peers", done.taken, done.last_copies)
        return done

    def record(self) -> NodeRecord:
        """What the fleet is told of this node."""
        return NodeRecord(
            node=self.settings.name,
            host=self.settings.host,
            contacts=self._report.contacts(),
            http=self.url,
            stats=self.snapshot(),
        )

    def snapshot(self) -> dict[str, Any]:
        """See `NodeReport.snapshot`."""
        return self._report.snapshot()

    def status(self) -> dict[str, Any]:
        """See `NodeReport.status`."""
        return self._report.status()

    async def _welcome(self, hello: Hello) -> tuple[NodeCache, dict[str, Any]]:
        """Open the pool for the first engine of a namespace, refuse one that does not fit."""
        kind = Kind.of(hello, self._secret)
        pool = await self._opener.open_for(kind, self._announcer)
        pool.engines[hello.engine] += 1
        log.info("engine %s, %s of rank %d, is here", hello.engine, hello.role, hello.rank)
        if self._engine_caches:
            self._engine_caches.came(hello)
        return pool.cache, {
            "node": self.settings.name,
            "epoch": pool.host.life,
            "pool_path": str(pool.host.segment.path),
            "pool_bytes": len(pool.host.segment.view),
            "hash_key": hash_key(self._secret),
            "namespace_digest": kind.digest,
        }

    def _gone(self, hello: Hello) -> None:
        digest = Kind.of(hello, self._secret).digest
        self._opener.pools[digest].engines.end(hello.engine, time.monotonic())
        if self._engine_caches:
            self._engine_caches.left(hello)

    def _prefetch(self, hint: Prefetch) -> None:
        try:
            pool = self._pool_of(hint.namespace, "prefetch")
        except ProtocolError:
            self.stats.refused_hints += 1
            raise
        pool.cache.claims.start_early(hint.chain, hint.plan)

    def _keep(self, wish: Keep) -> dict[str, int]:
        try:
            retention = self._pool_of(wish.namespace, "keep").cache.retention
        except ProtocolError:
            self.stats.refused_wishes += 1
            raise
        covered = retention.keep(wish.chain, wish.ttl_s, wish.priority)
        return {"covered": covered} | retention.stats()

    def _pool_of(self, namespace: bytes, what: str) -> OpenPool:
        """Raises `ProtocolError`."""
        if (pool := self._opener.taking(namespace)) is None:
            raise ProtocolError(f"{what}: no engine of this namespace on this node")
        return pool

    def _joined(self, epoch: int) -> None:
        for pool in self._opener.pools.values():
            pool.host.server.epoch = epoch

    async def _read_peers(self) -> None:
        while True:
            await self._peers.refresh()
            await asyncio.sleep(PEERS_S)

    async def _leave(self) -> None:
        await self._loops.end()
        with contextlib.suppress(IndexUnavailable):  # then the lease ends by itself
            await self._announcer.leave()
