"""The simulator beside a live fleet: the same requests through both, at the same times.

Conversations over documents that nobody has seen, open loop. The engine's model is set by the
first request of each conversation, which finds nothing cached; all others test it. Needs a fleet
that runs (`prefixfleet up`), with SmolLM2-135M-Instruct or another model by --layers and --hidden.
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

from prefixfleet.router.fleet_models import GB, Hardware, ModelShape, prefill_flops
from prefixfleet.router.policy import choose
from prefixfleet.router.replay import parser as replay_parser
from prefixfleet.router.replay import replay
from prefixfleet.router.replay_client import Sample
from prefixfleet.router.simulated_fleet import Fleet, Served
from prefixfleet.router.simulator import Simulation
from prefixfleet.router.traces import Arrival, SharedBlocks
from prefixfleet.store.errors import ConfigError

BLOCK_TOKENS = 256
FIRST_BLOCKS, MORE_BLOCKS = 4, 2
"""A conversation's document, and what each turn adds."""
OUTPUT_TOKENS = 4
STEP_S = 0.05
"""An engine's time for a prompt of which it computes next to nothing."""


def conversations(count: int, turns: int, pause_s: float) -> list[Arrival]:
    """``count`` conversations, their turns in rotation, a request every ``pause_s`` seconds."""
    arrivals = []
    for number in range(count * turns):
        turn, who = divmod(number, count)
        ids = range(1000 * who, 1000 * who + FIRST_BLOCKS + MORE_BLOCKS * turn)
        prompt = SharedBlocks(tuple(ids), len(ids) * BLOCK_TOKENS, BLOCK_TOKENS)
        arrivals.append(Arrival(number * pause_s, prompt, OUTPUT_TOKENS))
    return arrivals


def run_live(arrivals: Sequence[Arrival], endpoint: str) -> list[Sample]:
    """Samples in order. Raises `ConfigError` if a request failed."""
    seed = str(uuid.uuid4().int % 2**31)  # prompts that the fleet has never seen
    words = ["--trace", "-", "--endpoint", endpoint, "--prompts", "tokens", "--seed", seed]
    with Progress(console=Console(stderr=True)) as progress:
        samples, _ = asyncio.run(replay(arrivals, replay_parser().parse_args(words), progress))
    if failed := [sample.error for sample in samples if sample.error]:
        raise ConfigError(f"{endpoint}: {len(failed)} requests failed, the first: {failed[0]}")
    return samples


def hardware_of(shape: ModelShape, cold: Sequence[Sample], link_bytes_per_s: float) -> Hardware:
    """The engine that computes the prompts of ``cold`` in their median time."""
    speeds = [prefill_flops(shape, s.prompt_tokens, 0) / (s.ttft_s - STEP_S) for s in cold]
    return Hardware(
        flops=statistics.median(speeds),
        utilisation=1.0,
        link_bytes_per_s=link_bytes_per_s,
        step_s=STEP_S,
    )


def run_simulated(
    arrivals: Sequence[Arrival], shape: ModelShape, hardware: Hardware, nodes: int
) -> list[Served]:
    """What the simulator makes of them, in order."""
    simulation = Simulation(
        Fleet(
            nodes=nodes,
            blocks_per_node=10_000,
            block_tokens=BLOCK_TOKENS,
            shape=shape,
            hardware=hardware,
            policy=choose,
            unbound=True,
        )
    )
    served = simulation.run(arrivals)
    simulation.check()
    return sorted(served, key=lambda s: s.at_s)


def figures(live: Sequence[Sample], simulated: Sequence[Served], count: int) -> dict[str, object]:
    """Both runs side by side. Errors are of the requests that the model was not set by."""
    pairs = list(zip(live, simulated, strict=True))[count:]
    tokens = sum(s.tokens for s in simulated)
    errors = [abs(s.ttft_s - sample.ttft_s) for sample, s in pairs]
    return {
        "requests": len(live),
        "live_ttft_s": statistics.mean(s.ttft_s for s in live),
        "simulated_ttft_s": statistics.mean(s.ttft_s for s in simulated),
        "live_cold_ttft_s": statistics.mean(s.ttft_s for s in live[:count]),
        "live_warm_ttft_s": statistics.mean(sample.ttft_s for sample, _ in pairs),
        "simulated_warm_ttft_s": statistics.mean(s.ttft_s for _, s in pairs),
        "error_p50_s": statistics.median(errors),
        "error_p50_of_live": statistics.median(
            abs(s.ttft_s - sample.ttft_s) / sample.ttft_s for sample, s in pairs
        ),
        "live_hit_rate": sum(s.cached_tokens for s in live) / tokens,
        "simulated_hit_rate": sum(s.local_tokens + s.pulled_tokens for s in simulated) / tokens,
    }


def main() -> int:
    """Print one JSON object; 2 if the fleet does not answer."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--endpoint", required=True)
    p.add_argument("--nodes", type=int, default=2)
    p.add_argument("--conversations", type=int, default=4)
    p.add_argument("--turns", type=int, default=4)
    p.add_argument("--pause", type=float, default=4.0, help="seconds between two requests")
    p.add_argument("--layers", type=int, default=30)
    p.add_argument("--hidden", type=int, default=576)
    p.add_argument("--kv-bytes", type=int, default=46_080, help="of a token")
    p.add_argument("--link", type=float, default=0.5, help="GB/s between nodes")
    p.add_argument("--json", action="store_true", help="taken for the other benches' sake")
    options = p.parse_args()
    shape = ModelShape(
        layers=options.layers, hidden=options.hidden, kv_bytes_per_token=options.kv_bytes
    )
    arrivals = conversations(options.conversations, options.turns, options.pause)
    try:
        live = run_live(arrivals, options.endpoint)
    except ConfigError as error:
        Console(stderr=True).print(f"simulated: {error}", style="red", markup=False)
        return 2
    hardware = hardware_of(shape, live[: options.conversations], options.link * GB)
    simulated = run_simulated(arrivals, shape, hardware, options.nodes)
    sys.stdout.write(json.dumps(figures(live, simulated, options.conversations)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
