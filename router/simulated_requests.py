"""The requests of a simulation: those that wait, and those on a node."""

from contextlib import ExitStack
from dataclasses import dataclass

from prefixfleet.router.simulated_fleet import Served
from prefixfleet.router.simulated_node import SimulatedNode
from prefixfleet.router.waiting import Waiting
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.holds import Pin


@dataclass(slots=True, eq=False)
class Turn(Waiting):
    """A request that is not bound to a node yet."""

    chains: dict[bytes, list[BlockHash]]
    estimate_s: float


@dataclass(slots=True, eq=False)
class Running:
    """A request on its node until its prefill ends, or until the node does."""

    turn: Turn
    worker: str
    node: SimulatedNode
    chain: list[BlockHash]
    pin: Pin
    charge: ExitStack
    fate: Served  # if nothing happens
