"""Ray clusters on hosts: `ray up` and `ray down` made whole, for one cluster file.

``up`` first asks every host of a local cluster for ssh (Ray itself retries for ever and says
nothing), bounds `ray up` in time, and returns once all hosts have joined. ``down`` stops Ray on
the workers of a local cluster, which `ray down` leaves running. Knows nothing of the fleet.
"""

import argparse
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from prefixfleet.store.errors import ConfigError

SSH_S = 5
COUNT_S = 60
STOP_S = 60
POLL_S = 2.0
STOP = """pkill -u "$(id -u)" -f '[r]ay_bootstrap_key.pem'
for attempt in 1 2 3; do
  ray stop --force && sleep 1
  pgrep -u "$(id -u)" -x raylet >/dev/null || exit 0
done
exit 1"""
"""On one host: ends the ssh by which the head is starting others, then Ray, until it is gone."""
_RAY = str(Path(sys.executable).with_name("ray"))
COUNT = """import ray
ray.init("auto", log_to_driver=False)
print("joined", *[node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]])"""


@dataclass(frozen=True)
class ClusterFile:
    """A cluster file of Ray's, as far as starting and stopping need it.

    ``workers`` are the workers' addresses, known beforehand on a local cluster only; ``nodes`` is
    how many nodes, the head included, `ray up` brings up by itself.
    """

    path: Path
    user: str
    key: Path | None
    head: str
    workers: tuple[str, ...]
    nodes: int

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises `ConfigError` if ``path`` cannot be read or is no cluster file."""
        try:
            content = yaml.safe_load(path.read_text())
            provider, auth = content["provider"], content.get("auth", {})
            key = auth.get("ssh_private_key")
            local = provider["type"] == "local"
            workers = tuple(provider["worker_ips"]) if local else ()
            return cls(
                path=path,
                user=auth.get("ssh_user", "ubuntu"),
                key=Path(key).expanduser() if key else None,
                head=provider["head_ip"] if local else "",
                workers=workers,
                nodes=1 + (len(workers) if local else _smallest(content)),
            )
        except OSError as error:
            raise ConfigError(f"cluster file: {error}") from error
        except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path}: not a cluster file of Ray's ({type(error).__name__}: {error}); expected "
                "provider.type and, for type local, provider.head_ip and provider.worker_ips"
            ) from error

    def ssh(self, host: str, command: str) -> list[str]:
        """The command line that runs ``command`` on ``host``; workers are reached by the head.

        Without a terminal and without asking: it fails where a password would be needed.
        """
        key = ["-i", str(self.key)] if self.key else []
        options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={SSH_S}"]
        options += ["-o", "StrictHostKeyChecking=accept-new", *key]
        if host != self.head:
            jump = ["ssh", *options, "-W", "%h:%p", f"{self.user}@{self.head}"]
            options += ["-o", f"ProxyCommand={shlex.join(jump)}"]
        return ["ssh", *options, f"{self.user}@{host}", command]


def _smallest(content: dict[str, Any]) -> int:
    return sum(kind.get("min_workers", 0) for kind in content["available_node_types"].values())


def up(cluster: ClusterFile, *, within_s: float) -> list[str]:
    """Addresses of the nodes, once all have joined.

    Raises:
        ConfigError: a host does not answer to ssh, `ray up` fails, or nodes are missing at the end.
    """
    deadline = time.monotonic() + within_s
    _check_ssh(cluster)
    _ray("up", ["-y", "--no-config-cache", str(cluster.path)], deadline)
    joined: list[str] = []
    while len(joined) < cluster.nodes:
        if time.monotonic() + POLL_S > deadline:
            raise ConfigError(_who_is_missing(cluster, joined, within_s))
        time.sleep(POLL_S)
        joined = _joined(cluster)
    return joined


def down(cluster: ClusterFile, *, within_s: float) -> list[str]:
    """Stop Ray on every host; returns what to say of those on which it could not be stopped.

    Raises:
        ConfigError: `ray down` itself failed.
    """
    deadline = time.monotonic() + within_s
    left = []
    # the head first: its autoscaler would start Ray again on workers that lost it
    for host in (cluster.head, *cluster.workers) if cluster.head else ():
        done = _run(cluster.ssh(host, f"bash -ic {shlex.quote(STOP)}"), STOP_S)
        if done.returncode:
            left.append(f"{host}: Ray not stopped: {_last_line(done)}")
    _ray("down", ["-y", str(cluster.path)], deadline)
    return left


def _check_ssh(cluster: ClusterFile) -> None:
    silent = []
    for host in (cluster.head, *cluster.workers) if cluster.head else ():
        done = _run(cluster.ssh(host, "true"), 3 * SSH_S)
        if done.returncode:
            silent.append(f"  {cluster.user}@{host}: {_last_line(done)}")
    if silent:
        raise ConfigError(
            f"{cluster.path}: no ssh without a password to\n" + "\n".join(silent) + "\n"
            "(workers are asked through the head). Check the addresses, auth.ssh_user and "
            "auth.ssh_private_key"
        )


def _who_is_missing(cluster: ClusterFile, joined: list[str], within_s: float) -> str:
    missing = sorted({cluster.head, *cluster.workers} - {"", *joined})
    return (
        f"{len(joined)} of {cluster.nodes} nodes joined within {within_s:.0f} s"
        + (f"; missing: {', '.join(missing)}" if missing else "")
        + f". What the head says: ray exec {cluster.path} "
        "'tail -n 50 /tmp/ray/session_latest/logs/monitor*'"
    )


def _joined(cluster: ClusterFile) -> list[str]:
    command = f"python -c {shlex.quote(COUNT)}"
    done = _run([_RAY, "exec", str(cluster.path), command], COUNT_S)
    found = re.search(r"^joined ([^\r\n]*)", done.stdout, re.MULTILINE)
    return found[1].split() if found else []


def _ray(verb: str, arguments: Sequence[str], deadline: float) -> None:
    """Ray's own command; what it says goes to our output as it comes."""
    child = subprocess.Popen(
        [_RAY, verb, *arguments], stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        status = child.wait(max(deadline - time.monotonic(), 1))
    except subprocess.TimeoutExpired:
        raise ConfigError(f"ray {verb}: no end in time (--within), stopped") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # its ssh sessions too
        child.wait()
    if status:
        raise ConfigError(f"ray {verb} failed with status {status}, see above")


def _run(command: Sequence[str], limit_s: float) -> subprocess.CompletedProcess[str]:
    """Its end and outputs; past the limit, status 124 as `timeout` gives. Raises `ConfigError`."""
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"no answer within {limit_s:.0f} s")
    except FileNotFoundError:
        raise ConfigError(f"{command[0]} is not installed on this machine") from None


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"status {done.returncode}"


def main() -> None:
    """Command line: ``up FILE`` or ``down FILE``; status 1 and the reason on failure."""
    parser = argparse.ArgumentParser(prog="prefixfleet.cluster.launch", description=__doc__)
    parser.add_argument("verb", choices=["up", "down"])
    parser.add_argument("file", type=Path, help="cluster file, as for `ray up`")
    parser.add_argument("--within", type=float, default=900, metavar="SECONDS")
    asked = parser.parse_args()
    try:
        cluster = ClusterFile.read(asked.file)
        if asked.verb == "up":
            joined = up(cluster, within_s=asked.within)
            sys.stdout.write(f"{len(joined)} nodes joined: {' '.join(joined)}\n")
        else:
            sys.stderr.writelines(f"{line}\n" for line in down(cluster, within_s=asked.within))
    except ConfigError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
