"""The processes of a chaos run: Redis, daemons, engines, routers, and a proxy on every link."""

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
from chaos_process import Process
from chaos_real import MODEL
from chats import write_model
from eventually import until
from link_proxy import LinkProxy
from upstreams import SECRET

from prefixfleet.cluster.leftovers import SHARED_MEMORY, pool_prefix
from prefixfleet.cluster.model import default_cache_dir, demo_model
from prefixfleet.cluster.ports import hold_port
from prefixfleet.store.redis_server import RedisServer

SCRIPTS = Path(__file__).parents[1] / "chaos"
POOL_BYTES = 1 << 20
DISK_BYTES, REAL_DISK_BYTES = 2 << 20, 128 << 20
REAL_POOL_BYTES = 64 << 20  # 43 blocks of the demo's model: it evicts
UP_S = 300.0  # of a machine that is busy with other things


class ChaosFleet:
    """Owned by the driver's event loop. `open` returns when every process was started once.

    The first ``real`` nodes have a vLLM engine with the demo's model, the others a fast fake.
    """

    def __init__(self, nodes: int, routers: int, real: int = 0) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pfc-"))
        self.fleet = f"chaos-{secrets.token_hex(4)}"
        self.node_names = [f"n{i}" for i in range(nodes)]
        self.router_names = [f"r{i}" for i in range(routers)]
        self.real_names = [f"e{i}" for i in range(real)]
        self.fast_names = [f"e{i}" for i in range(real, nodes)]
        self.processes: dict[str, Process] = {}
        self.proxies: dict[str, LinkProxy] = {}
        self.ports: dict[str, int] = {}
        self._held: list[Any] = []
        self._password = secrets.token_hex(8)

    async def open(self) -> None:
        (self.folder / "secret").write_bytes(SECRET)
        (self.folder / "tmp").mkdir()
        (self.folder / "engine-tmp").mkdir()
        self._model = write_model(self.folder / "model")
        self.redis_port = self._port("redis")
        self.redis = self._start_redis()
        for name in self.node_names:
            await self._add_node(name)
        for name in self.router_names:
            await self._add_router(name)
        for process in self.processes.values():
            await process.start()

    def groups(self) -> dict[str, list[str]]:
        """Who stands in for whom, as `chaos_plan.Groups`: routers, and a model's hosts."""
        real = len(self.real_names)
        groups = {
            "router": self.router_names,
            "host real": self.node_names[:real],
            "host": self.node_names[real:],
        }
        return {name: members for name, members in groups.items() if members}

    def engine_of(self, node: str) -> str:
        return f"e{node[1:]}"

    def router_urls(self) -> list[str]:
        return [f"http://127.0.0.1:{self.ports[name]}" for name in self.router_names]

    def restart_redis(self) -> None:
        """kill -9, and an empty one in its place."""
        os.kill(self.redis.pid, signal.SIGKILL)
        self.redis.stop()
        self.redis = self._start_redis()

    async def until_whole(self) -> None:
        """Until every process is up, and every node has the pool of its engine."""
        for name in self.processes:
            await self.until_up(name)
        await until(lambda: all(self.pool_file(node).exists() for node in self.node_names), UP_S)

    async def until_up(self, name: str) -> None:
        """Until it can stand in for others: it listens, and routers send requests to an engine."""

        async def listens() -> bool:
            if not self.processes[name].running:
                log = (self.folder / f"{name}.log").read_text(errors="replace")
                raise AssertionError(f"{name} ended at its start: {log[-2000:]}")
            if name in self.real_names + self.fast_names:
                return await self._is_served(name)
            try:
                if name in self.ports:
                    _, writer = await asyncio.open_connection("127.0.0.1", self.ports[name])
                else:
                    _, writer = await asyncio.open_unix_connection(self.folder / f"{name}.sock")
            except OSError:
                return False
            writer.close()
            return True

        await until(listens, UP_S)

    async def _is_served(self, engine: str) -> bool:
        """Whether every router that answers sends requests to an engine; one at least does."""
        limit, answers = aiohttp.ClientTimeout(total=5), []
        async with aiohttp.ClientSession(timeout=limit) as session:
            for url in self.router_urls():
                with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
                    async with session.get(f"{url}/status") as response:
                        workers = (await response.json())["workers"]
                    answers.append(
                        (engine, "ready") in {(w["worker"], w["state"]) for w in workers}
                    )
        return bool(answers) and all(answers)

    def pool_file(self, node: str) -> Path:
        return SHARED_MEMORY / f"{pool_prefix(self.folder)}{node}"

    def disk_files(self, node: str) -> list[Path]:
        """What a node has on its disk now."""
        return [p for p in (self.folder / "disk" / node).rglob("*") if p.is_file()]

    def skew_file(self, name: str) -> Path:
        """How wrong the wall clock of a node or router is."""
        return self.folder / f"{name}.skew"

    def segments(self) -> list[Path]:
        """Shared memory of all daemons."""
        return list(SHARED_MEMORY.glob(f"{pool_prefix(self.folder)}*"))

    async def books(self, node: str) -> dict[str, Any]:
        """What a daemon proves of itself now."""
        path = self.folder / f"{node}.check"
        path.unlink(missing_ok=True)
        self.processes[node].send(signal.SIGUSR1)
        await until(path.exists, 60)
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    async def close(self) -> dict[str, Any]:
        """End everything; what was left behind, which should be nothing."""
        codes = {}
        for name, process in reversed(self.processes.items()):
            if process.running:
                codes[name] = await process.stop()
        for proxy in self.proxies.values():
            await proxy.close()
        self.redis.stop()
        for held in self._held:
            held.close()
        left = [str(p) for p in self.segments()]
        left += [str(p) for p in self.folder.glob("*.sock")]
        left += [str(p) for p in (self.folder / "tmp").rglob("*") if not p.is_dir()]
        logs = {p.name: p.read_text(errors="replace") for p in self.folder.glob("*.log")}
        faults = [name for name, text in logs.items() if "Traceback (most recent call" in text]
        if not (left or faults):
            shutil.rmtree(self.folder)
        return {
            "left_behind": left,
            "tracebacks_in": faults,
            "exit_codes": {name: code for name, code in codes.items() if code not in (0, -15)},
        }

    async def _add_node(self, name: str) -> None:
        port_file = self.folder / f"{name}.port"
        peer = await self._proxy(f"peer:{name}", lambda: int(port_file.read_text()))
        redis = await self._redis_proxy(name)
        environ = {
            **self._environ(redis),
            "PREFIXFLEET_NODE_NAME": name,
            "PREFIXFLEET_NODE_RUNTIME_DIR": str(self.folder),
            "PREFIXFLEET_NODE_POOL_BYTES": str(POOL_BYTES),
            "PREFIXFLEET_NODE_SSD_PATH": str(self.folder / "disk"),
            "PREFIXFLEET_NODE_SSD_BYTES": str(DISK_BYTES),
        }
        engine = self.engine_of(name)
        if engine in self.real_names:
            environ["PREFIXFLEET_NODE_POOL_BYTES"] = str(REAL_POOL_BYTES)
            environ["PREFIXFLEET_NODE_SSD_BYTES"] = str(REAL_DISK_BYTES)
        skew = str(self.skew_file(name))
        self._process(name, [str(SCRIPTS / "node.py"), str(self.folder), str(peer), skew], environ)
        port = self._port(engine)
        http = await self._proxy(f"http:{engine}", lambda: port)
        if engine in self.real_names:
            self._add_real_engine(engine, name, self._environ(redis), port, http)
            return
        self._process(
            engine,
            [
                *(str(SCRIPTS / "engine.py"), engine, name, str(self.folder / f"{name}.sock")),
                *(str(self._model), self._redis_url(redis), self.fleet, str(port)),
                f"http://127.0.0.1:{http}",
            ],
            {},
        )

    def _add_real_engine(
        self, name: str, node: str, environ: dict[str, str], port: int, http: int
    ) -> None:
        cores = sorted(os.sched_getaffinity(0))
        settings = {
            "NAME": name,
            "NODE": node,
            "MODEL": str(demo_model(default_cache_dir(), lambda _: None)),
            "SERVED_NAME": MODEL,
            "SOCKET_PATH": str(self.folder / f"{node}.sock"),
            "LOG_FILE": str(self.folder / f"{name}-vllm.txt"),
            "PORT": str(port),
            "KV_CACHE_BYTES": str(128 << 20),
            "MAX_MODEL_TOKENS": "1024",
            "CPU_CORES": str(cores[int(name[1:]) % len(cores)]),
        }
        environ |= {f"PREFIXFLEET_WORKER_{key}": value for key, value in settings.items()}
        environ["VLLM_RPC_BASE_PATH"] = str(self.folder)  # else it leaves sockets in /tmp
        environ["TMPDIR"] = str(self.folder / "engine-tmp")  # a killed vLLM leaves files of its own
        command = [str(SCRIPTS / "real_engine.py"), f"http://127.0.0.1:{http}"]
        self._process(name, command, environ)

    async def _add_router(self, name: str) -> None:
        redis = await self._redis_proxy(name)
        environ = self._environ(redis) | {"PREFIXFLEET_ROUTER_PORT": str(self._port(name))}
        self._process(name, [str(SCRIPTS / "router.py"), str(self.skew_file(name))], environ)

    def _process(self, name: str, command: list[str], environ: dict[str, str]) -> None:
        self.processes[name] = Process(
            name, [sys.executable, *command], environ, self.folder / f"{name}.log"
        )

    def _environ(self, redis: int) -> dict[str, str]:
        return {
            "PREFIXFLEET_FLEET": self.fleet,
            "PREFIXFLEET_REDIS_URL": self._redis_url(redis),
            "PREFIXFLEET_SECRET_FILE": str(self.folder / "secret"),
            "TMPDIR": str(self.folder / "tmp"),
        }

    def _redis_url(self, port: int) -> str:
        return f"redis://:{self._password}@127.0.0.1:{port}/0"

    def _start_redis(self) -> RedisServer:
        return RedisServer.start(
            self.folder / "redis", password=self._password, port=self.redis_port
        )

    def _port(self, name: str) -> int:
        held = hold_port("127.0.0.1")
        self._held.append(held)
        self.ports[name] = port = held.getsockname()[1]
        return int(port)

    async def _redis_proxy(self, name: str) -> int:
        return await self._proxy(f"redis:{name}", lambda: self.redis_port)

    async def _proxy(self, name: str, target: Callable[[], int]) -> int:
        proxy = await LinkProxy(target).open()
        self.proxies[name] = proxy
        return proxy.port
