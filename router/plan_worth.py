"""What a cache of each size would bring a trace: hit rates, prefill that it saves, where it stops
paying. Pure."""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from prefixfleet.router.fleet_models import GB, Hardware, ModelShape, prefill_seconds
from prefixfleet.router.reuse import Reuse, hit_rates, working_set
from prefixfleet.router.traces import Arrival, SharedBlocks

SIZES = 8
HOURS_A_MONTH = 730.0
WORTH_IT = 0.02
"""Without prices, memory is enough where doubling it saves less than this part of the prefill."""


def at_size(
    blocks: int,
    requests: Sequence[Reuse],
    arrivals: Sequence[Arrival],
    shape: ModelShape,
    hardware: Hardware,
    block_bytes: int,
) -> dict[str, Any]:
    """A shared cache of ``blocks``: hit rates, and nodes' worth of prefill that it saves."""
    block_tokens = block_tokens_of(arrivals)
    saved = sum(
        prefill_seconds(shape, hardware, r.tokens, 0)
        - prefill_seconds(shape, hardware, r.tokens, r.found(blocks) * block_tokens)
        for r in requests
    )
    rates = dataclasses.asdict(hit_rates(requests, blocks, block_tokens))
    span = arrivals[-1].at_s or 1.0
    return {
        "blocks": blocks,
        "gb": blocks * block_bytes / GB,
        "hit_rate": rates,
        "saved_nodes": saved / span,
        "saved_share": saved / sum(prefill_seconds(shape, hardware, r.tokens, 0) for r in requests),
    }


def by_tier(
    options: argparse.Namespace,
    requests: Sequence[Reuse],
    arrivals: Sequence[Arrival],
    shape: ModelShape,
    hardware: Hardware,
    block_bytes: int,
) -> list[dict[str, Any]]:
    """The fleet's tiers one behind the other, each with what it adds to the one before."""
    gb, before, found = 0.0, (0.0, 0.0), []
    for name, size in (("dram", options.dram_gb), ("ssd", options.ssd_gb)):
        if size:
            gb += size * options.nodes
            blocks = max(1, int(gb * GB / block_bytes))
            reached = at_size(blocks, requests, arrivals, shape, hardware, block_bytes)
            here = (reached["hit_rate"]["mean"], reached["saved_nodes"])
            added = {"adds_hit_rate": here[0] - before[0], "adds_saved_nodes": here[1] - before[1]}
            found.append({"tier": name, "fleet_gb": size * options.nodes, **added})
            before = here
    return found


def enough_memory(curve: Sequence[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """The largest memory whose last part still pays, and the price at which it would not.

    A price is what a GB-month may cost as a part of what a node-month costs.
    """
    steps = []
    before = {"gb": 0.0, "saved_nodes": 0.0, "saved_share": 0.0}
    for at in curve:
        more_gb = at["gb"] - before["gb"]
        worth = (at["saved_nodes"] - before["saved_nodes"]) / more_gb
        pays = at["saved_share"] - before["saved_share"] >= WORTH_IT
        if options.gb_month is not None:
            pays = worth * options.node_hour * HOURS_A_MONTH > options.gb_month
        steps.append({"gb": at["gb"], "break_even_gb_per_node": worth, "pays": pays})
        before = at
    paying = [step for step in steps if step["pays"]]
    best = paying[-1] if paying else None
    result: dict[str, Any] = {"steps": steps, "gb": best["gb"] if best else 0.0}
    if best and options.gb_month is not None:
        saved = next(at["saved_nodes"] for at in curve if at["gb"] == best["gb"])
        result["cost_a_month"] = best["gb"] * options.gb_month
        result["saved_a_month"] = saved * options.node_hour * HOURS_A_MONTH
    return result


def trace_figures(arrivals: Sequence[Arrival], block_bytes: int) -> dict[str, Any]:
    """Requests, seconds and the working set over time."""
    curve = working_set(arrivals)
    return {
        "requests": len(arrivals),
        "seconds": arrivals[-1].at_s,
        "working_set": [
            {"at_s": at, "gb": seen * block_bytes / GB, "reused_gb": again * block_bytes / GB}
            for at, seen, again in curve
        ],
    }


def sizes_of(arrivals: Sequence[Arrival]) -> list[int]:
    """Powers of two up to all that the trace has."""
    most = max(2, working_set(arrivals, points=1)[-1][1])
    return sorted({max(1, most >> i) for i in range(SIZES)})


def block_tokens_of(arrivals: Sequence[Arrival]) -> int:
    """Tokens of a block of the trace."""
    first = arrivals[0].prompt
    assert isinstance(first, SharedBlocks)
    return first.block_tokens
