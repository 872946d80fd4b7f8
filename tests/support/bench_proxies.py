"""Starts what is measured, each in a process of its own and pinned to a core: ours and others."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

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
    command: Sequence[str],
    core: int,
    environ: dict[str, str] | None = None,
    stdout: int | IO[str] = subprocess.PIPE,
    stderr: IO[str] | None = None,
) -> Iterator["subprocess.Popen[str]"]:
    """A child on one core, killed at the end."""
    child = subprocess.Popen(
        ["taskset", "-c", str(core), *command],
        text=True,
        env=os.environ | (environ or {}),
        stdout=stdout,
        stderr=stderr,
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
    with ExitStack() as stack:
        children = [stack.enter_context(process(command, CORES[-1])) for _ in range(count)]
        yield [_first_line(child) for child in children]


def load(url: str, connections: int, seconds: float, kind: str, least: int = 0) -> str:
    """What the load generator printed, run on the last core; ``least`` answers at least."""
    command = ["taskset", "-c", str(CORES[-1]), sys.executable, str(HERE / "bench_client.py")]
    done = subprocess.run(
        [*command, url, str(connections), str(seconds), kind, str(least)],
        capture_output=True,
        text=True,
        timeout=seconds + 150,
        check=True,
    )
    return done.stdout


@contextmanager
def ours(urls: list[str], folder: Path, redis_url: str, fleet: str, work: Path) -> Iterator[Proxy]:
    """Our router as it is installed, with a real Redis."""
    asyncio.run(announce_workers(urls, folder, redis_url, fleet))
    with our_process(redis_url, fleet, work) as proxy:
        yield proxy


@contextmanager
def our_process(redis_url: str, fleet: str, work: Path) -> Iterator[Proxy]:
    """Our router's process alone, ready to serve what its fleet has announced."""
    (work / "secret").write_bytes(SECRET)
    environ = {
        "PREFIXFLEET_FLEET": fleet,
        "PREFIXFLEET_REDIS_URL": redis_url,
        "PREFIXFLEET_SECRET_FILE": str(work / "secret"),
        "PREFIXFLEET_ROUTER_PORT": "0",
    }
    command = [sys.executable, "-m", "prefixfleet.router"]
    log = (work / "router.log").open("a")
    with log, process(command, CORES[0], environ, stderr=log) as child:
        url = _first_line(child).rsplit(" ", 1)[-1]
        _wait_until_healthy(url, child)
        yield Proxy(url, child.pid)


async def announce_workers(
    urls: list[str], folder: Path, redis_url: str, fleet: str, tokens_per_s: float = 1e6
) -> None:
    """Put the engines at ``urls`` on the list of workers, on nodes n0, n1 and so on."""
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
            prefill_tokens_per_s=tokens_per_s,
        )
        await registry.announce(record, ttl_s=3_600)
    await registry.close()


@contextmanager
def python_proxy(urls: list[str], script: str = "bench_python_proxy.py") -> Iterator[Proxy]:
    """A proxy in Python: by default FastAPI and httpx."""
    port = _free_port()
    command = [sys.executable, str(HERE / script), str(port), *urls]
    with process(command, CORES[0]) as child:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(url, child)
        yield Proxy(url, child.pid)


def rust_program(peers: Path, name: str) -> list[str] | None:
    """How ``name`` from PyPI is started; None where it is not installed."""
    if not (peers / name).is_file():
        return None
    launcher = (
        "vllm_router.launch_router" if name == "vllm-router" else "sglang_router.launch_router"
    )
    return [str(peers / "python"), "-m", launcher]


@contextmanager
def rust_router(program: list[str], name: str, urls: list[str], work: Path) -> Iterator[Proxy]:
    """``vllm-router`` or ``sglang-router`` with its cache-aware policy on."""
    port, metrics = _free_port(), _free_port()
    options = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    policy = ["--policy", "cache_aware", "--worker-urls", *urls]
    log = (work / f"{name}.log").open("w")
    command = [*program, *options, *policy]
    with log, process(command, CORES[0], stdout=log, stderr=log) as child:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(url, child)
        yield Proxy(url, child.pid)


def _first_line(child: "subprocess.Popen[str]") -> str:
    assert child.stdout
    return child.stdout.readline().strip()


def _wait_until_healthy(url: str, child: "subprocess.Popen[str]") -> None:
    host, port = url.removeprefix("http://").split(":")
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and child.poll() is None:
        if _is_healthy(host, int(port)):
            return
        time.sleep(0.05)
    raise RuntimeError(f"{url} did not become healthy; its command was {child.args!r}")


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
