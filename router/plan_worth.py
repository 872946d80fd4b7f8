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


def sizes_of(arrivals: Sequence[Arrival], given: Sequence[int]) -> list[int]:
    """Powers of two up to all that the trace has, and the sizes that were ``given``."""
    most = max(2, working_set(arrivals, points=1)[-1][1])
    return sorted({max(1, most >> i) for i in range(SIZES)} | {min(most, size) for size in given})


def block_tokens_of(arrivals: Sequence[Arrival]) -> int:
    """Tokens of a block of the trace."""
    first = arrivals[0].prompt
    assert isinstance(first, SharedBlocks)
    return first.block_tokens
