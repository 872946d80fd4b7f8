"""A plan's times to first token: the trace's first requests, simulated with and without a cache."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import structs

from prefixfleet.router.decision import Candidate, Decision, Draw, Policy
from prefixfleet.router.fleet_models import GB, Hardware, ModelShape
from prefixfleet.router.plan_worth import block_tokens_of
from prefixfleet.router.policy import choose
from prefixfleet.router.simulated_fleet import Fleet, useful_blocks
from prefixfleet.router.simulated_run import simulate
from prefixfleet.router.traces import Arrival

WITH_SSD = "shared, with the SSD"


def simulated(
    options: argparse.Namespace,
    arrivals: Sequence[Arrival],
    shape: ModelShape,
    hardware: Hardware,
    blocks: int,
) -> dict[str, Any]:
    """TTFT, goodput and hit rate with no cache, with each node's own of so many ``blocks`` of DRAM,
    with one for all, and with an SSD behind it if its speed is known. Raises `ConfigError` for
    more than can be simulated."""
    first = arrivals[: options.simulated]
    useful = useful_blocks(first)
    cases: dict[str, tuple[int, int, Policy]] = {
        "without": (0, 0, _without_cache),
        "own cache only": (blocks, 0, _without_pulls),
        "shared": (blocks, 0, choose),
        "shared, twice the memory": (2 * blocks, 0, choose),
    }
    if options.ssd_bandwidth:
        block_bytes = block_tokens_of(arrivals) * shape.kv_bytes_per_token
        cases[WITH_SSD] = (blocks, int(options.ssd_gb * GB / block_bytes), choose)
    found = {}
    for name, (size, on_disk, policy) in cases.items():
        fleet = Fleet(
            nodes=options.nodes,
            blocks_per_node=min(size, useful),
            disk_blocks_per_node=min(on_disk, useful),
            block_tokens=block_tokens_of(arrivals),
            shape=shape,
            hardware=hardware,
            policy=policy,
            unbound=True,
        )
        found[name] = simulate(fleet, first, ttft_slo_s=options.ttft_slo)[0]
    return found


def pulling(runs: Mapping[str, Any], node_gb: float) -> dict[str, float]:
    """What it is worth that nodes give blocks to each other, ``node_gb`` of DRAM on each: seconds
    to the first token with sharing over those without, and requests in time a second more."""
    own, shared = runs["own cache only"], runs["shared"]
    ratios = {
        f"ttft_{name}_over_own": shared["ttft_s"][name] / own["ttft_s"][name]
        for name in ("mean", "p50", "p99")
    }
    more = shared["goodput_per_s"] - own["goodput_per_s"]
    hits = shared["hit_rate"] - own["hit_rate"]
    return {"node_gb": node_gb, **ratios, "adds_goodput_per_s": more, "adds_hit_rate": hits}


def _without_cache(prompt_tokens: int, candidates: Sequence[Candidate], draw: Draw) -> Decision:
    """Placement by load alone."""
    bare = [structs.replace(c, hit_blocks=0, sources=()) for c in candidates]
    return choose(prompt_tokens, bare, draw)


def _without_pulls(prompt_tokens: int, candidates: Sequence[Candidate], draw: Draw) -> Decision:
    """Placement by what each worker's own node holds."""
    return choose(prompt_tokens, [structs.replace(c, sources=()) for c in candidates], draw)
