"""Placement policies against each other in the simulator: python tests/bench/policies.py --json

By default a part of the grid on the first requests of each workload; --full is the whole grid on
whole workloads, which takes long: with --requests 500 a minute on two cores. With --resume FILE it
may be ended and begun anew. Every figure is of the production code on modelled engines and links.
The last line is one JSON object.
"""

import argparse
import gc
import json
import os
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

from kept_points import computed, kept
from least_memory import least_memory
from policy_grid import (
    COMPARED,
    NOTHING_SHARED,
    TRACE,
    Point,
    arrivals_of,
    best_other,
    ceiling,
    different_blocks,
    points,
    trace_file,
)
from rich.console import Console
from rich.progress import track
from traces import CONVERSATION
from workloads import WORKLOADS

from prefixfleet.router.arguments import MAX_REQUESTS, count
from prefixfleet.router.last_words import check_targets
from prefixfleet.router.policy_choice import OURS
from prefixfleet.store.errors import ConfigError

RATE, BANDWIDTH = 1.5, 12.5
QUICK = {"speeds": (RATE,), "bandwidths": (BANDWIDTH, 1.25), "requests": 1_000}
FULL = {"speeds": (1.0, RATE, 2.0), "bandwidths": (BANDWIDTH, 1.25, 3.0, 50.0), "requests": 20_000}
ENOUGH_OF_CEILING = 0.9
SEEDS = 6
"""Of our hit rate with little memory: what is drawn among equals moves it by some hundredths."""


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--json", action="store_true", help="print no table")
    options.add_argument("--full", action="store_true", help="every point, whole workloads")
    options.add_argument("--requests", type=count(MAX_REQUESTS), help="of each workload")
    options.add_argument("--workload", nargs="+", default=COMPARED, help="names or trace files")
    options.add_argument("--jobs", type=count(1024), default=os.cpu_count())
    options.add_argument("--resume", type=Path, metavar="FILE", help="points that are known")
    chosen = options.parse_args()
    for name in chosen.workload:
        if (file := trace_file(name)) not in (None, CONVERSATION) and not file.exists():
            options.error(f"--workload {name}: expected a trace file or one of {sorted(WORKLOADS)}")
        try:
            if file not in (None, CONVERSATION):
                arrivals_of(name, chosen.requests or 1)
        except ConfigError as error:
            options.error(f"--workload {name}: {error}")
    if chosen.resume:
        check_resumed(options, chosen.resume)
    if not CONVERSATION.exists():
        why = f"no {CONVERSATION}; set TRACES_DIR to a folder that holds {CONVERSATION.name}"
        print(json.dumps({"absent": why}))
        return
    lead = next(filter(trace_file, chosen.workload), TRACE)
    grid = dict(FULL if chosen.full else QUICK)
    grid["requests"] = chosen.requests or grid["requests"]
    wanted = points(chosen.workload, **grid)
    alone = [
        Point(NOTHING_SHARED, 1.0, BANDWIDTH, policy, grid["requests"])
        for policy in (OURS, "round-robin")
    ]
    wanted += alone
    # A point lives for seconds and makes no cycles worth collecting: a fifth of its time saved
    with ProcessPoolExecutor(chosen.jobs, initializer=gc.disable) as pool:
        runs = computed(wanted, pool, chosen.resume)
        results = dict(track(runs, "simulating", len(wanted), console=Console(stderr=True)))
        found = hits(pool, lead, grid["requests"], chosen.resume)
    if not chosen.json:
        show(results)
    print(json.dumps(summary(results, lead, alone) | found))


def check_resumed(options, path):
    try:
        check_targets({"--resume": path})
        list(kept(path))
    except (ConfigError, ValueError) as error:
        options.error(f"--resume: {error}")


def summary(results, lead, alone):
    rows = []
    for point, figures in results.items():
        if point.policy == OURS and point not in alone:
            name, mean = best_other(results, point)
            ratio = figures["ttft_s"]["mean"] / mean
            rows.append((ratio, point.workload, point.speed, point.bandwidth, name))
    worst = max(rows)
    ours, turns = (results[point]["ttft_s"]["mean"] for point in alone)
    return {
        "mean_ttft_over_best_other": next(
            (r[0] for r in rows if r[1:4] == (lead, RATE, BANDWIDTH)), None
        ),
        "worst_mean_ttft_over_best_other": worst[0],
        "worst_at": worst[1:],
        "nothing_shared_over_round_robin": ours / turns,
        "simulated_requests_per_s": round(
            sum(f["requests"] for f in results.values())
            / sum(f["wall_s"] for f in results.values())
        ),
        "ratios": [
            {"workload": w, "rate": s, "gb_per_s": b, "over": name, "ratio": ratio}
            for ratio, w, s, b, name in rows
        ],
        "points": [point._asdict() | figures for point, figures in results.items()],
    }


def hits(pool, lead, requests, path):
    """Our part of what can be hit at all, with the memory that Algorithm 1 needs for 0.9 of it, in
    the first trace."""
    arrivals = arrivals_of(lead, requests)
    most = ceiling(arrivals)
    theirs = Point(lead, 1.0, BANDWIDTH, "algorithm-1", requests)

    known = {}

    def rates(sizes):
        tried = [theirs._replace(blocks=size) for size in sizes]
        known.update((p.blocks, found["hit_rate"]) for p, found in computed(tried, pool, path))
        return known

    blocks = least_memory(rates, ENOUGH_OF_CEILING * most, most=different_blocks(arrivals))
    if blocks is None:
        return {"hit_over_ceiling": None, "hit_ceiling": most}
    ours = [theirs._replace(policy=OURS, blocks=blocks, seed=seed) for seed in range(SEEDS)]
    found = [figures["hit_rate"] / most for _, figures in computed(ours, pool, path)]
    return {
        "hit_over_ceiling": statistics.mean(found),
        "hit_over_ceiling_of_seeds": sorted(found),
        "algorithm_1_hit_over_ceiling": known[blocks] / most,
        "hit_ceiling": most,
        "hit_blocks_per_node": blocks,
    }


def show(results):
    for point, figures in results.items():
        ttft = figures["ttft_s"]
        print(
            f"{point.workload:13}{point.speed:4.1f} x {point.bandwidth:5.2f} GB/s "
            f"{point.policy:13} mean {ttft['mean']:7.2f} P90 {ttft['p90']:7.2f} "
            f"P99 {ttft['p99']:7.2f} s  goodput {figures['goodput_per_s']:5.2f}/s "
            f"hit {figures['hit_rate']:.3f}"
        )


if __name__ == "__main__":
    main()
