"""The nodes and engines of a fleet on a Ray cluster, as `rollout` exchanges them.

One group a host: its daemon and its engines. Must not know why one comes or goes.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayActorError, RayTaskError

from prefixfleet.cluster.handover import HANDOVER_S, ask_handover
from prefixfleet.cluster.placed import actor_of, forget, stop
from prefixfleet.cluster.placement import ENGINES, Place, updated
from prefixfleet.cluster.rollout import Group
from prefixfleet.store.errors import ConfigError, FleetError
from prefixfleet.store.records import FleetWish, WorkerRecord

log = logging.getLogger(__name__)


class RayGroups:
    """Implements `rollout.Groups`. Owned by the keeper's loop, which says what it `hold`s.

    ``cancel`` ends the keeper's own attempts to start an actor.
    """

    def __init__(self, key: bytes, *, cancel: Callable[[str], None]) -> None:
        self._key = key
        self._cancel = cancel
        self._held: Mapping[str, Sequence[Place]] = {}
        self._settings: dict[str, FleetWish] = {}  # what a host's engines were last started with
        self._rollouts: dict[str, int] = {}  # by worker, as it says itself
        self._busy: set[str] = set()
        self._wish = FleetWish()

    def hold(self, hosts: Mapping[str, Sequence[Place]], wish: FleetWish) -> None:
        """These hosts run engines, and others that come are started with ``wish``."""
        self._held, self._wish = hosts, wish

    def saw(self, workers: Sequence[WorkerRecord]) -> None:
        """These workers are announced."""
        self._rollouts = {w.worker: w.rollout for w in workers}

    def is_busy(self, node: str) -> bool:
        """Whether the host's processes are being exchanged just now."""
        return node in self._busy

    def groups(self) -> list[Group]:
        """A host that was never seen serving counts as up to date: it may be starting."""
        return [self._group(node) for node in self._held]

    def _group(self, node: str) -> Group:
        workers = tuple(p.worker for p in self._held[node] if p.kind == "worker")
        known = [self._rollouts[w] for w in workers if w in self._rollouts]
        return Group(node, workers, min(known, default=self._wish.rollout))

    async def start(self, wish: FleetWish) -> None:
        """Ask Ray's autoscaler for a host; the keeper uses it once it is there."""
        await asyncio.to_thread(request_resources, bundles=[{ENGINES: 1}] * wish.nodes)

    async def stop(self, node: str) -> None:
        """End a host's engines, then its daemon, after peers took what only it has."""
        with self._exchange(node):
            await self._stop(node, "worker")
            for place in self._held[node]:
                if place.kind == "node":
                    await self._hand_over(place)
            await self._stop(node, "node")

    async def replace(self, node: str, wish: FleetWish, *, daemon: bool) -> None:
        """A host's engines with other settings; the old ones again if they are wrong.

        Raises:
            ConfigError: why a new one did not start.
        """
        before = self._settings.get(node, FleetWish())
        with self._exchange(node):
            try:
                await self._start_with(node, wish, daemon=daemon)
            except ConfigError:
                await self._start_with(node, before, daemon=daemon)
                raise

    async def _start_with(self, node: str, wish: FleetWish, *, daemon: bool) -> None:
        kinds = ("worker", "node") if daemon else ("worker",)
        for kind in kinds:
            await self._stop(node, kind)
        for kind in reversed(kinds):
            places = [updated(p, wish) for p in self._held[node] if p.kind == kind]
            await asyncio.gather(*map(_start, places))
        self._settings[node] = wish

    async def _stop(self, node: str, kind: str) -> None:
        actors = [p.actor for p in self._held[node] if p.kind == kind]
        for actor in actors:
            self._cancel(actor)
        await asyncio.gather(*map(stop, actors))

    async def _hand_over(self, place: Place) -> None:
        with contextlib.suppress(RayActorError, RayTaskError):
            actor = await asyncio.to_thread(actor_of, place)
            described = await actor.ready.remote()
            await ask_handover(described["http"], self._key, HANDOVER_S)

    @contextlib.contextmanager
    def _exchange(self, node: str) -> Iterator[None]:
        self._busy.add(node)
        try:
            yield
        finally:
            self._busy.discard(node)


async def _start(place: Place) -> None:
    """Once. Raises `ConfigError` with the reason it did not start; then it is gone."""
    actor = await asyncio.to_thread(actor_of, place)
    try:
        await actor.ready.remote()
    except (RayTaskError, RayActorError) as error:
        await forget(place.actor)
        raise ConfigError(f"{place.actor}: {reason_of(error)}") from error


def reason_of(error: RayTaskError | RayActorError) -> str:
    """What an actor's failure says, without Ray's traceback where the reason is one of ours."""
    cause = getattr(error, "cause", None)
    return str(cause if isinstance(cause, FleetError) else error)
