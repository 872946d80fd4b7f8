"""Where hits are lost that a cache without end would have: python tests/bench/lost_hits.py --json

Our policy on the conversation trace at its own rate, as `policies.py` measures `hit_over_ceiling`.
A lost block is one of the leading blocks that an earlier request brought, and that was computed
again. It was "in_flight" (not computed yet), "held" (by another node, and a pull was dearer),
"evicted" (no node had it any more) or "not_admitted" (its last node did not store it). Beside it:
what share of all slots second and further copies had when the last copy of what is lost went,
and what one pool of all slots finds in the order that knows the future. The last line is one JSON
object; shares are of the blocks that the cache without end finds.
"""

import argparse
import dataclasses
import json
import sys
from collections import Counter
from functools import partial
from itertools import takewhile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from eviction_replay import belady, replay
from policy_grid import BLOCK_TOKENS, HARDWARE, TRACE, arrivals_of
from traces import CONVERSATION, Request

from prefixfleet.router.fleet_models import GB, LLAMA_70B
from prefixfleet.router.policy import choose
from prefixfleet.router.simulated_fleet import NAMESPACE, Fleet, chain_of
from prefixfleet.router.simulated_node import SimulatedNode
from prefixfleet.router.simulator import Simulation
from prefixfleet.store.orders import new_order


class Ledger:
    """Copies of each block in the fleet, and why a block has none. Owned by its simulation."""

    def __init__(self, slots):
        self.slots = slots
        self.copies = Counter()
        self.held = 0
        self.computed = set()
        self.gone = {}  # block: why its last copy went, and the share of copies then

    @property
    def spare_share(self):
        """Of all slots: second and further copies."""
        return (self.held - len(self.copies)) / self.slots

    def stored(self, chain, new):
        self.computed.update(chain)
        self.copies.update(new)
        self.held += len(new)
        for block in chain:
            if block not in self.copies:
                self.gone[block] = "not_admitted", self.spare_share

    def left(self, blocks):
        for block in blocks:
            self.held -= 1
            self.copies[block] -= 1
            if not self.copies[block]:
                del self.copies[block]
                self.gone[block] = "evicted", self.spare_share

    def why(self, block):
        if block not in self.computed:
            return "in_flight", 0.0
        return ("held", 0.0) if block in self.copies else self.gone[block]


@dataclasses.dataclass(kw_only=True)
class WatchedNode(SimulatedNode):
    ledger: Ledger

    def store(self, chain, view, now):
        new = super().store(chain, view, now)
        self.ledger.stored(chain, new)
        return new

    def _leave(self, victims, view):
        super()._leave(victims, view)
        self.ledger.left(victims.hashes)


class Watched(Simulation):
    """Counts lost blocks by their reason."""

    def __init__(self, fleet):
        self.ledger = Ledger(fleet.nodes * fleet.blocks_per_node)
        self.lost, self.spare, self.could = Counter(), [], 0
        self._asked, self._ceiling = set(), {}
        super().__init__(fleet)

    def _join(self, number):
        node = super()._join(number)
        return WatchedNode(node.number, node.member, node.pool, ledger=self.ledger)

    def _arrive(self, arrival):
        chain = chain_of(arrival.prompt)[: (arrival.prompt.tokens - 1) // BLOCK_TOKENS]
        found = len(list(takewhile(self._asked.__contains__, chain)))
        self._ceiling.setdefault((self.clock.now, tuple(chain)), []).append(found)
        self._asked.update(chain_of(arrival.prompt))
        super()._arrive(arrival)

    def _serve(self, turn, decision):
        chain = turn.chains[NAMESPACE][: (turn.prompt_tokens - 1) // BLOCK_TOKENS]
        reasons = [self.ledger.why(block) for block in chain]
        super()._serve(turn, decision)
        served = self.served[-1]
        found = (served.local_tokens + served.pulled_tokens) // BLOCK_TOKENS
        could = self._ceiling[turn.arrived_s, tuple(chain)].pop(0)
        self.could += could
        for why, spare in reasons[found:could]:
            self.lost[why] += 1
            if why == "evicted":
                self.spare.append(spare)


def measure(requests, blocks, bandwidth, order="value"):
    fleet = Fleet(
        nodes=8, blocks_per_node=blocks, block_tokens=BLOCK_TOKENS, shape=LLAMA_70B,
        hardware=dataclasses.replace(HARDWARE, link_bytes_per_s=bandwidth * GB),
        policy=choose, unbound=True, order=partial(new_order, order),
    )  # fmt: skip
    arrivals = arrivals_of(TRACE, requests)
    watched = Watched(fleet)
    watched.run(arrivals)
    asked = [Request(a.at_s, tuple(chain_of(a.prompt))) for a in arrivals]
    spare = watched.spare
    return {
        "blocks_per_node": blocks,
        "lost": {why: count / watched.could for why, count in watched.lost.most_common()},
        "copies_when_the_last_went": sum(spare) / len(spare) if spare else None,
        "copies_at_the_end": watched.ledger.spare_share,
        **{
            f"one_pool_{name}": hits.found / watched.could
            for name, hits in (
                ("lru", replay(asked, "lru", 8 * blocks)),
                ("value", replay(asked, "value", 8 * blocks)),
                ("belady", belady(asked, 8 * blocks)),
            )
        },
    }


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--json", action="store_true", help="the last line only, as always")
    options.add_argument("--requests", type=int, default=1_000)
    options.add_argument("--blocks", type=int, default=1_700, help="of each of the 8 nodes")
    options.add_argument("--bandwidth", type=float, default=12.5, help="GB/s")
    chosen = options.parse_args()
    if not CONVERSATION.exists():
        why = f"no {CONVERSATION}; set TRACES_DIR to a folder that holds {CONVERSATION.name}"
        print(json.dumps({"absent": why}))
        return
    print(json.dumps(measure(chosen.requests, chosen.blocks, chosen.bandwidth)))


if __name__ == "__main__":
    main()
