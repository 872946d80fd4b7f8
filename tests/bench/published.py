"""The simulator beside figures that others found: ``python tests/bench/published.py --json``

Mean TTFT on Mooncake's conversation trace, whole and at its own rate: 8 nodes with 3 M tokens each,
LLaMA3-70B on 8 x A800 of which a prefill reaches half, links of 50 GB/s, LRU, who would wait more
than 30 s is refused. The other figures are those of an independent replay of the same model of
engines and links; in FAST'25, fig. 5, on 16 nodes and with decoding, the order is the same. Takes
two minutes of one core. The last line is one JSON object, with the greatest difference.
"""

import argparse
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

from traces import CONVERSATION

from prefixfleet.router.fleet_models import GB, LLAMA_70B, PRESETS
from prefixfleet.router.policy_choice import POLICIES
from prefixfleet.router.simulated_fleet import Fleet
from prefixfleet.router.simulated_run import simulate
from prefixfleet.router.traces import read_trace
from prefixfleet.store.orders import new_order

FOUND_S = {"random": 6.13, "least-tokens": 2.05, "local-aware": 1.48, "algorithm-1": 1.30}
"""By placement: at random, by load, by local cache, Mooncake's Algorithm 1."""
BLOCK_TOKENS = 512


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--json", action="store_true", help="print no table")
    options.add_argument("--requests", type=int, help="only the first; the figures are of all")
    chosen = options.parse_args()
    if not CONVERSATION.exists():
        why = f"no {CONVERSATION}; set TRACES_DIR to a folder that holds {CONVERSATION.name}"
        print(json.dumps({"absent": why}))
        return
    arrivals = list(read_trace(CONVERSATION, limit=chosen.requests))
    ours_s = {policy: mean_ttft_s(policy, arrivals) for policy in FOUND_S}
    over = {policy: ours_s[policy] / found_s for policy, found_s in FOUND_S.items()}
    if not chosen.json:
        for policy, found_s in FOUND_S.items():
            print(f"{policy:14} simulated {ours_s[policy]:6.2f} s, found {found_s:6.2f} s")
    print(
        json.dumps(
            {
                "simulated_s": ours_s,
                "found_s": FOUND_S,
                "simulated_over_found": over,
                "greatest_difference": max(abs(ratio - 1) for ratio in over.values()),
                "same_order": sorted(ours_s, key=ours_s.get) == sorted(FOUND_S, key=FOUND_S.get),
            }
        )
    )


def mean_ttft_s(policy, arrivals):
    fleet = Fleet(
        nodes=8,
        blocks_per_node=3_000_000 // BLOCK_TOKENS,
        block_tokens=BLOCK_TOKENS,
        shape=LLAMA_70B,
        hardware=replace(PRESETS["8xA800"][0], link_bytes_per_s=50 * GB),
        policy=POLICIES[policy](),
        ttft_slo_s=30.0,
        order=partial(new_order, "lru"),
    )
    figures, _ = simulate(fleet, arrivals)
    return figures["ttft_s"]["mean"]


if __name__ == "__main__":
    main()
