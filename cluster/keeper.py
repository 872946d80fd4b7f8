"""Keeps a fleet on a Ray cluster that others started: `ray up`, KubeRay, or `ray start` by hand.

On every host that asks for it (`placement`): a node daemon, its engines, a router, each a `placed`
actor. The keeper holds no state; another one goes on where it ended.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping

import ray
from ray.exceptions import RayActorError, RayTaskError

from prefixfleet.cluster.hosted import Service
from prefixfleet.cluster.placed import READY_S, Up, actor_of, forget, log_here
from prefixfleet.cluster.placement import Place, chosen, engine_hosts, places, updated
from prefixfleet.cluster.ray_groups import RayGroups, reason_of
from prefixfleet.cluster.rollout import Rollout
from prefixfleet.store.errors import ConfigError, IndexUnavailable
from prefixfleet.store.load_board import LoadBoard
from prefixfleet.store.prefetch import prefetch_key
from prefixfleet.store.records import FleetWish
from prefixfleet.store.registry import WorkerRegistry
from prefixfleet.store.settings import FleetSettings

KEEPER = "keeper"
LOOK_S = 2.0
FIRST_PAUSE_S, LAST_PAUSE_S = 5.0, 60.0

log = logging.getLogger(__name__)


class Keeper:
    """Starts what is wanted and not there, ends what lost its host. Owned by one loop."""

    def __init__(self, registry: WorkerRegistry, board: LoadBoard, key: bytes) -> None:
        self._registry = registry
        self._board = board
        self._wish = FleetWish()
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._groups = RayGroups(key, cancel=self._cancel)

    async def run(self, stop: asyncio.Event) -> None:
        """Look every `LOOK_S` until ``stop``; what runs then goes on without a keeper."""
        rolling = asyncio.create_task(Rollout(self._groups, self._registry, self._board).run())
        try:
            while not stop.is_set():
                await self._look()
                if rolling.done():
                    rolling.result()  # a fault of ours
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), LOOK_S)
        finally:
            for task in (rolling, *self._starting.values()):
                task.cancel()
            await asyncio.gather(rolling, *self._starting.values(), return_exceptions=True)

    async def _look(self) -> None:
        with contextlib.suppress(IndexUnavailable, ConfigError):  # then the last one stays
            self._wish = await self._registry.wish()
            self._groups.saw(await self._registry.workers())
        alive = places(await asyncio.to_thread(ray.nodes))
        there = set(await asyncio.to_thread(ray.util.list_named_actors)) - {KEEPER}
        for actor in there - set(alive):
            log.warning("%s: its host is gone", actor)
            await forget(actor)
        for actor in set(self._starting) - set(alive):
            self._cancel(actor)
        wanted = chosen(alive, there, self._wish.nodes)
        self._groups.hold(engine_hosts(wanted), self._wish)
        for actor, place in wanted.items():
            if actor not in self._starting and not self._groups.is_busy(place.node):
                wished = updated(place, self._wish)
                self._starting[actor] = asyncio.create_task(_bring_up(wished))

    def _cancel(self, actor: str) -> None:
        if task := self._starting.pop(actor, None):
            task.cancel()


async def _bring_up(place: Place) -> None:
    """Until it is up once; from then on Ray starts it again."""
    pause_s = FIRST_PAUSE_S
    while True:
        actor = await asyncio.to_thread(actor_of, place)
        try:
            log.info("%s is up: %s", place.actor, await actor.ready.remote())
            return
        except (RayTaskError, RayActorError) as error:
            log.error("%s: %s; again in %.0f s", place.actor, reason_of(error), pause_s)
        await forget(place.actor)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LAST_PAUSE_S)


def keeper_service(environ: Mapping[str, str]) -> Service:
    """The keeper as a service, for an actor. Raises `ConfigError` when it runs."""

    async def serve(up: Up, stop: asyncio.Event) -> None:
        fleet = FleetSettings.read(environ)
        url = fleet.redis_url.get_secret_value()
        registry = WorkerRegistry(url, fleet.fleet, secret=fleet.secret())
        board = LoadBoard(url, fleet.fleet, "rollout", time.monotonic)
        try:
            up({})
            await Keeper(registry, board, prefetch_key(fleet.secret())).run(stop)
        finally:
            await registry.close()
            await board.close()

    return serve


def main() -> None:
    """Command line: ``run`` until told to stop, or ``start`` a keeper that Ray keeps, here."""
    parser = argparse.ArgumentParser(prog="prefixfleet.cluster.keeper", description=__doc__)
    parser.add_argument("verb", choices=["run", "start"])
    verb = parser.parse_args().verb
    log_here()
    try:
        ray.init("auto", namespace=f"prefixfleet-{FleetSettings.read().fleet}", log_to_driver=False)
    except (ConfigError, ConnectionError) as error:
        sys.exit(f"error: {error}")
    if verb == "run":
        try:
            asyncio.run(_run_here())
        except ConfigError as error:
            sys.exit(f"error: {error}")
    else:
        here = ray.get_runtime_context().get_node_id()
        ray.get(actor_of(Place(KEEPER, KEEPER, here, {})).ready.remote(), timeout=READY_S)


async def _run_here() -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await keeper_service(os.environ)(lambda described: None, stop)


if __name__ == "__main__":
    main()
