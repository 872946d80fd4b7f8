"""Brings a running fleet to what its operator wishes: more or fewer nodes, other settings.

One step at a time, and never one that takes engines away while others are not serving: clients
see no error. `next_step` decides and is pure; `Rollout` does it. Must not know Ray.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from prefixfleet.cluster.scaling import Scaler, predicted_wait_s
from prefixfleet.store.errors import ConfigError, IndexUnavailable
from prefixfleet.store.load_board import LoadBoard
from prefixfleet.store.records import FleetWish, WorkerRecord
from prefixfleet.store.registry import WorkerRegistry

LOOK_S = 1.0
SETTLE_S = 5.0
"""Routers examine an engine that came back before they use it: nobody else leaves meanwhile."""
MODEL_SETTING = "PREFIXFLEET_WORKER_MODEL"
IDENTITY_SETTINGS = {
    MODEL_SETTING,
    "PREFIXFLEET_WORKER_ENCODING",
    "PREFIXFLEET_WORKER_TENSOR_PARALLEL",
}
"""Settings that make every block of a node worthless: its daemon starts anew with them."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Group:
    """One node daemon and its engines, which come and go together. ``rollout`` is the update that
    they were started with."""

    node: str
    workers: tuple[str, ...]
    rollout: int


@dataclass(frozen=True, slots=True)
class Step:
    """One change: ``verb`` is "start" (``node`` is empty), "stop" or "replace"."""

    verb: str
    node: str = ""


class Groups(Protocol):
    """Where the fleet's processes run. Every call raises `ConfigError` that says what failed."""

    def groups(self) -> Sequence[Group]:
        """What was started, in order; the last is the first to go."""
        ...

    async def start(self, wish: FleetWish) -> None:
        """One more group, with the settings of ``wish``."""
        ...

    async def stop(self, node: str) -> None:
        """Drain and end a group."""
        ...

    async def replace(self, node: str, wish: FleetWish, *, daemon: bool) -> None:
        """Drain and end a group's engines, and start them with the settings of ``wish``; with
        ``daemon`` also the node's. Those that cannot start leave the old ones running again."""
        ...


def next_step(
    wish: FleetWish, groups: Sequence[Group], workers: Sequence[WorkerRecord]
) -> Step | None:
    """What to do next; None while all is as wished, or while somebody is not serving yet.

    ``workers`` are the announced ones. One that drains by the wish is not waited for. A group
    that does not serve may itself be replaced: its new settings may be what mends it.
    """
    absent = [g for g in groups if not _serves(g, wish, workers)]
    wanted = wish.nodes or len(groups)
    if len(groups) < wanted:
        return None if absent else Step("start")
    if len(groups) > wanted:
        return Step("stop", groups[-1].node) if not set(absent) - {groups[-1]} else None
    if wish.failed:
        return None
    old = [g for g in groups if g.rollout < wish.rollout]
    first = [g for g in old if g in absent] or old
    if not first or set(absent) - {first[0]}:
        return None
    return Step("replace", first[0].node)


def _serves(group: Group, wish: FleetWish, workers: Sequence[WorkerRecord]) -> bool:
    if {group.node, *group.workers} & set(wish.draining):
        return True
    ready = {w.worker for w in workers if w.state == "ready" and w.rollout == group.rollout}
    return ready.issuperset(group.workers)


class Rollout:
    """Follows the wish. Owned by whoever runs the fleet's processes; `run` until cancelled."""

    def __init__(
        self,
        groups: Groups,
        registry: WorkerRegistry,
        board: LoadBoard,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._groups = groups
        self._registry = registry
        self._board = board
        self._clock = clock
        self._scaler = Scaler()
        self._unreadable = ""

    async def run(self) -> None:
        """One step after the other. A failure is written into the wish, and ends that update."""
        while True:
            await asyncio.sleep(LOOK_S)
            with contextlib.suppress(IndexUnavailable):  # later, then
                await self.look()

    async def look(self) -> None:
        """Do the next step, if there is one. Raises `IndexUnavailable`."""
        try:
            wish, workers = await self._registry.wish(), await self._registry.workers()
        except ConfigError as error:
            self._say_once(f"the fleet's wish cannot be read: {error}")
            return
        step = next_step(wish, self._groups.groups(), workers)
        if step is None:
            await self._scale(wish, workers)
            return
        log.info("%s %s, rollout %d", step.verb, step.node or "a node", wish.rollout)
        try:
            await self._do(step, wish)
        except ConfigError as error:
            await self._give_up(step, error)
            return
        await asyncio.sleep(SETTLE_S)

    async def _scale(self, wish: FleetWish, workers: Sequence[WorkerRecord]) -> None:
        """Wish for more or fewer nodes, where that is left to the fleet and they are needed."""
        if not wish.most:
            return
        ready = [w.worker for w in workers if w.state == "ready"]
        wait_s = predicted_wait_s(await self._board.exchange({}), ready)
        count = len(self._groups.groups())
        nodes = self._scaler.decide(wait_s, count, wish, self._clock())
        if nodes != count:
            log.info("%d nodes instead of %d: a request waits %.2f s", nodes, count, wait_s)
            await self._registry.change_wish(lambda now: replace(now, nodes=nodes))

    async def _do(self, step: Step, wish: FleetWish) -> None:
        if step.verb == "start":
            await self._groups.start(wish)
        elif step.verb == "stop":
            await self._groups.stop(step.node)
        else:
            daemon = not IDENTITY_SETTINGS.isdisjoint(wish.environ)
            await self._groups.replace(step.node, wish, daemon=daemon)

    async def _give_up(self, step: Step, error: ConfigError) -> None:
        """The fleet stays as it is until somebody wishes something else."""
        why = f"{step.verb} {step.node}: {error}".strip()
        log.error("%s", why)
        count = len(self._groups.groups())

        def given_up(wish: FleetWish) -> FleetWish:
            environ = wish.undo if step.verb == "replace" else wish.environ  # not in the next one
            return replace(wish, failed=why, nodes=count, most=0, environ=environ)

        await self._registry.change_wish(given_up)

    def _say_once(self, what: str) -> None:
        if what != self._unreadable:
            self._unreadable = what
            log.error("%s", what)
