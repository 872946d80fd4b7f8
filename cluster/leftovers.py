"""Ends and removes what one run of a fleet left behind, and nothing else.

Every process of a run carries the run's random name in its environment (`RUN_VARIABLE`): that,
not a process name or number, says whom it belongs to.
"""

import contextlib
import hashlib
import os
import shutil
import signal
import time
from pathlib import Path

from prefixfleet.store.errors import ConfigError

RUN_VARIABLE = "PREFIXFLEETRUN"
"""Not one of our settings (those start with PREFIXFLEET_): it names, and configures nothing."""
RUNTIME_PREFIX = "pf-"
"""Start of a runtime folder's name; short, for Unix sockets are made in it."""
SHARED_MEMORY = Path("/dev/shm")
_POLL_S = 0.05


def processes_of(run: str) -> list[int]:
    """Live processes of this user that belong to ``run``, without the caller itself."""
    mark = f"{RUN_VARIABLE}={run}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # it went, or it is somebody else's
            continue
    return found


def end_processes(run: str, grace_s: float) -> list[int]:
    """End every process of ``run``: politely, after ``grace_s`` by force. Who is left, if any."""
    for signal_number, until in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        deadline = time.monotonic() + until
        for pid in processes_of(run):
            _send(pid, signal_number)
        while (left := processes_of(run)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if not left:
            break
    return left


def remove_files(runtime_dir: Path) -> list[Path]:
    """Remove a run's runtime folder and its pools. What could not be removed, if anything."""
    if not runtime_dir.name.startswith(RUNTIME_PREFIX):  # never trust a file with an `rm -r`
        raise ConfigError(f"{runtime_dir}: not a runtime folder of ours, nothing removed")
    for pool in pools_of(runtime_dir):
        pool.unlink(missing_ok=True)
    shutil.rmtree(runtime_dir, ignore_errors=True)
    return [p for p in (runtime_dir, *pools_of(runtime_dir)) if p.exists()]


def pool_prefix(runtime_dir: Path) -> str:
    """First part of the names of the shared-memory pools that belong to a runtime folder."""
    digest = hashlib.blake2b(bytes(runtime_dir), digest_size=6).hexdigest()
    return f"prefixfleet-{digest}-"


def pools_of(runtime_dir: Path) -> list[Path]:
    """Shared-memory pools of a runtime folder."""
    return sorted(SHARED_MEMORY.glob(f"{pool_prefix(runtime_dir)}*"))


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
