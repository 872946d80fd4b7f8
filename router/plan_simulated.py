"""A plan's times to first token: the trace's first requests, simulated with and without a cache."""

import argparse
from collections.abc import Sequence
from typing import Any

from msgspec import structs

from prefixfleet.router.fleet_models import GB, Hardware, ModelShape
from prefixfleet.router.plan_worth import block_tokens_of
from prefixfleet.router.policy import Candidate, Decision, Draw, Policy, choose
from prefixfleet.router.simulate import simulate
from prefixfleet.router.simulated_fleet import Fleet
from prefixfleet.router.traces import Arrival


def simulated(
    options: argparse.Namespace,
    arrivals: Sequence[Arrival],
    shape: ModelShape,
    hardware: Hardware,
    block_bytes: int,
) -> dict[str, Any]:
    """TTFT, goodput and hit rate with no cache, with each node's own, and with one for all."""
    blocks = max(1, int(options.dram_gb * GB / block_bytes))
    first = arrivals[: options.simulated]
    cases: dict[str, tuple[int, Policy]] = {
        "without": (0, _without_cache),
        "own cache only": (blocks, _without_pulls),
        "shared": (blocks, choose),
        "shared, twice the memory": (2 * blocks, choose),
    }
    found = {}
    for name, (size, policy) in cases.items():
        fleet = Fleet(
            nodes=options.nodes,
            blocks_per_node=size,
            block_tokens=block_tokens_of(arrivals),
            shape=shape,
            hardware=hardware,
            policy=policy,
            unbound=True,
        )
        found[name] = simulate(fleet, first, ttft_slo_s=options.ttft_slo)[0]
    return found


def _without_cache(prompt_tokens: int, candidates: Sequence[Candidate], draw: Draw) -> Decision:
    """Placement by load alone."""
    bare = [structs.replace(c, hit_blocks=0, sources=()) for c in candidates]
    return choose(prompt_tokens, bare, draw)


def _without_pulls(prompt_tokens: int, candidates: Sequence[Candidate], draw: Draw) -> Decision:
    """Placement by what each worker's own node holds."""
    return choose(prompt_tokens, [structs.replace(c, sources=()) for c in candidates], draw)
