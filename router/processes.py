"""Several router processes on one port: the kernel spreads connections over them.

The parent holds the port, starts the processes, replaces those that end, and passes a signal to
stop on. It serves nothing itself, so that it has nothing to fail at.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from prefixfleet.router.settings import RouterSettings
from prefixfleet.store.errors import ConfigError

QUICK_S = 5.0  # who ends sooner has not started
MAX_QUICK_ENDS = 5  # in a row, over all processes
STOP_S = 20.0  # longer than a router drains
LOOK_S = 0.2
WRONG_SETTING = 2  # exit status; no use starting it again

Child = subprocess.Popen[bytes]


def run_processes(count: int, settings: RouterSettings, environ: Mapping[str, str]) -> int:
    """Run ``count`` routers until a signal to stop. The exit status.

    Raises:
        ConfigError: the port cannot be used.
    """
    with _held_port(settings) as held, tempfile.TemporaryDirectory(prefix="pf-router-") as folder:
        port = held.getsockname()[1]
        child_environ = {**environ, "PREFIXFLEET_ROUTER_PORT": str(port)}
        stopping: list[int] = []

        def stop(number: int, _frame: FrameType | None) -> None:
            stopping.append(number)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        children = {slot: _start(slot, folder, child_environ) for slot in range(count)}

        def reload(number: int, _frame: FrameType | None) -> None:
            for child, _ in children.values():
                child.send_signal(number)

        signal.signal(signal.SIGHUP, reload)
        scheme = "https" if settings.tls_cert_file else "http"
        print(f"prefixfleet router on {scheme}://{settings.host}:{port}", flush=True)  # noqa: T201
        try:
            return _supervise(children, folder, child_environ, stopping)
        finally:
            _stop([child for child, _ in children.values()])


def _held_port(settings: RouterSettings) -> socket.socket:
    """A socket that keeps the port for the processes; it never listens."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    held = socket.socket(family)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        held.bind((settings.host, settings.port))
    except OSError as error:
        held.close()
        raise ConfigError(
            f"PREFIXFLEET_ROUTER_HOST and _PORT: {settings.host}:{settings.port}: {error}"
        ) from error
    return held


def _start(slot: int, folder: str, environ: Mapping[str, str]) -> tuple[Child, float]:
    socket_path = Path(folder, f"{slot}.sock")
    socket_path.unlink(missing_ok=True)  # of the process before this one
    command = [sys.executable, "-m", "prefixfleet.router", "--parent", str(os.getpid())]
    command += ["--sibling-socket", str(socket_path)]
    # a terminal's signal goes to us alone, and from us to each
    child = subprocess.Popen(
        command, env=dict(environ), stdout=subprocess.DEVNULL, start_new_session=True
    )
    return child, time.monotonic()


def _supervise(
    children: dict[int, tuple[Child, float]],
    folder: str,
    environ: Mapping[str, str],
    stopping: list[int],
) -> int:
    quick_ends = 0
    while not stopping:
        time.sleep(LOOK_S)
        for slot, (child, started_s) in list(children.items()):
            status = child.poll()
            if status is None:
                continue
            if status == WRONG_SETTING:
                return WRONG_SETTING
            age_s = time.monotonic() - started_s
            quick_ends = quick_ends + 1 if age_s < QUICK_S else 0
            _say(f"process {slot} ended with {status} after {age_s:.0f} s")
            if quick_ends >= MAX_QUICK_ENDS:
                _say(f"{quick_ends} processes in a row ended at their start: giving up")
                return 1
            children[slot] = _start(slot, folder, environ)
    return 0


def _stop(running: Sequence[Child]) -> None:
    for child in running:
        if child.poll() is None:
            child.terminate()
    deadline = time.monotonic() + STOP_S
    for child in running:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _say(text: str) -> None:
    print(f"prefixfleet-router: {text}", file=sys.stderr, flush=True)  # noqa: T201
