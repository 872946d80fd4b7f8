"""What `transfer.py` compares with that is not ours: sockets, ucx_perftest, Mooncake, NIXL.

Each has ``pull(size)``, the seconds of one pull of that size, or raises `Absent` when it is made.
"""

import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from prefixfleet.transfer.ucx_binding import OURS
from tests.bench.transfer_peers import MIB, SIZES

PEERS = Path(__file__).with_name("transfer_peers.py")
START_S = 60
PERFTEST_S = 30
UCX_TCP = {"UCX_TLS": "tcp", **{f"UCX_{name}": value for name, value in OURS.items()}}
"""The same tuning for everybody who speaks UCX over TCP."""


class Absent(Exception):
    """The rival cannot run here; says why."""


class RawSocket:
    """Blocking calls, one a block, into the block's place; nothing is checked."""

    def __init__(self, port):
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def pull(self, size, segment):
        block, count = SIZES[size]
        started = time.perf_counter()
        self._sock.sendall(size.ljust(16).encode())
        for i in range(count):
            got = self._sock.recv_into(segment[i * block : (i + 1) * block], 0, socket.MSG_WAITALL)
            assert got == block
        return time.perf_counter() - started

    def close(self):
        self._sock.close()


_TAGS = ["-t", "tag_bw", "-s", str(MIB), "-n", "256", "-w", "16"]
_TAGS_64 = ["-t", "tag_bw", "-s", str(64 * MIB), "-n", "8", "-w", "1"]
SAME_TERMS = "tag_bw of 64 MiB, error handling"
PERFTESTS = {
    "tag_bw": _TAGS,
    "tag_bw, error handling": [*_TAGS, "-e"],
    "ucp_get": ["-t", "ucp_get", "-s", str(MIB), "-n", "128", "-w", "16"],
    "tag_bw of 64 MiB": _TAGS_64,
    SAME_TERMS: [*_TAGS_64, "-e"],
}


class Perftest:
    """UCX's own benchmark in C: one buffer, polling on both sides, nothing checked.

    A buffer of 1 MiB stays in the cache; one of 64 MiB does not, as blocks do not. Without error
    handling, which is always on with us, UCX may choose other protocols, and hang when a peer dies.
    """

    def __init__(self):
        self._command, self._libraries = _find_perftest()
        self._port = 13400

    def gb_per_s(self, test):
        """Of one of `PERFTESTS`."""
        self._port += 1
        base = [self._command, "-p", str(self._port)]
        env = {**os.environ, **UCX_TCP, "LD_LIBRARY_PATH": self._libraries}
        quiet = {"env": env, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        server = subprocess.Popen(base, **quiet)
        try:
            asked = [*base, "127.0.0.1", *PERFTESTS[test]]
            for _ in range(50):  # the server may not listen yet
                done = subprocess.run(asked, timeout=PERFTEST_S, **quiet)
                if done.returncode == 0:
                    break
                time.sleep(0.1)
            # Final: iterations, typical/average/overall overhead, average/overall MB/s, ...
            final = re.search(r"Final:\s+(.*)", done.stdout)
            if done.returncode or final is None:
                raise Absent(f"ucx_perftest {test}: {done.stdout.strip()[-200:]}")
            return float(final[1].split()[5]) * MIB / 1e9
        finally:
            server.kill()
            server.communicate()

    def close(self):
        pass


def _find_perftest():
    if on_path := shutil.which("ucx_perftest"):
        return on_path, os.environ.get("LD_LIBRARY_PATH", "")
    wheel = importlib.util.find_spec("libucx")
    if wheel is None or wheel.origin is None:
        raise Absent("no ucx_perftest on PATH and no libucx wheel that brings one")
    folder = Path(wheel.origin).parent
    if not (folder / "bin/ucx_perftest").exists():
        raise Absent(f"the libucx wheel at {folder} brings no ucx_perftest")
    return str(folder / "bin/ucx_perftest"), str(folder / "lib")


class Peer:
    """Another transfer engine, in two processes of its own that sleep unless it is their turn.

    It reads the same blocks into scattered places in one batch call; it checks nothing.
    """

    def __init__(self, engine):
        self._ends = []
        try:
            source, told = self._start(engine, "source")
            self._target, _ = self._start(engine, "target", json.dumps(told))
        except Absent:
            self.close()
            raise
        self._source = source
        self._freeze()

    def pull(self, size):
        self._send(signal.SIGCONT)
        try:
            return self._ask(self._target, size)
        finally:
            self._freeze()

    def close(self):
        self._send(signal.SIGCONT)
        for end in self._ends:
            end.kill()
            end.communicate()

    def _start(self, *arguments):
        end = subprocess.Popen(
            [sys.executable, str(PEERS), *arguments],
            env={**os.environ, **UCX_TCP},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._ends.append(end)
        line = _answer(end)
        if "absent" in line:
            raise Absent(line["absent"])
        return end, line

    def _ask(self, end, line):
        end.stdin.write(line + "\n")
        end.stdin.flush()
        answer = _answer(end)
        if "absent" in answer:
            raise Absent(answer["absent"])
        return answer["seconds"]

    def _freeze(self):
        self._send(signal.SIGSTOP)

    def _send(self, number):
        for end in self._ends:
            if end.poll() is None:
                end.send_signal(number)


def _answer(end):
    """The next JSON object it prints; engines print other things too."""
    while line := end.stdout.readline():
        if line.startswith('{"'):
            return json.loads(line)
    end.wait(START_S)
    error = end.stderr.read().strip().rpartition("\n")[2]
    return {"absent": f"ended with {end.returncode}: {error[-300:]}"}
