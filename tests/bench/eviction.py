"""Hit rates of the eviction orders beside the optimum that knows the future.

Run: python tests/bench/eviction.py [--json] [TRACE ...] [--sizes 5860,10000] [--workloads all]

Traces of block ids (Mooncake's format) from the command line, by default
``conversation_trace.jsonl.gz`` in the folder ``$TRACES_DIR``; then the generated workloads of
`workloads.py`. What is shown is the second half of the requests: the first half is there to learn
from, and nothing is fitted to any of them. Each hit rate is blocks found over blocks asked for. The
last line is one JSON object: ``gap_closed_N`` = (value - lru) / (belady - lru) in block hits of the
first trace with N blocks, ``least_over_lru`` = the least (value / lru) in block hits of all runs.
"""

import argparse
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from eviction_replay import ORDERS, Hits, belady, replay
from traces import CONVERSATION, Request, read_requests
from workloads import WORKLOADS

from prefixfleet.router.arguments import count
from prefixfleet.store.errors import ConfigError

SIZES = (1_000, 5_860, 10_000, 20_000, 50_000)
GENERATED_SIZES = (1_000, 5_860)
GENERATED_BY_DEFAULT = ("agents", "documents", "scans", "recency")
POLICIES = (*ORDERS, "belady")
OURS = "value"
IN_FIGURES = ("lru", "value", "belady")
"""What the last line is made of; the others are only shown."""


class Run(NamedTuple):
    """One policy on one list of requests: ``source`` is a path or the name of a workload."""

    source: str
    policy: str
    blocks: int


@cache
def requests_of(source: str) -> list[Request]:
    return WORKLOADS[source]() if source in WORKLOADS else read_requests(Path(source))


def hits_of(run: Run) -> Hits:
    requests = requests_of(run.source)
    if run.policy == "belady":
        return belady(requests, run.blocks)
    return replay(requests, run.policy, run.blocks)


def measure(runs: list[Run], processes: int) -> dict[Run, Hits]:
    with ProcessPoolExecutor(processes) as pool:  # the slowest first, so that none is left alone
        return dict(zip(runs, pool.map(hits_of, runs), strict=True))


def figures_of(hits: dict[Run, Hits], first: str) -> dict[str, object]:
    figures: dict[str, object] = {}
    over_lru = {}
    for run in (run for run in hits if run.policy == OURS):
        ours, lru, best = (
            hits[run._replace(policy=policy)].late_found for policy in (OURS, "lru", "belady")
        )
        name = Path(run.source).name.partition(".")[0]
        if lru:
            over_lru[f"{name}:{run.blocks}"] = ours / lru
        if run.source == first:
            figures[f"gap_closed_{run.blocks}"] = (
                round((ours - lru) / (best - lru), 3) if best > lru else None
            )
            whole = hits[run._replace(policy="lru")].rate
            figures[f"lru_whole_trace_{run.blocks}"] = round(whole, 4)
    figures["least_over_lru"] = round(min(over_lru.values()), 4)
    figures["least_over_lru_at"] = min(over_lru, key=lambda name: over_lru[name])
    return figures


def show(hits: dict[Run, Hits]) -> None:
    print(f"{'requests':22} {'blocks':>7} " + "".join(f"{policy:>10}" for policy in POLICIES))
    for run in (run for run in hits if run.policy == OURS):
        rates = [hits[run._replace(policy=policy)].late_rate for policy in POLICIES]
        name = Path(run.source).name.partition(".")[0]
        print(f"{name:22} {run.blocks:7} " + "".join(f"{rate:10.4f}" for rate in rates))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="*", type=Path, help="by default the conversation trace")
    parser.add_argument("--json", action="store_true", help="only the last line")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="in blocks")
    parser.add_argument(
        "--workloads",
        default=",".join(GENERATED_BY_DEFAULT),
        help=f"some of {', '.join(WORKLOADS)}; or all, or none",
    )
    parser.add_argument("--processes", type=count(1024), default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    options.traces = options.traces or [CONVERSATION]
    for trace in options.traces:
        if not trace.is_file():
            parser.error(
                f"no trace at {trace}: name one on the command line, or set TRACES_DIR to the "
                f"folder that holds {CONVERSATION.name}"
            )
    every = {"all": list(WORKLOADS), "none": []}
    options.workloads = every.get(options.workloads, options.workloads.split(","))
    if unknown := set(options.workloads) - set(WORKLOADS):
        parser.error(f"--workloads: got {sorted(unknown)}, expected some of {sorted(WORKLOADS)}")
    try:
        options.sizes = [int(size) for size in options.sizes.split(",")]
        if min(options.sizes) < 1:
            raise ValueError
    except ValueError:
        parser.error(f"--sizes: got {options.sizes!r}, expected numbers of blocks, as 5860,10000")
    try:
        for trace in options.traces:
            requests_of(str(trace))
    except ConfigError as error:
        parser.error(str(error))
    return options


def main() -> None:
    options = parse()
    traces = [str(trace) for trace in options.traces]
    policies = IN_FIGURES if options.json else POLICIES
    runs = [
        Run(source, policy, size)
        for policy in (OURS, *(policy for policy in policies if policy != OURS))
        for sources, sizes in ((traces, options.sizes), (options.workloads, GENERATED_SIZES))
        for source in sources
        for size in sizes
    ]
    hits = measure(runs, options.processes)
    if not options.json:
        show(hits)
    print(json.dumps(figures_of(hits, traces[0])))


if __name__ == "__main__":
    main()
