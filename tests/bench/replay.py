"""A slice of each trace through live nodes of this machine: python tests/bench/replay.py --json

With sharing: through the router. Without: the same engines asked in turn, each with its own prefix
cache and its own node's pool. A slice is the first conversations of a trace that go on and are
short enough, whole (`trace_slices.py`); each round takes the next ones. Two nodes have real CPU
engines (`vllm`, SmolLM2-135M-Instruct) and share this machine's cores; four have stand-ins
(`fast_vllm`: the connector's contract, the real daemons, links, pools and router; a prefill sleeps
2 ms a block of 16 tokens), whose times are those of that model. The last line is one JSON object.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from fleet_places import small_model
from host_fleet import FAST
from rich.console import Console
from rich.progress import Progress
from trace_slices import found_at_most, slices

from prefixfleet.cluster.run_state import StateHome
from prefixfleet.router.arguments import MAX_REQUESTS, count
from prefixfleet.router.percentiles import spread
from prefixfleet.router.replay import parser as replay_parser
from prefixfleet.router.replay import replay
from prefixfleet.router.replay_client import Sample
from prefixfleet.router.traces import Arrival

UP_S = 500
ENGINES = {2: "vllm", 4: "fast_vllm"}
PAUSE_S = {2: 4.0, 4: 1.5}
"""Between two requests: an engine on one core of ours takes seconds for a prompt, and rounds that
are one queue from beginning to end say little."""
REQUESTS = {2: 16, 4: 24}
"""Of each trace a round."""
SETTLE_S = 2.0  # blocks that were computed last are published


class LiveFleet:
    """A fleet that runs. Owned by `live`."""

    def __init__(self, environ: dict[str, str], endpoint: str) -> None:
        self._environ = environ
        self.endpoint = endpoint
        status = json.loads(prefixfleet(environ, "status", "--json"))
        self.engines = [worker["url"] for worker in status["workers"]]
        self.model = status["workers"][0]["model"]


def prefixfleet(environ: dict[str, str], *arguments: str) -> str:
    """What the command prints; `SystemExit` with its errors if it fails."""
    command = [sys.executable, "-m", "prefixfleet.cluster", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=UP_S)
    if done.returncode:
        sys.exit(f"prefixfleet {' '.join(arguments)}: {done.stderr[-3000:]}")
    return done.stdout


@contextlib.contextmanager
def live(nodes: int, engine: str, folder: Path) -> Iterator[LiveFleet]:
    """``nodes`` nodes with engines of that kind, by `prefixfleet up`."""
    fleet = f"bench-{uuid.uuid4().hex[:8]}"
    environ = os.environ | {"XDG_STATE_HOME": str(folder), "PREFIXFLEET_FLEET": fleet}
    options = ["--nodes", str(nodes), "--port", "0", "--detach"]
    if engine == "fast_vllm":
        options += ["--model", str(small_model(folder / "model"))]
        environ |= {"PYTHONPATH": str(FAST), "PREFIXFLEET_WORKER_SERVED_NAME": "small"}
    prefixfleet(environ, "up", *options)
    try:
        state = StateHome(folder / "prefixfleet").fleet(fleet).read()
        assert state is not None, "it runs"
        yield LiveFleet(environ, state.endpoint)
    finally:
        prefixfleet(environ, "down")


async def ask(parts: dict[str, list[Arrival]], model: str, seed: int) -> list[Sample]:
    """All requests of each endpoint, at their times; samples in no order."""
    with Progress(console=Console(stderr=True)) as progress:
        runs = []
        for endpoint, arrivals in parts.items():
            words = ["--trace", "-", "--endpoint", endpoint, "--prompts", "tokens"]
            options = replay_parser().parse_args([*words, "--model", model, "--seed", str(seed)])
            runs.append(replay(arrivals, options, progress))
        return [sample for samples, _ in await asyncio.gather(*runs) for sample in samples]


def figures(samples: Sequence[Sample]) -> dict[str, Any]:
    """Of one mode: hit rate in tokens, times to first token, errors."""
    good = [sample for sample in samples if not sample.error]
    tokens = sum(sample.prompt_tokens for sample in good) or 1
    return {
        "requests": len(samples),
        "errors": len(samples) - len(good),
        "error": next((sample.error for sample in samples if sample.error), ""),
        "hit_rate": sum(sample.cached_tokens for sample in good) / tokens,
        "pulled_share": sum(sample.pulled_tokens for sample in good) / tokens,
        "ttft_s": spread([sample.ttft_s for sample in good]),
    }


def in_turn(arrivals: Sequence[Arrival], urls: Sequence[str]) -> dict[str, list[Arrival]]:
    """Each request to the engine whose turn it is."""
    return {url: list(arrivals[i :: len(urls)]) for i, url in enumerate(urls)}


def compared(fleet: LiveFleet, parts: Sequence[Sequence[Arrival]]) -> dict[str, Any]:
    """Each slice with and without sharing, with prompts that the fleet has never seen; what goes
    first changes from slice to slice."""
    samples: dict[str, list[Sample]] = {"shared": [], "alone": []}
    for number, arrivals in enumerate(parts):
        modes = {"shared": {fleet.endpoint: list(arrivals)}}
        modes["alone"] = in_turn(arrivals, fleet.engines)
        for mode in sorted(modes, reverse=number % 2 == 0):
            samples[mode] += asyncio.run(ask(modes[mode], fleet.model, uuid.uuid4().int % 2**31))
            time.sleep(SETTLE_S)
    found: dict[str, Any] = {mode: figures(of_mode) for mode, of_mode in samples.items()}
    shared, alone = (found[mode]["ttft_s"] for mode in ("shared", "alone"))
    return found | {
        "hit_at_most": statistics.mean(map(found_at_most, parts)),
        "ttft_shared_over_alone": {
            figure: shared[figure] / alone[figure] if alone[figure] else None for figure in shared
        },
    }


def main() -> int:
    """Print one JSON object; 1 if a request failed."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--json", action="store_true", help="as every bench; prints JSON anyway")
    p.add_argument("--nodes", type=int, nargs="+", choices=sorted(ENGINES), default=sorted(ENGINES))
    p.add_argument("--requests", type=count(MAX_REQUESTS), help="of each trace a round")
    p.add_argument("--rounds", type=count(1000), default=2)
    options = p.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # whoever ends this leaves no fleet
    found: dict[str, Any] = {}
    for nodes in options.nodes:
        with (
            tempfile.TemporaryDirectory() as folder,
            live(nodes, ENGINES[nodes], Path(folder)) as fleet,
        ):
            found[f"nodes_{nodes}"] = {
                "engine": ENGINES[nodes],
                "traces": {
                    name: compared(fleet, parts)
                    for name, parts in slices(
                        options.requests or REQUESTS[nodes], PAUSE_S[nodes], options.rounds
                    ).items()
                },
            }
    sys.stdout.write(json.dumps(found) + "\n")
    runs = [run for part in found.values() for run in part["traces"].values()]
    return int(any(run[mode]["errors"] for run in runs for mode in ("shared", "alone")))


if __name__ == "__main__":
    sys.exit(main())
