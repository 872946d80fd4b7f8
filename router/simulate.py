"""``prefixfleet simulate``: a trace through a simulated fleet, one policy beside the others."""

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from prefixfleet.router.arguments import (
    MAX_NODES,
    MAX_REQUESTS,
    MAX_TOKENS,
    count,
    failure,
    positive,
    replication_mode,
)
from prefixfleet.router.calibration import Learned, calibration
from prefixfleet.router.fleet_models import GB, LLAMA_70B, PRESETS
from prefixfleet.router.last_words import ended, tell
from prefixfleet.router.policy import choose
from prefixfleet.router.policy_choice import OURS, POLICIES
from prefixfleet.router.simulated_fleet import Fleet, useful_blocks
from prefixfleet.router.simulated_run import block_trace, simulate, speed_up
from prefixfleet.router.storms import with_storms
from prefixfleet.router.traces import Arrival, SharedBlocks
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.orders import new_order
from prefixfleet.store.replication import Mode

MEMORY_TOKENS = 3_000_000


def parser() -> argparse.ArgumentParser:
    """Command line of the simulator."""
    p = argparse.ArgumentParser(prog="prefixfleet simulate", description=__doc__)
    p.add_argument("--trace", type=Path, required=True)
    p.add_argument("--policy", nargs="+", choices=sorted(POLICIES), default=sorted(POLICIES))
    p.add_argument("--nodes", type=count(MAX_NODES), default=8)
    p.add_argument(
        "--memory-tokens",
        type=count(MAX_TOKENS),
        help=f"of cache, for each node; default: the live fleet's, or {MEMORY_TOKENS:,}",
    )
    p.add_argument("--disk-tokens", type=count(MAX_TOKENS), help="on disk, for each node")
    p.add_argument("--disk-bandwidth", type=positive, help="of each node's disk, read, GB/s")
    models = p.add_mutually_exclusive_group()
    models.add_argument("--hardware", choices=sorted(PRESETS), default="8xA800")
    models.add_argument("--calibrate", metavar="URL", help="as a live fleet's router has learned")
    p.add_argument("--api-key", default="", help="for --calibrate")
    p.add_argument("--bandwidth", type=positive, nargs="+", help="of each node's link, GB/s")
    p.add_argument(
        "--fail",
        type=failure,
        nargs="+",
        default=[],
        metavar="NODE@SECONDS[+AWAY]",
        help="nodes, from 0, that restart without their blocks, or are gone for AWAY seconds",
    )
    p.add_argument(
        "--storm", type=positive, nargs="+", default=[], metavar="SECONDS",
        help="when 200 requests about one new text come",
    )  # fmt: skip
    p.add_argument(
        "--storm-lead", type=positive, default=0.0, metavar="SECONDS",
        help="by which the first of them is ahead of the others",
    )  # fmt: skip
    p.add_argument(
        "--replication", type=replication_mode, choices=list(Mode), nargs="+", default=[Mode.OFF],
        help="what nodes do with a hot prefix, as their setting `collective` says",
    )  # fmt: skip
    p.add_argument("--speed", type=positive, default=1.0, help="2: twice the trace's rate")
    p.add_argument("--ttft-slo", type=positive, default=30.0, help="seconds; above is refused")
    p.add_argument("--limit", type=count(MAX_REQUESTS), help="only the first N requests")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--json", action="store_true", help="print only one JSON object")
    return p


def engines_of(options: argparse.Namespace, console: Console) -> Learned:
    """Engines, links and memory that the options name. Raises `ConfigError`."""
    if not options.calibrate:
        return Learned(LLAMA_70B, PRESETS[options.hardware][0], None, ())
    found = calibration(options.calibrate, options.api_key)
    for what in found.assumed:
        warn(console, what)
    return found


def warn(console: Console, what: str) -> None:
    """Say what was assumed."""
    console.print(f"prefixfleet simulate: {what}", style="yellow", markup=False)


def fleet_of(options: argparse.Namespace, engines: Learned, arrivals: Sequence[Arrival]) -> Fleet:
    """The fleet that the options describe, but for its policy. Raises `ConfigError` for one that
    is too large."""
    first = arrivals[0].prompt
    assert isinstance(first, SharedBlocks)
    block_tokens = first.block_tokens
    tokens = options.memory_tokens or engines.memory_tokens or MEMORY_TOKENS
    most = useful_blocks(arrivals)
    hardware = engines.hardware
    if options.disk_bandwidth:
        hardware = dataclasses.replace(hardware, disk_bytes_per_s=options.disk_bandwidth * GB)
    return Fleet(
        nodes=options.nodes,
        blocks_per_node=max(1, min(tokens // block_tokens, most)),
        disk_blocks_per_node=min((options.disk_tokens or 0) // block_tokens, most),
        block_tokens=block_tokens,
        shape=engines.shape,
        hardware=hardware,
        policy=choose,
        ttft_slo_s=options.ttft_slo,
        seed=options.seed,
    )


def variants(options: argparse.Namespace, base: Fleet) -> Iterator[tuple[str, Fleet]]:
    """A fleet for each policy, bandwidth and way to replicate; in its name is what differs."""
    speeds = options.bandwidth or [base.hardware.link_bytes_per_s / GB]
    modes = options.replication
    for name, gb_per_s, mode in itertools.product(options.policy, speeds, modes):
        ours = name == OURS
        named = [name]
        named += [f"{gb_per_s:g} GB/s"] if len(speeds) > 1 else []
        named += [f"replication {mode}"] if len(modes) > 1 else []
        yield (
            ", ".join(named),
            dataclasses.replace(
                base,
                hardware=dataclasses.replace(base.hardware, link_bytes_per_s=gb_per_s * GB),
                policy=POLICIES[name](),
                unbound=ours,
                order=partial(new_order, "value" if ours else "lru"),
                replication=mode,
            ),
        )


def checked(options: argparse.Namespace) -> argparse.Namespace:
    """Raises `ConfigError` for numbers that make no fleet."""
    if wrong := [number for number, *_ in options.fail if not 0 <= number < options.nodes]:
        raise ConfigError(f"--fail: got node {wrong[0]}, expected 0 to {options.nodes - 1}")
    if (options.disk_tokens is None) != (options.disk_bandwidth is None):
        raise ConfigError(
            "--disk-tokens and --disk-bandwidth: got one of them, expected both or neither"
        )
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run each policy over the trace; 2 for wrong arguments or files."""
    options = parser().parse_args(argv)
    return ended("simulate", partial(_simulate, options))


def _simulate(options: argparse.Namespace) -> int:
    console = Console(stderr=True)
    engines = engines_of(checked(options), console)
    arrivals = block_trace(options.trace, options.limit, partial(warn, console))
    arrivals = speed_up(arrivals, options.speed)
    arrivals = with_storms(arrivals, options.storm, seed=options.seed, lead_s=options.storm_lead)
    fleets = list(variants(options, fleet_of(options, engines, arrivals)))
    results = {}
    for name, fleet in track(fleets, "simulating", console=console):
        figures, wall_s = simulate(fleet, arrivals, failures=options.fail)
        results[name] = figures | {"simulated_requests_per_s": round(len(arrivals) / wall_s)}
    if not options.json:
        console.print(table(results))
    tell(json.dumps(results) + "\n")
    return 0


def table(results: dict[str, dict[str, Any]]) -> Table:
    """The runs side by side, best mean first."""
    shown = Table("policy", "mean s", "P50", "P90", "P99", "hit", "pulled", "refused")
    for name, run in sorted(results.items(), key=lambda item: item[1]["ttft_s"]["mean"]):
        ttft = [f"{run['ttft_s'][p]:.3f}" for p in ("mean", "p50", "p90", "p99")]
        shares = [f"{run[key]:.3f}" for key in ("hit_rate", "pulled_share")]
        shown.add_row(name, *ttft, *shares, str(run["refused"]))
    return shown


if __name__ == "__main__":
    sys.exit(main())
