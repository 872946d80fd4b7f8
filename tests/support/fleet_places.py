"""Where `tests/bench/fleet.py` runs a fleet of fast engines: on namespace hosts by `ray up`, or on
this machine by `prefixfleet up`. Both are the real thing but for the engines (`fast_vllm`).
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

import netns
import psutil
from chats import write_model
from fleet_journal import Journal
from host_fleet import CLUSTER_FILE, FAST, LAUNCH, ask, logs
from redis_groups import UnderSentinel
from run_processes import commands_of

from prefixfleet.cluster.leftovers import processes_of
from prefixfleet.cluster.run_state import RunState, StateHome

LOAD = Path(__file__).with_name("fleet_load.py")
UP_S, FIRST_S, UPDATE_S = 600, 300, 900
SETTING = "PREFIXFLEET_WORKER_MAX_MODEL_TOKENS=3072"
ENGINE = r"^[^ ]*python[^ ]* -m vllm[.]entrypoints"
FIND_DAEMON = """
inode=$(awk '$8 ~ "/prefixfleet/run/" && $4 == "00010000" {print $7; exit}' /proc/net/unix)
for fd in /proc/[0-9]*/fd/*; do
  test "$(readlink "$fd")" = "socket:[$inode]" && echo "$fd" | cut -d/ -f3 && exit
done"""


class Hosts:
    """A head and workers as namespace hosts; an engine each worker. Owned by its caller."""

    parts = ("killed_engine", "killed_daemon", "cut_host", "update")

    def __init__(self, network: netns.Network) -> None:
        self._network = network
        self._operator = network["operator"]
        self.workers = {host.name: f"{host.name}-0" for host in network.hosts[2:]}
        self.journal = Journal(self._operator.folder / "root/load.jsonl")

    def up(self) -> dict[str, float]:
        """`ray up`, and the seconds until there was an answer."""
        began = time.monotonic()
        command = [*LAUNCH, "up", CLUSTER_FILE, "--within", str(UP_S)]
        self._operator.run(*command, timeout_s=UP_S + 10)
        joined = time.monotonic()
        body = {"model": "small", "prompt": "Hello", "max_tokens": 1}

        def answers() -> bool:
            return ask(self._operator, "/v1/completions", body, timeout_s=10).status == 200

        netns.wait_until(answers, within_s=FIRST_S, what="an answer")
        return {"hosts_joined_s": joined - began, "first_answer_s": time.monotonic() - began}

    def clients(self, rate: float) -> "subprocess.Popen[bytes]":
        """Clients that ask all the time, as a process."""
        url = f"http://{self._network['head'].address}:8000"
        arguments = (url, "/root/load.jsonl", str(rate), "1")
        return self._operator.start(sys.executable, LOAD, *arguments, log="load.log")

    def do(self, fault: str, node: str) -> None:
        """Kill the node's engine or daemon, or pull its cable."""
        host = self._network[node]
        if fault == "cut_host":
            self._network.cut(host)
            return
        find = f"pgrep -f '{ENGINE}'" if fault == "killed_engine" else FIND_DAEMON
        pid = host.run("bash", "-c", find).stdout.strip()
        assert pid, f"{node}: nothing to kill"
        host.run("kill", "-9", pid)

    def undo(self, node: str) -> None:
        """Put the cable back."""
        self._network.heal(self._network[node])

    def update(self) -> None:
        """Another setting for every engine; returns when all have it."""
        script = f"prefixfleet update --set {SETTING} --wait {UPDATE_S}"
        self._network["head"].run("bash", "-ic", script, timeout_s=UPDATE_S + 30)

    def down(self) -> None:
        """`ray down`, the workers' Ray stopped too."""
        self._operator.run(*LAUNCH, "down", CLUSTER_FILE, "--within", "240", timeout_s=600)

    def logs(self) -> str:
        """The ends of all logs."""
        return logs(self._network)


class Local:
    """Nodes on this machine, under a Ray of their own, their Redis under Sentinel. Owned by its
    caller."""

    parts = ("killed_engine", "killed_daemon", "frozen_node", "killed_redis", "update")

    def __init__(self, folder: Path, model: Path, nodes: int, redis: UnderSentinel) -> None:
        self._folder = folder
        self._redis = redis
        self._fleet = f"bench-{uuid.uuid4().hex[:8]}"
        self._model = model
        self._frozen: list[int] = []
        self.workers = {f"node-{i}": f"engine-{i}" for i in range(nodes)}
        self.journal = Journal(folder / "load.jsonl")
        self._environ = os.environ | {
            "XDG_STATE_HOME": str(folder),
            "PREFIXFLEET_FLEET": self._fleet,
            "PREFIXFLEET_REDIS_URL": redis.url,
            "PREFIXFLEET_WORKER_SERVED_NAME": "small",
            "PREFIXFLEET_NODE_POOL_BYTES": str(64 << 20),
            "PYTHONPATH": str(FAST),
        }

    def up(self) -> dict[str, float]:
        """`prefixfleet up`, and the seconds until there was an answer."""
        began = time.monotonic()
        nodes = str(len(self.workers))
        self._prefixfleet(
            "up", "--nodes", nodes, "--port", "0", "--model", str(self._model), "--detach"
        )
        return {"serves_s": time.monotonic() - began}

    def clients(self, rate: float) -> "subprocess.Popen[bytes]":
        """Clients that ask all the time, as a process."""
        arguments = [self._state().endpoint, self._folder / "load.jsonl", rate, 1]
        return subprocess.Popen([sys.executable, LOAD, *map(str, arguments)])

    def do(self, fault: str, node: str) -> None:
        """Kill the node's engine or daemon, or freeze both with the worker: as a host that is cut
        off, it answers nobody and refuses nobody."""
        (engine,), (daemon,) = self._engines(f'"{self.workers[node]}"'), self._daemons(node)
        if fault == "frozen_node":
            worker = psutil.Process(engine).ppid()
            self._frozen = [worker, engine, daemon]
            for pid in self._frozen:
                os.kill(pid, signal.SIGSTOP)
        else:
            os.kill(engine if fault == "killed_engine" else daemon, signal.SIGKILL)

    def undo(self, node: str) -> None:
        """Let what is frozen go on."""
        while self._frozen:
            os.kill(self._frozen.pop(), signal.SIGCONT)

    def kill_redis(self) -> None:
        """Kill the primary; Sentinel makes another one."""
        self._redis.primary.kill()

    def update(self) -> None:
        """Another setting for every engine; returns when all have it."""
        self._prefixfleet("update", "--set", SETTING, "--wait", str(UPDATE_S))

    def down(self) -> None:
        """`prefixfleet down`."""
        self._prefixfleet("down")

    def logs(self) -> str:
        """The ends of all logs."""
        files = (self._folder / "prefixfleet" / self._fleet / "logs").glob("*")
        return "\n".join(f"== {f.name}\n{f.read_text(errors='replace')[-1500:]}" for f in files)

    def _state(self) -> RunState:
        state = StateHome(self._folder / "prefixfleet").fleet(self._fleet).read()
        assert state is not None
        return state

    def _engines(self, named: str) -> list[int]:
        texts = commands_of(self._state().run)
        return [p for p, text in texts.items() if re.match(ENGINE, text) and named in text]

    def _daemons(self, node: str) -> list[int]:
        """Who listens on the node's socket."""
        path = f"{self._state().runtime_dir}/{node}.sock"
        table = Path("/proc/net/unix").read_text().splitlines()
        inodes = {x[6] for x in map(str.split, table) if x[-1] == path and x[3] == "00010000"}
        links = {f"socket:[{inode}]" for inode in inodes}
        return [p for p in processes_of(self._state().run) if links & _opened(p)]

    def _prefixfleet(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "prefixfleet.cluster", *arguments]
        done = subprocess.run(
            command, env=self._environ, capture_output=True, text=True, timeout=UPDATE_S + 60
        )
        assert done.returncode == 0, f"{arguments}: {done.stderr}\n{self.logs()}"


def _opened(pid: int) -> set[str]:
    found = set()
    with suppress(OSError):  # it ended meanwhile
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                found.add(os.readlink(fd))
    return found


def small_model(folder: Path) -> Path:
    """Files of a model as far as routers and fast engines read them."""
    written = write_model(folder)
    (written / "config.json").write_text(json.dumps({}))
    return written
