"""What the pools of a node tell together: one figure a node, and the figures of each namespace."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

from prefixfleet.cluster.open_pool import OpenPool
from prefixfleet.store.hit_times import NO_HITS

TIERS = ("dram", "ssd")
OF_THE_DISK = ("direct_io", "wear_left", "degraded")
"""What the tiers of one disk have in common, and no sum is of."""
NO_CACHE = dict.fromkeys(
    (
        "committed_blocks",
        "evicted_blocks",
        "corrupt_blocks",
        "pool_full",
        "not_admitted_blocks",
        "claims",
        "waiting_hints",
        "joined_hints",
        "expired_hints",
        "asked_blocks",
        "found_blocks",
    ),
    0,
)
"""`NodeCache.numbers` of a node without an engine."""


Counts: TypeAlias = dict[str, dict[str, int]]


def counts_of(pool: OpenPool) -> Counts:
    """What one pool has counted, by part; what is now and not so far is 0 once it is stopped."""
    return {
        "collective": dict(pool.replicator.part.counters),
        "served": dict(pool.host.server.counters),
        "cache": pool.cache.numbers(),
        "probes": {"probes": pool.puller.prober.probes},
    }


def together(counts: Iterable[Counts]) -> Counts:
    """Those of several pools; a count must not go down because one of them was closed."""
    total: defaultdict[str, list[dict[str, int]]] = defaultdict(list)
    for one in counts:
        for part, numbers in one.items():
            total[part].append(numbers)
    return {part: added(numbers) for part, numbers in total.items()}


def report(pools: Sequence[OpenPool], ended: Counts) -> dict[str, Any]:
    """The pools' part of a node's snapshot; without one the same names, and nothing in them.

    Of several, counts are sums, with those that ``ended``; a hit is as slow as in the slowest.
    """
    counts = together([ended, *(counts_of(pool) for pool in pools)])
    first = pools[0].puller if pools else None  # all pullers share connections and paths
    hits = [pool.cache.hit_times.numbers() for pool in pools]
    return {
        "links": first.paths.report() if first else {},
        "lanes": dict(first.paths.lanes) if first else {},
        "stuck_links": dict(first.closing.stuck) if first else {},
        "collective": counts.get("collective", {}),
        "served": counts.get("served", {}),
        "cache": NO_CACHE | counts.get("cache", {}),
        "hits": max(hits, key=lambda numbers: float(numbers["block_s"]), default=NO_HITS),
    }


def sources(pools: Sequence[OpenPool], ended: Counts) -> dict[str, Any]:
    """Counters of where pulls came from, for the node's own."""
    return {
        "failed_sources": dict(pools[0].puller.paths.failed) if pools else {},
        "probes": sum(pool.puller.prober.probes for pool in pools)
        + ended.get("probes", {}).get("probes", 0),
    }


def tiers(pools: Sequence[OpenPool]) -> dict[str, dict[str, Any]]:
    """See `OpenPool.tiers`; of several pools slots are added, and their size is the average."""
    told = [pool.tiers() for pool in pools]
    return {
        name: _together(found) for name in TIERS if (found := [t[name] for t in told if name in t])
    }


def kind_of(pool: OpenPool, memory: Mapping[str, int]) -> dict[str, Any]:
    """One namespace on this node; ``memory`` is what `SlabMover.numbers` says of it."""
    cache, counts, tier = pool.cache.numbers(), pool.host.pool.counts(), pool.cache.tier
    return {
        "namespace": asdict(pool.host.kind.namespace),
        "engines": sorted(pool.engines),
        "connections": pool.engines.total(),  # of their schedulers and ranks, made welcome
        "disk": tier is not None,
        "disk_blocks": tier.stats()["resident"] if tier else 0,
        "disk_bytes": tier.space.held_bytes if tier else 0,
        "slots": pool.host.pool.capacity,
        "resident": counts.resident,
        "slot_bytes": pool.slot_bytes,
        "asked_blocks": cache["asked_blocks"],
        "found_blocks": cache["found_blocks"],
        "block_s": pool.cache.hit_times.numbers()["block_s"],
        **memory,
    }


def added(numbers: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sums by name."""
    total: Counter[str] = Counter()
    for one in numbers:
        total.update(one)
    return dict(total)


def _together(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if len(found) == 1:
        return found[0]
    total: dict[str, Any] = added(
        {k: v for k, v in tier.items() if k not in OF_THE_DISK} for tier in found
    )
    if "taken_per_s" in total:
        total["taken_per_s"] = round(total["taken_per_s"], 3)
    if "wear_left" in found[0]:
        total["wear_left"] = found[0]["wear_left"]
        total["direct_io"] = all(tier["direct_io"] for tier in found)
        total["degraded"] = max(tier["degraded"] for tier in found)
    size = sum(tier["slots"] * tier["slot_bytes"] for tier in found)
    return total | {"slot_bytes": size // max(1, total["slots"])}
