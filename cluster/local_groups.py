"""The nodes and engines of a fleet on this machine, started under a local Ray.

Must not know why one comes or goes (`rollout`).
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    models: tuple[Path, ...]  # an engine each
    rollout: int = 0
    changes: Mapping[str, str] = field(default_factory=dict)  # an update's, over those of the start

    @property
    def node(self) -> str:
        return f"node-{self.number}"

    @property
    def engines(self) -> tuple[str, ...]:
        return tuple(f"engine-{number}" for number in self.engine_numbers)

    @property
    def engine_numbers(self) -> range:
        """In the fleet; every group has as many."""
        return range(self.number * len(self.models), (self.number + 1) * len(self.models))


class LocalGroups:
    """Implements `rollout.Groups`. Owned by the supervisor's loop.

    ``environ`` is what every process is told. Group n serves ``models[n % len(models)]``; with
    ``colocate`` it serves them all, with an engine each on the memory of one daemon.
    """

    def __init__(
        self,
        ray: "RayFleet",
        environ: Mapping[str, str],
        *,
        count: int,
        models: Sequence[Path],
        colocate: bool,
        runtime: Path,
        logs: Path,
        secret: bytes,
    ) -> None:
        self._key = prefetch_key(secret)
        self._ray = ray
        self._environ = environ
        self._count = count
        self._models = [tuple(models)] if colocate else [(model,) for model in models]
        self._runtime = runtime
        self._logs = logs
        self._running: dict[str, _Running] = {}
        self._urls: dict[str, str] = {}

    def groups(self) -> list[Group]:
        """What runs, in order of its number."""
        return [Group(g.node, g.engines, g.rollout) for g in self._running.values()]

    async def start_nodes(self) -> None:
        """The node daemons of the fleet's start."""
        await _each(self._start_node(self._group(n)) for n in range(self._count))

    async def start_workers(self) -> None:
        """Their engines."""
        first = [self._group(number) for number in range(self._count)]
        await _each(self._start_engines(group) for group in first)
        self._running = {group.node: group for group in first}

    async def start(self, wish: FleetWish) -> None:
        """One more node with its engines. Raises `ConfigError`."""
        taken = {group.number for group in self._running.values()}
        number = next(n for n in range(len(taken) + 1) if n not in taken)
        group = replace(self._group(number), rollout=wish.rollout, changes=wish.environ)
        await self._start_node(group)
        try:
            await self._start_engines(group)
        except ConfigError:
            await self._stop_engines(group)
            await self._ray.stop("node", group.node)
            raise
        self._running[group.node] = group

    async def stop(self, node: str) -> None:
        """End a node's engines, then the node, after peers took what only it has."""
        group = self._running.pop(node)
        await self._stop_engines(group)
        await ask_handover(self._urls[node], self._key, HANDOVER_S)
        await self._ray.stop("node", group.node)

    async def replace(self, node: str, wish: FleetWish, *, daemon: bool) -> None:
        """The engines with other settings; the old ones again if they are wrong.

        Raises:
            ConfigError: why a new one did not start.
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
        await self._stop_engines(group)
        if daemon:
            await self._ray.stop("node", group.node)
            await self._start_node(group)
        await self._start_engines(group)

    def _group(self, number: int) -> _Running:
        return _Running(number, self._models[number % len(self._models)])

    async def _start_node(self, group: _Running) -> None:
        own = {
            "PREFIXFLEET_NODE_NAME": group.node,
            "PREFIXFLEET_NODE_RUNTIME_DIR": str(self._runtime),
            "PREFIXFLEET_NODE_HOST": HOST,
        }
        described = await self._ray.start("node", group.node, {**self._environ, **own})
        self._urls[group.node] = described["http"]

    async def _start_engines(self, group: _Running) -> None:
        engines = zip(group.engine_numbers, group.engines, group.models, strict=True)
        await _each(self._start_engine(group, *engine) for engine in engines)

    async def _stop_engines(self, group: _Running) -> None:
        await _each(self._ray.stop("worker", engine) for engine in group.engines)

    async def _start_engine(self, group: _Running, number: int, name: str, model: Path) -> None:
        of = max(self._count, group.number + 1) * len(group.models)
        own = {
            "NAME": name,
            "NODE": group.node,
            "MODEL": str(model),
            "SOCKET_PATH": str(self._runtime / f"{group.node}.sock"),
            "LOG_FILE": str(self._logs / f"{name}.log"),
            "CPU_CORES": cores_for(number, of, usable_cores()),
            "ROLLOUT": str(group.rollout),
        }
        named = {PREFIX + name: value for name, value in own.items()}
        await self._ray.start("worker", name, {**self._environ, **named, **group.changes})


async def _each(starts: Iterable[Any]) -> None:
    """All of them; the first failure, after the others have ended too."""
    results = await asyncio.gather(*starts, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
