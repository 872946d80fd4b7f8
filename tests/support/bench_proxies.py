"""Starts what is measured, each in a process of its own and pinned to a core: ours and others."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from bench_upstream import NAMESPACE, SECRET

from prefixfleet.store.records import WorkerRecord
from prefixfleet.store.registry import WorkerRegistry

HERE = Path(__file__).parent
START_LIMIT_S = 60.0
CORES = sorted(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Proxy:
    """A running proxy."""

    url: str
    pid: int

    def cpu_s(self) -> float:
        """User and system time of the process so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_bytes(self) -> int:
        """Resident memory."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def process(
    command: Sequence[str], core: int, environ: dict[str, str] | None = None, **options: object
) -> Iterator["subprocess.Popen[str]"]:
    """A child on one core, killed at the end."""
    child = subprocess.Popen(  # type: ignore[call-overload]  # options are Popen's own
        ["taskset", "-c", str(core), *command],
        text=True,
        env=os.environ | (environ or {}),
        **options,
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()


@contextmanager
def upstreams(folder: Path, count: int) -> Iterator[list[str]]:
    """URLs of ``count`` fake engines on the last core."""
    command = [sys.executable, str(HERE / "bench_upstream.py"), str(folder)]
    options = {"stdout": subprocess.PIPE}
    if count == 0:
        yield []
        return
    with process(command, CORES[-1], **options) as child:
        assert child.stdout
        url = child.stdout.readline().strip()
        with upstreams(folder, count - 1) as rest:
            yield [url, *rest]


def load(url: str, connections: int, seconds: float, kind: str) -> str:
    """What the load generator printed, run on the last core."""
    command = ["taskset", "-c", str(CORES[-1]), sys.executable, str(HERE / "bench_client.py")]
    done = subprocess.run(
        [*command, url, str(connections), str(seconds), kind],
        capture_output=True,
        text=True,
        timeout=seconds + 150,
        check=True,
    )
    return done.stdout


@contextmanager
def ours(urls: list[str], folder: Path, redis_url: str, fleet: str, work: Path) -> Iterator[Proxy]:
    """Our router as it is installed, with a real Redis."""
    secret = work / "secret"
    secret.write_bytes(SECRET)
    asyncio.run(_announce(urls, folder, redis_url, fleet))
    environ = {
        "PREFIXFLEET_FLEET": fleet,
        "PREFIXFLEET_REDIS_URL": redis_url,
        "PREFIXFLEET_SECRET_FILE": str(secret),
        "PREFIXFLEET_ROUTER_PORT": "0",
    }
    command = [sys.executable, "-m", "prefixfleet.router"]
    log = (work / "router.log").open("w")
    with log, process(command, CORES[0], environ, stdout=subprocess.PIPE, stderr=log) as child:
        assert child.stdout
        url = child.stdout.readline().rsplit(" ", 1)[-1].strip()
        _wait_until_healthy(url, child)
        yield Proxy(url, child.pid)


async def _announce(urls: list[str], folder: Path, redis_url: str, fleet: str) -> None:
    registry = WorkerRegistry(redis_url, fleet)
    for number, url in enumerate(urls):
        record = WorkerRecord(
            worker=f"w{number}",
            node=f"n{number}",
            url=url,
            model="tiny",
            model_path=str(folder),
            namespace=asdict(NAMESPACE),
            block_bytes=1_000,
            max_model_tokens=100_000,
            prefill_tokens_per_s=1e6,
        )
        await registry.announce(record, ttl_s=3_600)
    await registry.close()


@contextmanager
def python_proxy(urls: list[str]) -> Iterator[Proxy]:
    """FastAPI and httpx."""
    port = _free_port()
    command = [sys.executable, str(HERE / "bench_python_proxy.py"), str(port), *urls]
    with process(command, CORES[0]) as child:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(url, child)
        yield Proxy(url, child.pid)


@contextmanager
def rust_router(peers: Path, name: str, urls: list[str], work: Path) -> Iterator[Proxy]:
    """``vllm-router`` or ``sglang-router`` from PyPI, with its cache-aware policy."""
    port, metrics = _free_port(), _free_port()
    program = (
        [str(peers / "vllm-router")]
        if name == "vllm-router"
        else [str(peers / "python"), "-m", "sglang_router.launch_router"]
    )
    options = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    policy = ["--policy", "cache_aware", "--worker-urls", *urls]
    log = (work / f"{name}.log").open("w")
    with log, process([*program, *options, *policy], CORES[0], stdout=log, stderr=log) as child:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(url, child)
        yield Proxy(url, child.pid)


def _wait_until_healthy(url: str, child: "subprocess.Popen[str]") -> None:
    host, port = url.removeprefix("http://").split(":")
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and child.poll() is None:
        if _is_healthy(host, int(port)):
            return
        time.sleep(0.05)
    raise RuntimeError(f"{url} did not become healthy; its command was {child.args}")


def _is_healthy(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), 1.0) as connection:
            connection.settimeout(1.0)
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            return connection.recv(64).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
