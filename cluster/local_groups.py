"""The nodes and engines of a fleet on this machine: one engine a node, started under a local Ray.

Must not know why one comes or goes (`rollout`).
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefixfleet.cluster.engine_command import cores_for, usable_cores
from prefixfleet.cluster.handover import HANDOVER_S, ask_handover
from prefixfleet.cluster.rollout import Group
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.prefetch import prefetch_key
from prefixfleet.store.records import FleetWish

if TYPE_CHECKING:
    from prefixfleet.cluster.fleet import RayFleet

HOST = "127.0.0.1"
PREFIX = "PREFIXFLEET_WORKER_"


@dataclass(frozen=True, slots=True)
class _Running:
    number: int
    rollout: int
    changes: Mapping[str, str]  # an update's settings, over those of the start

    @property
    def node(self) -> str:
        return f"node-{self.number}"

    @property
    def engine(self) -> str:
        return f"engine-{self.number}"


class LocalGroups:
    """Implements `rollout.Groups`. Owned by the supervisor's loop.

    ``environ`` is what every process is told; group n serves ``models[n % len(models)]``.
    """

    def __init__(
        self,
        ray: "RayFleet",
        environ: Mapping[str, str],
        *,
        count: int,
        models: Sequence[Path],
        runtime: Path,
        logs: Path,
        secret: bytes,
    ) -> None:
        self._key = prefetch_key(secret)
        self._ray = ray
        self._environ = environ
        self._count = count
        self._models = models
        self._runtime = runtime
        self._logs = logs
        self._running: dict[str, _Running] = {}
        self._urls: dict[str, str] = {}

    def groups(self) -> list[Group]:
        """What runs, in order of its number."""
        return [Group(g.node, (g.engine,), g.rollout) for g in self._running.values()]

    async def start_nodes(self) -> None:
        """The node daemons of the fleet's start."""
        await _each(self._start_node(_Running(n, 0, {})) for n in range(self._count))

    async def start_workers(self) -> None:
        """Their engines."""
        first = [_Running(number, 0, {}) for number in range(self._count)]
        await _each(self._start_worker(group) for group in first)
        self._running = {group.node: group for group in first}

    async def start(self, wish: FleetWish) -> None:
        """One more node with an engine. Raises `ConfigError`."""
        taken = {group.number for group in self._running.values()}
        number = next(n for n in range(len(taken) + 1) if n not in taken)
        group = _Running(number, wish.rollout, wish.environ)
        await self._start_node(group)
        try:
            await self._start_worker(group)
        except ConfigError:
            await self._ray.stop("node", group.node)
            raise
        self._running[group.node] = group

    async def stop(self, node: str) -> None:
        """End an engine, then its node, after peers took what only it has."""
        group = self._running.pop(node)
        await self._ray.stop("worker", group.engine)
        await ask_handover(self._urls[node], self._key, HANDOVER_S)
        await self._ray.stop("node", group.node)

    async def replace(self, node: str, wish: FleetWish, *, daemon: bool) -> None:
        """The engine with other settings; the old one again if they are wrong.

        Raises:
            ConfigError: why the new one did not start.
        """
        before = self._running[node]
        after = replace(before, rollout=wish.rollout, changes=wish.environ)
        try:
            await self._exchange(after, daemon=daemon)
        except ConfigError:
            await self._exchange(before, daemon=daemon)
            raise
        self._running[node] = after

    async def _exchange(self, group: _Running, *, daemon: bool) -> None:
        await self._ray.stop("worker", group.engine)
        if daemon:
            await self._ray.stop("node", group.node)
            await self._start_node(group)
        await self._start_worker(group)

    async def _start_node(self, group: _Running) -> None:
        own = {
            "PREFIXFLEET_NODE_NAME": group.node,
            "PREFIXFLEET_NODE_RUNTIME_DIR": str(self._runtime),
            "PREFIXFLEET_NODE_HOST": HOST,
        }
        described = await self._ray.start("node", group.node, {**self._environ, **own})
        self._urls[group.node] = described["http"]

    async def _start_worker(self, group: _Running) -> None:
        number = group.number
        own = {
            "NAME": group.engine,
            "NODE": group.node,
            "MODEL": str(self._models[number % len(self._models)]),
            "SOCKET_PATH": str(self._runtime / f"{group.node}.sock"),
            "LOG_FILE": str(self._logs / f"{group.engine}.log"),
            "CPU_CORES": cores_for(number, max(self._count, number + 1), usable_cores()),
            "ROLLOUT": str(group.rollout),
        }
        named = {PREFIX + name: value for name, value in own.items()}
        await self._ray.start("worker", group.engine, {**self._environ, **named, **group.changes})


async def _each(starts: Iterable[Any]) -> None:
    """All of them; the first failure, after the others have ended too."""
    results = await asyncio.gather(*starts, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
