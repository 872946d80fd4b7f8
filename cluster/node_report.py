"""`NodeReport`: what a node tells of itself, to the fleet and to who asks for ``/status``."""

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from prefixfleet.cluster.announcer import Announcer
from prefixfleet.cluster.engine_caches import EngineCaches
from prefixfleet.cluster.engine_server import EngineServer
from prefixfleet.cluster.kinds_report import kind_of, report, sources, tiers
from prefixfleet.cluster.links import Links
from prefixfleet.cluster.node_stats import NodeStats
from prefixfleet.cluster.open_pool import OpenPool
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
        """Where peers reach the pools, by link."""
        return self._opener.memory.contacts() if self._opener.memory else {}

    def snapshot(self) -> dict[str, Any]:
        """How the node stands: names, and numbers in the leaves."""
        announcer = self._announcer
        return {
            **report(self._pools, self._opener.ended),
            "tiers": self._tiers(),
            "kinds": self._kinds(),
            "disk": self._opener.disks.numbers() if self._opener.disks else {},
            "counters": {
                **self._stats.numbers(),
                **sources(self._pools, self._opener.ended),
                "ended_kinds": self._opener.ended_pools,
                "ended_wished_blocks": self._opener.ended_wished_blocks,
            },
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
            "engines": len({name for pool in self._pools for name in pool.engines}),
            "connections": self._engines.connections,
            "huge_page_bytes": self._opener.memory.huge_bytes if self._opener.memory else 0,
            "engine_caches": self._engine_caches.numbers() if self._engine_caches else {},
            "refused_engines": self._engines.refused,
            "degraded": self._degraded(),
        }

    def status(self) -> dict[str, Any]:
        """Everything that ``/status`` shows."""
        return {
            "node": self._name,
            "pid": os.getpid(),
            "epoch": self._announcer.epoch,
            "contacts": self.contacts(),
            "stats": self.snapshot(),
            "outcomes": [asdict(outcome) for outcome in self._stats.outcomes],
        }

    @property
    def _pools(self) -> Sequence[OpenPool]:
        return list(self._opener.pools.values())

    def _kinds(self) -> dict[str, dict[str, Any]]:
        """Each namespace, by the digest of it."""
        if (mover := self._opener.mover) is None:
            return {}
        return {
            pool.digest.hex(): kind_of(pool, mover.numbers(pool.digest)) for pool in self._pools
        }

    def _tiers(self) -> dict[str, dict[str, Any]]:
        """Of each tier its blocks and their size; that of the engines only where they tell."""
        found = tiers(self._pools)
        caches = self._engine_caches.numbers() if self._engine_caches else {}
        if not caches or not found:
            return found
        held = sum(numbers["resident"] for numbers in caches.values())
        return {"gpu": {"resident": held, "slot_bytes": found["dram"]["slot_bytes"]}} | found

    def _degraded(self) -> list[str]:
        pools = [why for pool in self._pools for why in pool.degraded()]
        links = self._pools[0].puller.closing.degraded() if self._pools else []
        caches = self._engine_caches.faults if self._engine_caches else []
        disk = self._opener.disks.faults.values() if self._opener.disks else ()
        why = (self._announcer.degraded, *disk, *pools, *links, *caches)
        return list(dict.fromkeys(reason for reason in why if reason))  # one disk, told by several
