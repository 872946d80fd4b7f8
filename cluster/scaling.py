"""How many nodes should run, by how long requests would wait: pure, the clock an argument.

The wait is what routers predict for a request that comes now: the seconds of prefill that the
workers have before them, and that wait for a worker. It is acted on when it lasts: soon upwards,
late downwards, since an engine takes minutes to load and a node's cache goes with it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prefixfleet.store.load_board import WAITING, SharedLoad
from prefixfleet.store.records import FleetWish

UP_AFTER_S = 15.0
DOWN_AFTER_S = 300.0
LOW = 0.25
"""A wait of less than this share of the wished one calls for a node less."""


def predicted_wait_s(loads: Sequence[Mapping[str, SharedLoad]], workers: Sequence[str]) -> float:
    """Seconds until the prefills of ``loads``, one record a router, are done, spread evenly. What
    was sent to nobody who lives does not count. 0 without workers."""
    if not workers:
        return 0.0
    counted = {*workers, WAITING}
    return sum(
        load.busy_s for record in loads for name, load in record.items() if name in counted
    ) / len(workers)


def wanted_nodes(wait_s: float, nodes: int, wish: FleetWish) -> int:
    """Nodes for that wait: as many more as bring it to the wished one (at most twice as many at
    once), one less when it is far below, within the wished bounds."""
    if wait_s > wish.wait_s:
        nodes = min(2 * nodes, math.ceil(nodes * wait_s / wish.wait_s))
    elif wait_s < LOW * wish.wait_s:
        nodes -= 1
    return max(wish.least, min(nodes, wish.most))


@dataclass(slots=True)
class Scaler:
    """Waits until a want has lasted. Owned by whoever carries it out."""

    _since_s: float = 0.0
    _direction: int = 0

    def decide(self, wait_s: float, nodes: int, wish: FleetWish, now_s: float) -> int:
        """Nodes to have from now on: ``nodes`` until a want for more or fewer has lasted."""
        if not wish.most:
            return nodes
        wanted = wanted_nodes(wait_s, nodes, wish)
        direction = (wanted > nodes) - (wanted < nodes)
        if direction != self._direction:
            self._direction, self._since_s = direction, now_s
        lasted_s = now_s - self._since_s
        bounded = not wish.least <= nodes <= wish.most
        if bounded or (direction and lasted_s >= (UP_AFTER_S if direction > 0 else DOWN_AFTER_S)):
            self._direction = 0
            return wanted
        return nodes
