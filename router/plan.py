"""``prefixfleet plan``: what a shared cache would bring a trace on given hardware, and its cost.

Hit rates by memory come from the whole trace (`reuse`), times to first token from the simulator
with the production placement. No price is built in: without --gb-month and --node-hour the answer
is the price of memory at which it stops paying, as a part of the price of a node.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from prefixfleet.router.fleet_models import GB, PRESETS, Hardware, ModelShape, prefill_seconds
from prefixfleet.router.kv_size import (
    DTYPE_BYTES,
    attention_kind,
    kv_bytes_per_token,
    read_config,
    shape_of,
)
from prefixfleet.router.plan_report import show, write_html
from prefixfleet.router.policy import Candidate, Decision, Draw, Policy, choose
from prefixfleet.router.replay import positive
from prefixfleet.router.reuse import Reuse, hit_rates, reuses, working_set
from prefixfleet.router.simulate import block_trace, simulate, speed_up
from prefixfleet.router.simulator import Fleet
from prefixfleet.router.traces import Arrival, SharedBlocks
from prefixfleet.store.errors import ConfigError

SIZES = 8
HOURS_A_MONTH = 730.0
WORTH_IT = 0.02
"""Without prices, memory is enough where doubling it saves less than this part of the prefill."""


def parser() -> argparse.ArgumentParser:
    """Command line."""
    p = argparse.ArgumentParser(prog="prefixfleet plan", description=__doc__.splitlines()[0])
    p.add_argument("--trace", type=Path, required=True, help="Mooncake's or Qwen-Bailian's form")
    p.add_argument(
        "--model", type=Path, required=True, help="config.json of the model, or its folder"
    )
    p.add_argument("--hardware", choices=sorted(PRESETS), required=True)
    p.add_argument(
        "--kv-dtype", choices=sorted(DTYPE_BYTES), help="of the cache; default: the model's"
    )
    p.add_argument("--nodes", type=_count, default=8)
    p.add_argument("--dram-gb", type=positive, default=1024.0, help="of cache a node (10^9 bytes)")
    p.add_argument("--ssd-gb", type=positive, help="of cache a node, behind the DRAM")
    p.add_argument("--bandwidth", type=positive, help="of each node's link, GB/s; default: preset")
    p.add_argument("--speed", type=positive, default=1.0, help="2: twice the trace's rate")
    p.add_argument("--ttft-slo", type=positive, default=30.0, help="seconds, for goodput")
    p.add_argument("--simulated", type=_count, default=1000, help="first requests of the trace")
    p.add_argument("--limit", type=_count, help="read only the first N requests")
    p.add_argument("--gb-month", type=positive, help="price of a GB of memory a month")
    p.add_argument("--node-hour", type=positive, help="price of a node an hour, same currency")
    p.add_argument("--json", action="store_true", help="print only one JSON object")
    p.add_argument("--html", type=Path, help="write a page with plots")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Plan; 2 for wrong arguments or files."""
    options = parser().parse_args(argv)
    try:
        if (options.gb_month is None) != (options.node_hour is None):
            raise ConfigError("--gb-month and --node-hour: one price alone compares with nothing")
        config = read_config(options.model)
        arrivals = speed_up(block_trace(options.trace, options.limit), options.speed)
        plan = make_plan(options, config, arrivals)
    except ConfigError as error:
        Console(stderr=True).print(f"prefixfleet plan: {error}", style="red", markup=False)
        return 2
    if options.html:
        write_html(options.html, plan)
    if not options.json:
        show(plan, Console())
    else:
        sys.stdout.write(json.dumps(plan) + "\n")
    return 0


def make_plan(
    options: argparse.Namespace, config: dict[str, Any], arrivals: Sequence[Arrival]
) -> dict[str, Any]:
    """Every figure, as JSON. Raises `ConfigError` for a config that is no decoder's."""
    shape, hardware = shape_of(config, options.kv_dtype), _hardware(options)
    block_tokens = _block_tokens(arrivals)
    block_bytes = block_tokens * shape.kv_bytes_per_token
    requests = reuses(arrivals)
    sizes = _sizes(arrivals)
    curve = [_at(size, requests, arrivals, shape, hardware, block_bytes) for size in sizes]
    tiers = _tiers(options, requests, arrivals, shape, hardware, block_bytes)
    enough = _enough(curve, options)
    return {
        "model": {
            "attention": attention_kind(config),
            "kv_bytes_per_token": shape.kv_bytes_per_token,
            "kv_bytes_per_token_by_type": {n: kv_bytes_per_token(config, n) for n in DTYPE_BYTES},
        },
        "hardware": {"preset": options.hardware, "source": PRESETS[options.hardware][1]},
        "trace": _trace_figures(arrivals, block_bytes),
        "memory": curve,
        "tiers": tiers,
        "simulated": simulated(options, arrivals, shape, hardware, block_bytes),
        "enough": enough,
        "settings": _settings(options, enough),
    }


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
            block_tokens=_block_tokens(arrivals),
            shape=shape,
            hardware=hardware,
            policy=policy,
            unbound=True,
        )
        found[name] = simulate(fleet, first, ttft_slo_s=options.ttft_slo)[0]
    return found


def _without_cache(prompt_tokens: int, candidates: Sequence[Candidate], draw: Draw) -> Decision:
    """Placement by load alone."""
    bare = [dataclasses.replace(c, hit_blocks=0, sources=()) for c in candidates]
    return choose(prompt_tokens, bare, draw)


def _without_pulls(prompt_tokens: int, candidates: Sequence[Candidate], draw: Draw) -> Decision:
    """Placement by what each worker's own node holds."""
    return choose(prompt_tokens, [dataclasses.replace(c, sources=()) for c in candidates], draw)


def _at(
    blocks: int,
    requests: Sequence[Reuse],
    arrivals: Sequence[Arrival],
    shape: ModelShape,
    hardware: Hardware,
    block_bytes: int,
) -> dict[str, Any]:
    """A shared cache of ``blocks``: hit rates, and nodes' worth of prefill that it saves."""
    block_tokens = _block_tokens(arrivals)
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


def _tiers(
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
            reached = _at(blocks, requests, arrivals, shape, hardware, block_bytes)
            here = (reached["hit_rate"]["mean"], reached["saved_nodes"])
            added = {"adds_hit_rate": here[0] - before[0], "adds_saved_nodes": here[1] - before[1]}
            found.append({"tier": name, "fleet_gb": size * options.nodes, **added})
            before = here
    return found


def _enough(curve: Sequence[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
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


def _settings(options: argparse.Namespace, enough: dict[str, Any]) -> dict[str, str]:
    """What to set on each node and router."""
    if not enough["gb"]:
        return {}
    pool = max(1 << 20, int(enough["gb"] * GB / options.nodes))
    return {
        "PREFIXFLEET_NODE_POOL_BYTES": str(pool),
        "PREFIXFLEET_ROUTER_TTFT_SLO_S": f"{options.ttft_slo:g}",
    }


def _trace_figures(arrivals: Sequence[Arrival], block_bytes: int) -> dict[str, Any]:
    curve = working_set(arrivals)
    return {
        "requests": len(arrivals),
        "seconds": arrivals[-1].at_s,
        "working_set": [
            {"at_s": at, "gb": seen * block_bytes / GB, "reused_gb": again * block_bytes / GB}
            for at, seen, again in curve
        ],
    }


def _sizes(arrivals: Sequence[Arrival]) -> list[int]:
    """Powers of two up to all that the trace has."""
    most = max(2, working_set(arrivals, points=1)[-1][1])
    return sorted({max(1, most >> i) for i in range(SIZES)})


def _hardware(options: argparse.Namespace) -> Hardware:
    hardware, _ = PRESETS[options.hardware]
    if options.bandwidth:
        return dataclasses.replace(hardware, link_bytes_per_s=options.bandwidth * GB)
    return hardware


def _block_tokens(arrivals: Sequence[Arrival]) -> int:
    first = arrivals[0].prompt
    assert isinstance(first, SharedBlocks)
    return first.block_tokens


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
