"""Points at which placement policies are compared: workload, rate, bandwidth. Each is a simulation.

Generated workloads have no rate of their own. Their times are stretched so that at rate 1.0 they
load the fleet as much as the conversation trace does: work that is left when every block that was
ever computed is found, over the time in which it arrives.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from traces import CONVERSATION, Request
from workloads import WORKLOADS

from prefixfleet.router.fleet_models import GB, LLAMA_70B, PRESETS, prefill_seconds
from prefixfleet.router.peer_policies import PEERS
from prefixfleet.router.policy_choice import OURS, POLICIES
from prefixfleet.router.simulated_fleet import Fleet
from prefixfleet.router.simulated_run import simulate, speed_up
from prefixfleet.router.traces import Arrival, SharedBlocks, read_trace
from prefixfleet.store.orders import new_order

TRACE = "conversation"
NOTHING_SHARED = "strangers"
COMPARED = (TRACE, "agents", "documents", "storms")
PULLING = (OURS, "algorithm-1")  # to the others the links do not matter
BLOCK_TOKENS = 512
TTFT_SLO_S = 30.0
"""Of goodput. Nobody is refused: a mean over other requests would not compare."""
HARDWARE = PRESETS["8xA800"][0]


class Point(NamedTuple):
    """One simulation. ``blocks`` a node; the first ``requests`` of the workload."""

    workload: str
    speed: float
    bandwidth: float
    policy: str
    requests: int
    nodes: int = 8
    blocks: int = 3_000_000 // BLOCK_TOKENS
    seed: int = 0


def points(
    workloads: Iterable[str], speeds: Sequence[float], bandwidths: Sequence[float], requests: int
) -> list[Point]:
    """The grid; policies without pulls are simulated at one bandwidth, which stands for all."""
    return [
        Point(workload, speed, bandwidth, policy, requests)
        for workload, speed, policy in product(workloads, speeds, POLICIES)
        for bandwidth in (bandwidths if policy in PULLING else bandwidths[:1])
    ]


def run(point: Point) -> dict[str, Any]:
    """Figures of one point."""
    hardware = dataclasses.replace(HARDWARE, link_bytes_per_s=point.bandwidth * GB)
    fleet = Fleet(
        nodes=point.nodes,
        blocks_per_node=point.blocks,
        block_tokens=BLOCK_TOKENS,
        shape=LLAMA_70B,
        hardware=hardware,
        policy=POLICIES[point.policy](),
        unbound=point.policy == OURS,
        order=partial(new_order, "value" if point.policy == OURS else "lru"),
        seed=point.seed,
    )
    arrivals = speed_up(arrivals_of(point.workload, point.requests), point.speed)
    figures, wall_s = simulate(fleet, arrivals, ttft_slo_s=TTFT_SLO_S)
    return figures | {"wall_s": wall_s}


@cache
def arrivals_of(workload: str, requests: int) -> tuple[Arrival, ...]:
    """The workload's first requests: of a trace at its own rate, else at the trace's load."""
    if (file := trace_file(workload)) is not None:
        return tuple(read_trace(file, limit=requests))
    made = [_arrival(request) for request in WORKLOADS[workload]()[:requests]]
    return tuple(speed_up(made, load(arrivals_of(TRACE, requests)) / load(made)))


def trace_file(workload: str) -> Path | None:
    """The file of a workload that is a trace: one has a name, others are named by their paths."""
    if workload in WORKLOADS:
        return None
    return CONVERSATION if workload == TRACE else Path(workload)


def load(arrivals: Sequence[Arrival]) -> float:
    """Nodes that are kept busy when nothing is computed twice."""
    known: set[int] = set()
    seconds = 0.0
    for arrival in arrivals:
        ids, tokens = _blocks(arrival), arrival.prompt.tokens  # type: ignore[union-attr]
        cached = _leading(ids, known) * BLOCK_TOKENS
        seconds += prefill_seconds(LLAMA_70B, HARDWARE, tokens, min(cached, tokens - 1))
        known.update(ids)
    return seconds / (arrivals[-1].at_s - arrivals[0].at_s)


def ceiling(arrivals: Sequence[Arrival]) -> float:
    """Part of the tokens that a cache without end would find, once each request is answered."""
    known: set[int] = set()
    found = total = 0
    for arrival in arrivals:
        ids, tokens = _blocks(arrival), arrival.prompt.tokens  # type: ignore[union-attr]
        found += min(_leading(ids, known), (tokens - 1) // BLOCK_TOKENS) * BLOCK_TOKENS
        total += tokens
        known.update(ids[: tokens // BLOCK_TOKENS])
    return found / total


def different_blocks(arrivals: Sequence[Arrival]) -> int:
    """More room than that is of no use to a node."""
    return len({block for arrival in arrivals for block in _blocks(arrival)})


def best_other(results: dict[Point, dict[str, Any]], ours: Point) -> tuple[str, float]:
    """The peer with the least mean TTFT at the point of ``ours``, and that mean."""
    means = {
        point.policy: figures["ttft_s"]["mean"]
        for point, figures in results.items()
        if point.policy in PEERS
        and (point.workload, point.speed) == (ours.workload, ours.speed)
        and (point.policy not in PULLING or point.bandwidth == ours.bandwidth)
    }
    name = min(means, key=lambda policy: means[policy])
    return name, means[name]


def _arrival(request: Request) -> Arrival:
    ids = tuple(int.from_bytes(block[:8]) for block in request.chain)
    # The last block is half full, as the last block of a prompt is on average
    tokens = len(ids) * BLOCK_TOKENS - BLOCK_TOKENS // 2
    return Arrival(request.at_s, SharedBlocks(ids, tokens, BLOCK_TOKENS), 1)


def _blocks(arrival: Arrival) -> tuple[int, ...]:
    assert isinstance(arrival.prompt, SharedBlocks)
    return arrival.prompt.ids


def _leading(ids: Sequence[int], known: set[int]) -> int:
    return next((i for i, block in enumerate(ids) if block not in known), len(ids))
