"""``prefixfleet plan``: what a shared cache would bring a trace on given hardware, and its cost.

Hit rates by memory come from the whole trace (`reuse`), times to first token from the simulator
with the production placement. No price is built in: without --gb-month and --node-hour the answer
is the price of memory at which it stops paying, as a part of the price of a node.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from prefixfleet.router.arguments import (
    MAX_NODES,
    MAX_REQUESTS,
    amount,
    count,
    positive,
)
from prefixfleet.router.fleet_models import GB, PRESETS, Hardware
from prefixfleet.router.kv_size import (
    DTYPE_BYTES,
    attention_kind,
    kv_bytes_per_token,
    read_config,
    shape_of,
)
from prefixfleet.router.last_words import check_targets, ended, tell, told, write_all
from prefixfleet.router.plan_memory import Given, enough_memory, settings_for
from prefixfleet.router.plan_report import render_plan, show
from prefixfleet.router.plan_simulated import pulling, simulated
from prefixfleet.router.plan_worth import (
    at_size,
    block_tokens_of,
    by_tier,
    sizes_of,
    trace_figures,
)
from prefixfleet.router.reuse import reuses
from prefixfleet.router.simulated_run import block_trace, speed_up
from prefixfleet.router.traces import Arrival
from prefixfleet.store.errors import ConfigError

MEMORY_GB = amount(0.0011, 1e6)
"""Of a tier: from the least that a node takes, a MiB, to a petabyte."""


def parser() -> argparse.ArgumentParser:
    """Command line."""
    p = argparse.ArgumentParser(prog="prefixfleet plan", description=__doc__.splitlines()[0])
    p.add_argument("--trace", type=Path, required=True, help="Mooncake, Qwen-Bailian or OpenAI log")
    p.add_argument(
        "--model", type=Path, required=True, help="config.json of the model, or its folder"
    )
    p.add_argument("--hardware", choices=sorted(PRESETS), required=True)
    p.add_argument(
        "--kv-dtype", choices=sorted(DTYPE_BYTES), help="of the cache; default: the model's"
    )
    p.add_argument("--nodes", type=count(MAX_NODES), default=8)
    p.add_argument("--dram-gb", type=MEMORY_GB, default=1024.0, help="of cache a node (10^9 bytes)")
    p.add_argument("--ssd-gb", type=MEMORY_GB, help="of cache a node, behind the DRAM")
    p.add_argument("--ssd-bandwidth", type=positive, help="of reads from it, GB/s: simulated then")
    p.add_argument("--bandwidth", type=positive, help="of each node's link, GB/s; default: preset")
    p.add_argument("--speed", type=positive, default=1.0, help="2: twice the trace's rate")
    p.add_argument("--ttft-slo", type=positive, default=30.0, help="seconds, for goodput")
    p.add_argument(
        "--simulated", type=count(MAX_REQUESTS), default=1000, help="first requests of the trace"
    )
    p.add_argument("--limit", type=count(MAX_REQUESTS), help="read only the first N requests")
    p.add_argument("--gb-month", type=positive, help="price of a GB of memory a month")
    p.add_argument("--ssd-gb-month", type=positive, help="of a GB of SSD; default: as of memory")
    p.add_argument("--node-hour", type=positive, help="price of a node an hour, same currency")
    p.add_argument("--json", action="store_true", help="print only one JSON object")
    p.add_argument("--html", type=Path, help="write a page with plots")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Plan; 2 for wrong arguments or files."""
    options = parser().parse_args(argv)
    return ended("plan", partial(_plan, options))


def _plan(options: argparse.Namespace) -> int:
    if (options.gb_month is None) != (options.node_hour is None):
        raise ConfigError("--gb-month and --node-hour: one price alone compares with nothing")
    if options.ssd_gb_month is not None and options.gb_month is None:
        raise ConfigError("--ssd-gb-month: expected with --gb-month and --node-hour")
    if options.ssd_bandwidth is not None and options.ssd_gb is None:
        raise ConfigError("--ssd-bandwidth: expected with --ssd-gb")
    check_targets({"--html": options.html})
    config = read_config(options.model)
    arrivals = block_trace(options.trace, options.limit, _warn)
    plan = make_plan(options, config, speed_up(arrivals, options.speed))
    pages: dict[Path, Callable[[], str]] = (
        {options.html: lambda: render_plan(plan)} if options.html else {}
    )
    written = write_all("plan", pages)
    if options.json:
        tell(json.dumps(plan) + "\n")
    else:
        console = Console()
        with told(console):
            show(plan, console)
    return 0 if written else 1


def make_plan(
    options: argparse.Namespace, config: dict[str, Any], arrivals: Sequence[Arrival]
) -> dict[str, Any]:
    """Every figure, as JSON. Raises `ConfigError` for a config that is no decoder's."""
    shape, hardware = shape_of(config, options.kv_dtype), _hardware(options)
    block_tokens = block_tokens_of(arrivals)
    block_bytes = block_tokens * shape.kv_bytes_per_token
    requests = reuses(arrivals)
    given = Given.of(options, block_bytes)
    sizes = sizes_of(arrivals, given.blocks)
    curve = [at_size(size, requests, arrivals, shape, hardware, block_bytes) for size in sizes]
    tiers = by_tier(options, requests, arrivals, shape, hardware, block_bytes)
    enough = enough_memory(curve, given, options)
    pool_blocks = given.dram_blocks_of_node(enough["gb"])
    runs = simulated(options, arrivals, shape, hardware, pool_blocks)
    return {
        "model": {
            "attention": attention_kind(config),
            "kv_bytes_per_token": shape.kv_bytes_per_token,
            "kv_bytes_per_token_by_type": {n: kv_bytes_per_token(config, n) for n in DTYPE_BYTES},
        },
        "hardware": {"preset": options.hardware, "source": PRESETS[options.hardware][1]},
        "trace": trace_figures(arrivals, block_bytes),
        "memory": curve,
        "tiers": tiers,
        "simulated": runs,
        "pulling": pulling(runs, pool_blocks * block_bytes / GB),
        "enough": enough,
        "settings": settings_for(enough["gb"], given, options.ttft_slo),
    }


def _hardware(options: argparse.Namespace) -> Hardware:
    hardware, _ = PRESETS[options.hardware]
    stated = {"link_bytes_per_s": options.bandwidth, "disk_bytes_per_s": options.ssd_bandwidth}
    return dataclasses.replace(hardware, **{name: gb * GB for name, gb in stated.items() if gb})


def _warn(what: str) -> None:
    Console(stderr=True).print(f"prefixfleet plan: {what}", style="yellow", markup=False)


if __name__ == "__main__":
    sys.exit(main())
