"""`OpenPool`: the parts that a node has of one namespace once an engine of it was there."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from prefixfleet.cluster.node_cache import NodeCache
from prefixfleet.cluster.node_stats import NAME_DIGITS
from prefixfleet.cluster.pool_host import PoolHost
from prefixfleet.cluster.pulls import Pull
from prefixfleet.transfer.collective import Replicator
from prefixfleet.transfer.pull import Puller, PullResult


class Connections(Counter[str]):
    """Of each engine by its name. Owned by the node daemon, which counts them as they come."""

    left_s = -math.inf
    """When one ended last."""

    def end(self, engine: str, now: float) -> None:
        """One of ``engine`` has ended."""
        self[engine] -= 1
        if not self[engine]:
            del self[engine]
        self.left_s = now


@dataclass(frozen=True, slots=True)
class OpenPool:
    """Owned by the node daemon, which closes it; ``saw_pull`` is told of each pull's outcome.
    ``engines`` are the connections of its engines; ``loops`` run until it closes."""

    host: PoolHost
    cache: NodeCache
    puller: Puller
    replicator: Replicator
    saw_pull: Callable[[PullResult], None]
    loops: tuple["asyncio.Task[None]", ...] = ()
    engines: Connections = field(default_factory=Connections)

    @property
    def digest(self) -> bytes:
        """Of the namespace."""
        return self.host.kind.digest

    @property
    def slot_bytes(self) -> int:
        """Size of a slot."""
        return self.host.kind.layout.slot_bytes

    @property
    def name(self) -> str:
        """The namespace as status and logs call it."""
        return self.digest.hex()[:NAME_DIGITS]

    async def move(self, pull: Pull) -> PullResult:
        """Bring the blocks of ``pull`` into the pool, or as many leading ones as can be had."""
        result = await pull_with(self.puller, self.host.kind.digest, pull)
        self.saw_pull(result)
        return result

    def tiers(self) -> dict[str, dict[str, Any]]:
        """Slots of each tier by what they are used for, and their size."""
        size = {"slot_bytes": self.slot_bytes}
        slots = {"slots": self.host.pool.capacity}
        dram = asdict(self.host.pool.counts()) | slots | size | self.cache.room()
        tiers: dict[str, dict[str, Any]] = {"dram": dram}
        if self.cache.tier is not None:
            tiers["ssd"] = self.cache.disk_numbers() | size
        return tiers

    def degraded(self) -> list[str]:
        """Why a part of it does less than it should; empty strings for those that are well."""
        return [self.cache.disk_numbers().get("degraded", ""), self.replicator.degraded]

    async def stop(self) -> None:
        """End pulls, claims, reads, broadcasts and its loops."""
        for loop in self.loops:
            loop.cancel()
        await asyncio.gather(*self.loops, return_exceptions=True)
        await self.cache.close()
        await self.replicator.close()

    async def close(self) -> None:
        """After `stop` of all of a node: give back connections, and serve nobody; its disk tier
        is closed by who opened it."""
        await self.puller.close()
        self.host.close()


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
