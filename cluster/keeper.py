"""Keeps a fleet on a Ray cluster that others started: `ray up`, KubeRay, or `ray start` by hand.

On every host that asks for it (`placement`): a node daemon, its engines, a router, as detached
actors that Ray starts again. What they do is set on the host itself: the PREFIXFLEET_* variables
that Ray was started with there. The keeper holds no state; another one goes on where it ended.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from prefixfleet.cluster.child import Child
from prefixfleet.cluster.engine_command import cores_for, usable_cores
from prefixfleet.cluster.hosted import Hosted, Service
from prefixfleet.cluster.placement import Place, places
from prefixfleet.cluster.services import node_service, worker_service
from prefixfleet.cluster.settings import NodeSettings
from prefixfleet.store.errors import ConfigError, FleetError
from prefixfleet.store.settings import FleetSettings

KEEPER = "keeper"
LOOK_S = 2.0
FIRST_PAUSE_S, LAST_PAUSE_S = 5.0, 60.0
AGAIN_PAUSE_S = 1.0
READY_S = 600.0
STOP_S = 30.0

log = logging.getLogger(__name__)

Up = Callable[[dict[str, Any]], None]


class PlacedActor:
    """Hosts one service in a Ray process, with the settings of its host and those of its place.
    What it logs is in Ray's logs of that host."""

    def __init__(self, place: Place) -> None:
        _log()
        environ = {**os.environ, **place.given}
        if place.kind == "worker":
            environ = _of_worker(environ, place)
        self._hosted = Hosted(_SERVICES[place.kind](environ), ended=_end_process)
        if ray.get_runtime_context().was_current_actor_reconstructed:  # nobody waits for it now
            self._hosted.ready.add_done_callback(
                lambda ready: _end_process() if ready.exception() else None
            )

    def ready(self) -> dict[str, Any]:
        """The service's description, once it is up. Raises what stopped its start."""
        return self._hosted.ready.result(READY_S)

    def stop(self) -> bool:
        """End it in order; whether it did."""
        return self._hosted.stop(STOP_S)


class Keeper:
    """Starts what is wanted and not there, ends what is there and not wanted. Owned by one loop."""

    def __init__(self) -> None:
        self._starting: dict[str, asyncio.Task[None]] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Look every `LOOK_S` until ``stop``; what runs then goes on without a keeper."""
        try:
            while not stop.is_set():
                await self._look()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), LOOK_S)
        finally:
            for task in self._starting.values():
                task.cancel()
            await asyncio.gather(*self._starting.values(), return_exceptions=True)

    async def _look(self) -> None:
        wanted = places(await asyncio.to_thread(ray.nodes))
        there = set(await asyncio.to_thread(ray.util.list_named_actors)) - {KEEPER}
        for actor in there - set(wanted):
            log.warning("%s: its host is gone", actor)
            await _forget(actor)
        for actor in set(self._starting) - set(wanted):
            self._starting.pop(actor).cancel()
        for actor, place in wanted.items():
            if actor not in self._starting:
                self._starting[actor] = asyncio.create_task(_bring_up(place))


async def _bring_up(place: Place) -> None:
    """Until it is up once; from then on Ray starts it again."""
    pause_s = FIRST_PAUSE_S
    while True:
        actor = await asyncio.to_thread(_actor, place)
        try:
            log.info("%s is up: %s", place.actor, await actor.ready.remote())
            return
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, FleetError) else error
            log.error("%s: %s; again in %.0f s", place.actor, cause, pause_s)
        except RayActorError as error:
            log.error("%s: %s; again in %.0f s", place.actor, error, pause_s)
        await _forget(place.actor)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LAST_PAUSE_S)


def _actor(place: Place) -> Any:  # noqa: ANN401 - Ray's handles have no types
    """The actor of that place, an earlier keeper's too."""
    actor: Any = ray.remote(PlacedActor)
    return actor.options(
        name=place.actor,
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        num_gpus=place.gpus,
        max_restarts=-1,
        max_task_retries=0,
        max_concurrency=2,  # `stop` does not wait for `ready`
        scheduling_strategy=NodeAffinitySchedulingStrategy(place.ray_node, soft=False),
    ).remote(place)


async def _forget(actor: str) -> None:
    with contextlib.suppress(ValueError):  # it is gone already
        ray.kill(await asyncio.to_thread(ray.get_actor, actor), no_restart=True)


def _of_worker(environ: dict[str, str], place: Place) -> dict[str, str]:
    node = NodeSettings.read(environ)
    logs = node.runtime_dir / "logs"
    added = {
        "PREFIXFLEET_WORKER_SOCKET_PATH": str(node.socket_path),
        "PREFIXFLEET_WORKER_LOG_FILE": str(logs / f"engine-{place.number}.log"),
    }
    if not place.gpus:
        cores = cores_for(place.number, place.of, usable_cores())
        added["PREFIXFLEET_WORKER_CPU_CORES"] = cores
    return added | environ


def router_service(environ: Mapping[str, str]) -> Service:
    """A router with the settings in ``environ``: a process of its own, whose end ends the service.
    Raises `ConfigError` with what it said."""

    async def serve(up: Up, stop: asyncio.Event) -> None:
        folder = Path(environ.get("PREFIXFLEET_NODE_RUNTIME_DIR", "/tmp"))
        child = await Child.start(
            [str(Path(sys.executable).with_name("prefixfleet-router"))],
            environ=environ,
            log_file=folder / "logs" / "router.log",
        )
        up({"pid": child.pid, "log": str(child.log_file)})
        ended, stopping = asyncio.create_task(child.wait()), asyncio.create_task(stop.wait())
        await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not stop.is_set():
            raise ConfigError(f"the router ended with {ended.result()}: {child.log_tail()}")
        await child.stop(STOP_S)
        await ended

    return serve


def keeper_service(_: Mapping[str, str]) -> Service:
    """The keeper as a service, for an actor."""

    async def serve(up: Up, stop: asyncio.Event) -> None:
        up({})
        await Keeper().run(stop)

    return serve


_SERVICES: dict[str, Callable[[Mapping[str, str]], Service]] = {
    "node": node_service,
    "worker": worker_service,
    "router": router_service,
    "keeper": keeper_service,
}


def main() -> None:
    """Command line: ``run`` until told to stop, or ``start`` a keeper that Ray keeps, here."""
    parser = argparse.ArgumentParser(prog="prefixfleet.cluster.keeper", description=__doc__)
    parser.add_argument("verb", choices=["run", "start"])
    verb = parser.parse_args().verb
    _log()
    try:
        ray.init("auto", namespace=f"prefixfleet-{FleetSettings.read().fleet}", log_to_driver=False)
    except (ConfigError, ConnectionError) as error:
        sys.exit(f"error: {error}")
    if verb == "run":
        asyncio.run(_run_here())
    else:
        here = ray.get_runtime_context().get_node_id()
        ray.get(_actor(Place(KEEPER, KEEPER, here, {})).ready.remote(), timeout=READY_S)


async def _run_here() -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await Keeper().run(stop)


def _log() -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


def _end_process() -> None:
    """Let Ray start this actor anew, after a pause that bounds how often."""
    time.sleep(AGAIN_PAUSE_S)
    os._exit(1)


if __name__ == "__main__":
    main()
