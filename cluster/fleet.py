"""The fleet under Ray: node daemons and workers as actors, placed and started again by Ray.

Ray starts, places and restarts; it never carries a request or a
block, and it does not decide what is alive (leases in Redis do).
"""

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

# before the import: Ray reads them once. The token keeps other users of this host out
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from prefixfleet.cluster.hosted import Hosted, Service
from prefixfleet.cluster.services import node_service, worker_service
from prefixfleet.cluster.settings import MAX_DRAIN_S
from prefixfleet.store.errors import ConfigError, FleetError

OBJECT_STORE_BYTES = 80 << 20
"""Ray's least: no block and no prompt ever passes through it."""
READY_S = 600.0
STOP_S = 30.0
STOP_LIMIT_S = STOP_S + MAX_DRAIN_S
"""The longest an actor may take to stop: it knows itself how long it may drain."""
LOG_BYTES = 10 << 20
_RESTART_PAUSE_S = 1.0

SERVICES: dict[str, Callable[[Mapping[str, str]], Service]] = {
    "node": node_service,
    "worker": worker_service,
}


class HostActor:
    """Hosts one node daemon or worker in a Ray process; a restarted one begins a new life."""

    def __init__(self, kind: str, environ: dict[str, str], log_file: str) -> None:
        _log_to(Path(log_file))
        again = ray.get_runtime_context().was_current_actor_reconstructed
        self._hosted = Hosted(SERVICES[kind](environ), ended=_end_process)
        if again:  # nobody waits for it this time: a start that fails is tried again by Ray
            self._hosted.ready.add_done_callback(
                lambda f: _end_process() if f.exception() else None
            )

    def ready(self) -> dict[str, Any]:
        """The service's description, once it is up. Raises what stopped its start."""
        return self._hosted.ready.result(READY_S)

    def stop(self) -> bool:
        """End it in order, a worker after it has drained; whether it did."""
        return self._hosted.stop(STOP_LIMIT_S)


class RayFleet:
    """A Ray of our own on this machine, with the fleet's actors. Owned by the supervisor.

    An async context manager: what it started is gone when it exits.
    """

    def __init__(self, fleet: str, runtime_dir: Path, logs: Path) -> None:
        self._fleet = fleet
        self._runtime_dir = runtime_dir
        self._logs = logs
        self._actors: dict[str, Any] = {}
        self._lives = itertools.count()

    async def __aenter__(self) -> "RayFleet":
        starting = asyncio.create_task(asyncio.to_thread(self._init))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait({starting})  # a half-started Ray cannot be stopped
            await asyncio.to_thread(ray.shutdown)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop_all("worker")
        await self.stop_all("node")
        await asyncio.to_thread(ray.shutdown)

    async def start(self, kind: str, name: str, environ: Mapping[str, str]) -> dict[str, Any]:
        """Start a "node" or a "worker" and wait until it is up; its description.

        Raises:
            ConfigError: it cannot start; says why.
        """
        places = [node["NodeID"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        place = places[len([n for n in self._actors if n.startswith(kind)]) % len(places)]
        actor: Any = ray.remote(HostActor).options(  # Ray's handles have no types
            name=f"{kind}-{name}-{next(self._lives)}",  # Ray frees a killed actor's name late
            lifetime="detached",  # Ray starts it again without asking whoever started it
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=2,  # `stop` does not wait for `ready`
            scheduling_strategy=NodeAffinitySchedulingStrategy(place, soft=False),
        )
        handle = actor.remote(kind, dict(environ), str(self._logs / f"{kind}-{name}.log"))
        self._actors[f"{kind}-{name}"] = handle
        try:
            described: dict[str, Any] = await handle.ready.remote()
            return described
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, FleetError) else error
            why = ConfigError(f"{kind} {name}: {cause}")
        except RayActorError:
            log = f"{self._logs}/{kind}-{name}.log"
            why = ConfigError(f"{kind} {name}: its process ended; see {log}")
        await self.stop(kind, name)
        raise why

    async def stop(self, kind: str, name: str) -> None:
        """End one actor, in order where it answers; one that is not there is ignored."""
        if (actor := self._actors.pop(f"{kind}-{name}", None)) is not None:
            await self._stop(actor)

    async def stop_all(self, kind: str) -> None:
        """End every actor of a kind, in order where it answers."""
        names = [name.removeprefix(f"{kind}-") for name in self._actors if name.startswith(kind)]
        await asyncio.gather(*(self.stop(kind, name) for name in names))

    async def _stop(self, actor: Any) -> None:  # noqa: ANN401 - Ray's handles have no type
        with contextlib.suppress(RayActorError, RayTaskError, TimeoutError):
            async with asyncio.timeout(STOP_LIMIT_S):
                await actor.stop.remote()
        ray.kill(actor, no_restart=True)

    def _init(self) -> None:
        """Raises `ConfigError` if Ray does not start; it gives its own processes 30 s."""
        logging.getLogger("ray").setLevel(logging.ERROR)
        try:
            self._init_ray()
        except Exception as error:  # Ray raises nothing narrower for what does not start in time
            raise ConfigError(
                f"Ray did not start: {error}; a machine that is busy otherwise may need another try"
            ) from error

    def _init_ray(self) -> None:
        ray.init(
            address="local",
            namespace=f"prefixfleet-{self._fleet}",
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=str(self._runtime_dir / "ray"),
            _node_ip_address="127.0.0.1",
        )


def _log_to(log_file: Path) -> None:
    handler = RotatingFileHandler(log_file, maxBytes=LOG_BYTES, backupCount=1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("prefixfleet")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def _end_process() -> None:
    """Let Ray start this actor anew, after a pause that bounds how often."""
    time.sleep(_RESTART_PAUSE_S)
    os._exit(1)
