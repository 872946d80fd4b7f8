"""The simulator beside a live fleet: the same requests through both, at the same times.

Conversations over documents that nobody has seen, open loop, at half of what the fleet can do. The
simulator's engines and links are those that the router has learned (`simulate --calibrate`) from
other conversations before; none of the requests that are compared was seen by it. Needs a fleet
that runs (`prefixfleet up`) and serves nobody else. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import statistics
import sys
import uuid
from collections.abc import Sequence

from rich.console import Console
from rich.progress import Progress

from prefixfleet.router.calibration import Learned, calibration
from prefixfleet.router.fleet_models import prefill_seconds
from prefixfleet.router.percentiles import percentile
from prefixfleet.router.policy import choose
from prefixfleet.router.replay import parser as replay_parser
from prefixfleet.router.replay import replay
from prefixfleet.router.replay_client import Sample
from prefixfleet.router.simulated_fleet import Fleet, Served
from prefixfleet.router.simulator import Simulation
from prefixfleet.router.traces import Arrival, SharedBlocks
from prefixfleet.store.errors import ConfigError

BLOCK_TOKENS = 128
FIRST_BLOCKS, MORE_BLOCKS = 4, 2
"""A conversation's document, and what each turn adds."""
OUTPUT_TOKENS = 4
LOAD = 0.5
FIRST_LOOK = 2
"""Requests one after the other, from which the pace of the rest is set."""


def conversations(count: int, turns: int) -> list[SharedBlocks]:
    """Prompts of ``count`` conversations. They begin one after the other, so that first turns and
    later ones meet the same load of the machine."""
    steps = [(2 * who + 5 * turn, turn, who) for who in range(count) for turn in range(turns)]
    prompts = []
    for _, turn, who in sorted(steps):
        ids = range(1000 * who, 1000 * who + FIRST_BLOCKS + MORE_BLOCKS * turn)
        prompts.append(SharedBlocks(tuple(ids), len(ids) * BLOCK_TOKENS, BLOCK_TOKENS))
    return prompts


def is_cold(prompt: SharedBlocks) -> bool:
    """Whether it is a conversation's first."""
    return len(prompt.ids) == FIRST_BLOCKS


def paced(prompts: Sequence[SharedBlocks], pause_s: float) -> list[Arrival]:
    """One every ``pause_s`` seconds."""
    return [Arrival(i * pause_s, prompt, OUTPUT_TOKENS) for i, prompt in enumerate(prompts)]


def pause_s(prompts: Sequence[SharedBlocks], learned: Learned, nodes: int) -> float:
    """Between two requests, so that ``nodes`` engines are busy for `LOAD` of the time where each
    block is computed once."""
    known: set[int] = set()
    work_s = 0.0
    for prompt in prompts:
        new = sum(block not in known for block in prompt.ids)
        cached = (len(prompt.ids) - new) * BLOCK_TOKENS
        work_s += prefill_seconds(learned.shape, learned.hardware, prompt.tokens, cached)
        known.update(prompt.ids)
    return work_s / len(prompts) / (nodes * LOAD)


def run_live(arrivals: Sequence[Arrival], endpoint: str) -> list[Sample]:
    """Samples in order. Raises `ConfigError` if a request failed."""
    seed = str(uuid.uuid4().int % 2**31)  # prompts that the fleet has never seen
    words = ["--trace", "-", "--endpoint", endpoint, "--prompts", "tokens", "--seed", seed]
    with Progress(console=Console(stderr=True)) as progress:
        samples, _ = asyncio.run(replay(arrivals, replay_parser().parse_args(words), progress))
    if failed := [sample.error for sample in samples if sample.error]:
        raise ConfigError(f"{endpoint}: {len(failed)} requests failed, the first: {failed[0]}")
    return samples


def warmed_up(endpoint: str, prompts: Sequence[SharedBlocks], nodes: int) -> Learned:
    """What the router has learned from conversations at the load that is to be simulated."""
    for prompt in conversations(FIRST_LOOK, 1):
        run_live(paced([prompt], 0.0), endpoint)
    pause = pause_s(prompts, calibration(endpoint, ""), nodes)
    run_live(paced(prompts, pause), endpoint)
    return calibration(endpoint, "")


def run_simulated(arrivals: Sequence[Arrival], learned: Learned, nodes: int) -> list[Served]:
    """What the simulator makes of them, in order."""
    simulation = Simulation(
        Fleet(
            nodes=nodes,
            blocks_per_node=(learned.memory_tokens or 1_000_000) // BLOCK_TOKENS,
            block_tokens=BLOCK_TOKENS,
            shape=learned.shape,
            hardware=learned.hardware,
            policy=choose,
            unbound=True,
        )
    )
    served = simulation.run(arrivals)
    simulation.check()
    return sorted(served, key=lambda s: s.at_s)


def figures(
    prompts: Sequence[SharedBlocks], live: Sequence[Sample], simulated: Sequence[Served]
) -> dict[str, object]:
    """Both runs side by side; first turns find nothing."""
    errors = [abs(s.ttft_s - x.ttft_s) / x.ttft_s for x, s in zip(live, simulated, strict=True)]
    tokens = sum(s.tokens for s in simulated)
    found: dict[str, object] = {"requests": len(live)}
    ttfts = {"live": [s.ttft_s for s in live], "simulated": [s.ttft_s for s in simulated]}
    for side, seconds in ttfts.items():
        times = list(zip(prompts, seconds, strict=True))
        found[f"{side}_ttft_s"] = statistics.mean(s for _, s in times)
        for kind in ("cold", "warm"):
            of_kind = [s for p, s in times if is_cold(p) == (kind == "cold")]
            found[f"{side}_{kind}_ttft_s"] = statistics.mean(of_kind)
            found[f"{side}_{kind}_ttft_p50_s"] = statistics.median(of_kind)
    return found | {
        "error_p50_of_live": percentile(errors, 50),
        "error_p90_of_live": percentile(errors, 90),
        "live_hit_rate": sum(s.cached_tokens for s in live) / tokens,
        "simulated_hit_rate": sum(s.local_tokens + s.pulled_tokens for s in simulated) / tokens,
    }


def main() -> int:
    """Print one JSON object; 2 if the fleet does not answer."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--endpoint", required=True)
    p.add_argument("--nodes", type=int, default=2)
    p.add_argument("--conversations", type=int, default=6)
    p.add_argument("--turns", type=int, default=4)
    p.add_argument("--json", action="store_true", help="taken for the other benches' sake")
    options = p.parse_args()
    try:
        before = conversations(max(2, options.conversations // 2), options.turns)
        learned = warmed_up(options.endpoint, before, options.nodes)
        prompts = conversations(options.conversations, options.turns)
        arrivals = paced(prompts, pause_s(prompts, learned, options.nodes))
        live = run_live(arrivals, options.endpoint)
    except ConfigError as error:
        Console(stderr=True).print(f"simulated: {error}", style="red", markup=False)
        return 2
    simulated = run_simulated(arrivals, learned, options.nodes)
    sys.stdout.write(json.dumps(figures(prompts, live, simulated)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
