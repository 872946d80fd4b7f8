"""`NodeReport`: what a node tells of itself, to the fleet and to who asks for ``/status``."""

import os
from dataclasses import asdict
from typing import Any

from prefixfleet.cluster.announcer import Announcer
from prefixfleet.cluster.engine_caches import EngineCaches
from prefixfleet.cluster.engine_server import EngineServer
from prefixfleet.cluster.links import Links
from prefixfleet.cluster.node_stats import NodeStats
from prefixfleet.cluster.open_pool import OpenPool, report, sources
from prefixfleet.cluster.pool_opener import PoolOpener


class NodeReport:
    """Reads the parts of a node daemon, which owns it, and changes none."""

    def __init__(
        self,
        name: str,
        stats: NodeStats,
        *,
        opener: PoolOpener,
        announcer: Announcer,
        links: Links,
        engines: EngineServer,
        engine_caches: EngineCaches | None,
    ) -> None:
        self._name = name
        self._stats = stats
        self._opener = opener
        self._announcer = announcer
        self._links = links
        self._engines = engines
        self._engine_caches = engine_caches

    def contacts(self) -> dict[str, str]:
        """Where peers reach the pool, by link."""
        return self._pool.host.contacts() if self._pool else {}

    def snapshot(self) -> dict[str, Any]:
        """How the node stands: names, and numbers in the leaves."""
        announcer = self._announcer
        return {
            **report(self._pool),
            "tiers": self._tiers(),
            "counters": self._stats.numbers() | sources(self._pool),
            "index": {
                "epoch": announcer.epoch,
                "joins": announcer.joins,
                "pending_blocks": announcer.pending,
                "published_blocks": announcer.published_blocks,
                "withdrawn_blocks": announcer.withdrawn_blocks,
            },
            "sessions": self._links.sessions(),
            "forced_link": self._links.forced or "",
            "missing_links": dict(self._links.missing),
            "engines": self._engines.engines,
            "engine_caches": self._engine_caches.numbers() if self._engine_caches else {},
            "refused_engines": self._engines.refused,
            "degraded": self._degraded(),
        }

    def status(self) -> dict[str, Any]:
        """Everything that ``/status`` shows."""
        kind = self._pool.host.kind if self._pool else None
        return {
            "node": self._name,
            "pid": os.getpid(),
            "epoch": self._announcer.epoch,
            "namespace": asdict(kind.namespace) if kind else None,
            "block_bytes": kind.layout.slot_bytes if kind else 0,
            "contacts": self.contacts(),
            "stats": self.snapshot(),
            "outcomes": [asdict(outcome) for outcome in self._stats.outcomes],
        }

    @property
    def _pool(self) -> OpenPool | None:
        return self._opener.pool

    def _tiers(self) -> dict[str, dict[str, Any]]:
        """Of each tier its blocks and their size; that of the engines only where they tell."""
        if self._pool is None:
            return {}
        caches = self._engine_caches.numbers() if self._engine_caches else {}
        held = sum(numbers["resident"] for numbers in caches.values())
        gpu = {"resident": held, "slot_bytes": self._pool.host.kind.layout.slot_bytes}
        return ({"gpu": gpu} if caches else {}) | self._pool.tiers()

    def _degraded(self) -> list[str]:
        pool = self._pool.degraded() if self._pool else []
        caches = self._engine_caches.faults if self._engine_caches else []
        why = (self._announcer.degraded, self._opener.disk_fault, *pool, *caches)
        return [reason for reason in why if reason]
