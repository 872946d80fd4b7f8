"""What a simulation is given and what it tells: the fleet, and the fate of each request."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

from prefixfleet.router.decision import Policy
from prefixfleet.router.fleet_models import Hardware, ModelShape
from prefixfleet.router.simulated_disk import SimulatedDisk
from prefixfleet.router.simulated_node import SimulatedNode
from prefixfleet.router.traces import Arrival, SharedBlocks
from prefixfleet.router.worker import Worker
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.eviction import EvictionOrder
from prefixfleet.store.eviction_value import ValueOrder
from prefixfleet.store.hit_times import HitTimes
from prefixfleet.store.index import Membership
from prefixfleet.store.namespace import DIGEST_BYTES
from prefixfleet.store.pool import SlotPool
from prefixfleet.store.records import NodeRecord, WorkerRecord
from prefixfleet.store.replication import Mode

NAMESPACE = b"simulated"
MAX_HASHES = 1 << 20
"""Kept from one request to the next: about 100 MB."""

MAX_SLOTS = 20_000_000
"""Of all nodes together: 3 GB of books while they are empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What is simulated. ``blocks_per_node`` slots of ``block_tokens`` tokens each. Raises
    `ConfigError` for more than `MAX_SLOTS` of them."""

    nodes: int
    blocks_per_node: int
    block_tokens: int
    shape: ModelShape
    hardware: Hardware
    policy: Policy
    unbound: bool = False  # requests wait in the router until their best worker is free
    ttft_slo_s: float = math.inf  # a request whose estimate is above is refused at once
    seed: int = 0
    order: Callable[[int], EvictionOrder] = ValueOrder  # of so many slots
    replication: Mode = Mode.OFF
    disk_blocks_per_node: int = 0

    def __post_init__(self) -> None:
        if (slots := self.nodes * self.blocks_per_node) > MAX_SLOTS:
            raise ConfigError(
                f"{self.nodes:,} nodes with {self.blocks_per_node:,} blocks each: got {slots:,} "
                f"blocks, at most {MAX_SLOTS:,} can be simulated; take fewer --nodes, less memory, "
                "or fewer of the trace's requests"
            )

    @property
    def block_bytes(self) -> int:
        """Of one block, all layers."""
        return self.block_tokens * self.shape.kv_bytes_per_token

    @property
    def hit_block_s(self) -> float:
        """Seconds that a block takes from where its node holds it into the engine."""
        return self.block_bytes / self.hardware.hit_bytes_per_s

    @property
    def disk_block_s(self) -> float:
        """Seconds to read a block from disk."""
        return self.block_bytes / self.hardware.disk_bytes_per_s

    def node(self, number: int, member: Membership, clock: Callable[[], float]) -> SimulatedNode:
        """One of its nodes, empty."""
        disk = SimulatedDisk(self.disk_blocks_per_node, self.disk_block_s)
        return SimulatedNode(number, member, self.pool(clock), HitTimes(clock), disk)

    def pool(self, clock: Callable[[], float]) -> SlotPool:
        """A node's pool, empty."""
        return SlotPool(self.blocks_per_node, self.order(self.blocks_per_node), clock)

    def worker(self, node: SimulatedNode) -> Worker:
        """The worker on ``node``."""
        record = WorkerRecord(
            worker=f"worker-{node.number}",
            node=node.member.node,
            url="",
            model="simulated",
            model_path="",
            namespace={},
            block_bytes=self.block_bytes,
            max_model_tokens=1 << 30,
            prefill_tokens_per_s=1.0,
        )
        return Worker(record, None, NAMESPACE, self.block_tokens)  # type: ignore[arg-type]

    def records(self, nodes: Iterable[SimulatedNode]) -> dict[str, NodeRecord]:
        """What the nodes tell of themselves: links and memory are as fast as the hardware has them,
        disks as they were found."""
        hardware = self.hardware
        speed = {"bytes_per_s": hardware.link_bytes_per_s, "setup_s": hardware.link_setup_s}
        links = {node.member.node: speed for node in nodes}
        records = {}
        for node in nodes:
            kind = {"block_s": self.hit_block_s + node.hit_times.numbers()["block_s"]}
            stats = {"links": links, "kinds": {NAMESPACE.hex(): kind}}
            name = node.member.node
            records[name] = NodeRecord(node=name, host="", stats=stats)
        return records


@dataclass(frozen=True, slots=True)
class Served:
    """One request's fate. ``ttft_s`` is infinite when it was refused."""

    at_s: float
    node: int
    tokens: int
    local_tokens: int
    pulled_tokens: int
    ttft_s: float
    estimate_s: float

    @property
    def refused(self) -> bool:
        """Whether it was turned away."""
        return math.isinf(self.ttft_s)


def useful_blocks(arrivals: Iterable[Arrival]) -> int:
    """A node with more memory does nothing else: twice what the trace has of different blocks,
    since a pool keeps a part of itself free, less than half."""
    different: set[int] = set()
    for prompt in (arrival.prompt for arrival in arrivals):
        assert isinstance(prompt, SharedBlocks)
        different.update(prompt.ids)
    return 2 * len(different) + 1


def chain_of(prompt: SharedBlocks) -> list[BlockHash]:
    """Block hashes of the prompt's full blocks, one for each of the trace's ids, since they name
    prefixes too. Spread evenly, as digests are: `UseHistory` finds its places by that."""
    full = prompt.tokens // prompt.block_tokens
    return list(map(_hash, prompt.ids[:full]))


@lru_cache(maxsize=MAX_HASHES)
def _hash(number: int) -> BlockHash:
    return blake2b(number.to_bytes(8, "big"), digest_size=DIGEST_BYTES).digest()
