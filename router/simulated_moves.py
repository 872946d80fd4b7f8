"""When the blocks of a request are where its engine is, in a simulation: from its node's memory and
disk, and from another node. Plans and their limits are production's; the seconds are modelled.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prefixfleet.router.dispatch import Dispatched
from prefixfleet.router.simulated_fleet import Fleet
from prefixfleet.router.simulated_node import SimulatedNode
from prefixfleet.router.simulated_replication import Broadcasts
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.records import PullPlan


@dataclass(slots=True)
class Moves:
    """Owned by its simulation."""

    fleet: Fleet
    nodes: Mapping[str, SimulatedNode]
    broadcasts: Broadcasts
    clock: Callable[[], float]

    def load(
        self, node: SimulatedNode, plan: PullPlan, chain: list[BlockHash]
    ) -> tuple[int, float]:
        """Of the node's own blocks those that the plan leaves time for, and when they are there."""
        block_s, until = self.fleet.hit_block_s, self.clock() + plan.budget_s
        local, read_s = node.read(chain, self.clock(), until)
        if plan.source or read_s + local * block_s <= until:
            return local, read_s + local * block_s
        return int((until - read_s) / block_s), until

    def pull(
        self, decided: Dispatched, chain: list[BlockHash], local: int, loaded: float
    ) -> tuple[int, float]:
        """Blocks from the planned source, and when they are there, and the ``local`` too."""
        plan, block_s = decided.plan, self.fleet.hit_block_s
        if not plan.source:
            return 0, loaded
        source = self.nodes[plan.source]
        if plan.source_epoch != source.member.epoch:
            return 0, loaded
        until = max(loaded, self.clock() + plan.budget_s)
        held, read_s = source.read(chain[: plan.blocks], loaded, until)
        there = held - local
        if there <= 0:
            return 0, loaded
        if not local:
            asker = decided.worker.record.node
            self.broadcasts.leased(source, asker, chain[:there], self.clock())
        hardware = self.fleet.hardware
        seconds = there * (block_s + self.fleet.block_bytes / hardware.link_bytes_per_s)
        return there, source.send(read_s, hardware.link_setup_s, seconds)
