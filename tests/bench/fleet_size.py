"""Simulated fleets of 8 to 1,000 nodes, 10 requests a second and node: fleet_size.py --json

How many requests are simulated a wall second, and the processor time of one placement decision (the
production code's) as the fleet grows. The last line is one JSON object.
"""

import argparse
import dataclasses
import json
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

from policy_grid import BLOCK_TOKENS, HARDWARE

from prefixfleet.router.fleet_models import GB, LLAMA_70B
from prefixfleet.router.policy import choose
from prefixfleet.router.simulated_fleet import Fleet
from prefixfleet.router.simulated_run import summarise
from prefixfleet.router.simulator import Simulation
from prefixfleet.router.traces import Arrival, SharedBlocks

SIZES = (8, 64, 256, 1000)
RATE = 10.0
"""Requests a second and node."""
DOCUMENTS, DOCUMENT_BLOCKS = 64, 3
OWN = 1 << 40
"""Blocks from here on are in one prompt only."""
SEED = 1


def arrivals(nodes, requests):
    """Questions of half a block about the same few documents, whatever the fleet's size."""
    dice = random.Random(SEED)
    at_s, found = 0.0, []
    for number in range(requests):
        at_s += dice.expovariate(RATE * nodes)
        document = dice.randrange(DOCUMENTS)
        ids = tuple(document * DOCUMENT_BLOCKS + i for i in range(DOCUMENT_BLOCKS))
        tokens = DOCUMENT_BLOCKS * BLOCK_TOKENS + BLOCK_TOKENS // 2
        prompt = SharedBlocks((*ids, OWN + number), tokens, BLOCK_TOKENS)
        found.append(Arrival(at_s, prompt, 1))
    return found


def measured(nodes, requests):
    """One size: figures of the run and of its decisions."""
    fleet = Fleet(
        nodes=nodes,
        blocks_per_node=500,
        block_tokens=BLOCK_TOKENS,
        shape=LLAMA_70B,
        hardware=dataclasses.replace(HARDWARE, link_bytes_per_s=12.5 * GB),
        policy=choose,
        unbound=True,
        seed=SEED,
    )
    simulation = Simulation(fleet)
    decide, seconds = simulation._dispatcher.decide, []

    def timed(*arguments):
        began = time.thread_time()
        try:
            return decide(*arguments)
        finally:
            seconds.append(time.thread_time() - began)

    simulation._dispatcher.decide = timed
    began = time.perf_counter()
    served = simulation.run(arrivals(nodes, requests))
    wall_s = time.perf_counter() - began
    simulation.check()
    figures = summarise(served, ttft_slo_s=30.0)
    return {
        "nodes": nodes,
        "requests": requests,
        "requests_per_simulated_s": round(requests / served[-1].at_s),
        "simulated_requests_per_wall_s": round(requests / wall_s),
        "decisions": len(seconds),
        "decision_ms_p50": statistics.median(seconds) * 1e3,
        "decision_ms_p99": statistics.quantiles(seconds, n=100)[98] * 1e3,
        "hit_rate": figures["hit_rate"],
        "mean_ttft_s": figures["ttft_s"]["mean"],
    }


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--json", action="store_true", help="as every bench; prints JSON anyway")
    options.add_argument("--requests", type=int, default=200, help="of each size")
    options.add_argument("--nodes", type=int, nargs="+", default=SIZES, help="of each fleet")
    chosen = options.parse_args()
    sizes = [measured(nodes, chosen.requests) for nodes in chosen.nodes]
    first, last = sizes[0], sizes[-1]
    grown = last["decision_ms_p50"] / first["decision_ms_p50"]
    found = {
        "simulated_requests_per_wall_s": last["simulated_requests_per_wall_s"],
        "decision_time_grows": grown,
        "nodes_grow": last["nodes"] / first["nodes"],
        "sizes": sizes,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
