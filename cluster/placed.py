"""One process of the fleet on one host of a Ray cluster, as a detached actor that Ray starts again.

What it does is set on the host itself: the PREFIXFLEET_* variables that Ray was started with there.
"""

import asyncio
import contextlib
import logging
import os
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
from prefixfleet.cluster.placement import Place
from prefixfleet.cluster.services import node_service, worker_service
from prefixfleet.cluster.settings import MAX_DRAIN_S, MAX_START_S, NodeSettings
from prefixfleet.store.errors import ConfigError

AGAIN_PAUSE_S = 1.0
READY_S = MAX_START_S + 60.0
"""The longest an actor may take to be up: it knows itself how long its engine may."""
STOP_S = 30.0
STOP_LIMIT_S = STOP_S + MAX_DRAIN_S
"""The longest an actor may take to stop: it knows itself how long it may drain."""

Up = Callable[[dict[str, Any]], None]


class PlacedActor:
    """Hosts one service in a Ray process, with the settings of its host and those of its place.
    What it logs is in Ray's logs of that host."""

    def __init__(self, place: Place) -> None:
        log_here()
        environ = {**os.environ, **place.given}
        if place.kind == "worker":
            environ = _of_worker(environ, place)
        self._hosted = Hosted(_service(place.kind)(environ), ended=_end_process)
        if ray.get_runtime_context().was_current_actor_reconstructed:  # nobody waits for it now
            self._hosted.ready.add_done_callback(
                lambda ready: _end_process() if ready.exception() else None
            )

    def ready(self) -> dict[str, Any]:
        """The service's description, once it is up. Raises what stopped its start."""
        return self._hosted.ready.result(READY_S)

    def stop(self) -> bool:
        """End it in order, a worker after it has drained; whether it did."""
        return self._hosted.stop(STOP_LIMIT_S)


def actor_of(place: Place) -> Any:  # noqa: ANN401 - Ray's handles have no types
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


async def forget(actor: str) -> None:
    """End an actor at once, and let Ray not start it again; one that is not there is ignored."""
    with contextlib.suppress(ValueError):  # it is gone already
        ray.kill(await asyncio.to_thread(ray.get_actor, actor), no_restart=True)


async def stop(actor: str) -> None:
    """End an actor in order where it answers, a worker after it has drained."""
    with contextlib.suppress(ValueError, RayActorError, RayTaskError, TimeoutError):
        handle: Any = await asyncio.to_thread(ray.get_actor, actor)
        async with asyncio.timeout(STOP_LIMIT_S):
            await handle.stop.remote()
    await forget(actor)


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


def _service(kind: str) -> Callable[[Mapping[str, str]], Service]:
    from prefixfleet.cluster.keeper import keeper_service  # it imports us

    services = {
        "node": node_service,
        "worker": worker_service,
        "router": router_service,
        "keeper": keeper_service,
    }
    return services[kind]


def log_here() -> None:
    """Log to the process's error output, which Ray keeps on that host."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


def _end_process() -> None:
    """Let Ray start this actor anew, after a pause that bounds how often."""
    time.sleep(AGAIN_PAUSE_S)
    os._exit(1)
