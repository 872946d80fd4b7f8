"""`OpenPool`: the parts that a node has once its first engine is there, and what they tell."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from prefixfleet.cluster.node_cache import NO_CACHE, NodeCache
from prefixfleet.cluster.pool_host import PoolHost
from prefixfleet.cluster.pulls import Pull
from prefixfleet.store.hit_times import NO_HITS
from prefixfleet.transfer.collective import Replicator
from prefixfleet.transfer.pull import Puller, PullResult


@dataclass(frozen=True, slots=True)
class OpenPool:
    """Owned by the node daemon, which closes it; ``saw_pull`` is told of each pull's outcome."""

    host: PoolHost
    cache: NodeCache
    puller: Puller
    replicator: Replicator
    saw_pull: Callable[[PullResult], None]

    async def move(self, pull: Pull) -> PullResult:
        """Bring the blocks of ``pull`` into the pool, or as many leading ones as can be had."""
        result = await pull_with(self.puller, self.host.kind.digest, pull)
        self.saw_pull(result)
        return result

    def tiers(self) -> dict[str, dict[str, Any]]:
        """Slots of each tier by what they are used for, and their size."""
        size = {"slot_bytes": self.host.kind.layout.slot_bytes}
        slots = {"slots": self.host.pool.num_slots}
        dram = asdict(self.host.pool.counts()) | slots | size | self.cache.room()
        tiers: dict[str, dict[str, Any]] = {"dram": dram}
        if self.cache.tier is not None:
            tiers["ssd"] = self.cache.disk_numbers() | size
        return tiers

    def degraded(self) -> list[str]:
        """Why a part of it does less than it should; empty strings for those that are well."""
        disk, links = self.cache.disk_numbers().get("degraded", ""), self.puller.closing
        return [disk, self.replicator.degraded, *links.degraded()]

    async def close(self) -> None:
        """End pulls, claims and reads, then give back links, disk and memory."""
        await self.cache.close()
        await self.replicator.close()
        await self.puller.close()
        if self.cache.tier is not None:
            await self.cache.tier.close()
        await self.host.close()


async def pull_with(puller: Puller, namespace: bytes, pull: Pull) -> PullResult:
    """Do what `Pulls` decided, for blocks of ``namespace``; see `Puller.pull`."""
    return await puller.pull(
        pull.source.contacts,
        namespace=namespace,
        epoch=pull.source.epoch,
        parent=pull.parent,
        hashes=pull.hashes,
        deadline=pull.deadline,
        link=pull.link or None,
        others=pull.others,
    )


def report(pool: OpenPool | None) -> dict[str, Any]:
    """The pool's part of a node's snapshot; without one the same names, and nothing in them."""
    return {
        "links": pool.puller.paths.report() if pool else {},
        "lanes": dict(pool.puller.paths.lanes) if pool else {},
        "stuck_links": dict(pool.puller.closing.stuck) if pool else {},
        "collective": dict(pool.replicator.part.counters) if pool else {},
        "served": dict(pool.host.server.counters) if pool else {},
        "cache": pool.cache.numbers() if pool else NO_CACHE,
        "hits": pool.cache.hit_times.numbers() if pool else NO_HITS,
    }


def sources(pool: OpenPool | None) -> dict[str, Any]:
    """Counters of where pulls came from, for the node's own."""
    return {
        "failed_sources": dict(pool.puller.paths.failed) if pool else {},
        "probes": pool.puller.prober.probes if pool else 0,
    }
