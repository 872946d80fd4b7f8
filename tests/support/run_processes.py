"""What the processes of one run were started as, and how to kill some: others come and go."""

import os
import signal
from contextlib import suppress
from pathlib import Path

from prefixfleet.cluster.leftovers import processes_of


def commands_of(run: str) -> dict[int, str]:
    """Command line of each live process of ``run``."""
    found = {}
    for pid in processes_of(run):
        with suppress(OSError):  # it ended meanwhile
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
            found[pid] = line.decode(errors="replace")
    return found


def kill_those_named(run: str, name: str) -> list[int]:
    """Kill what has ``name`` in its command line; whom it hit."""
    killed = []
    for pid, command in commands_of(run).items():
        if name in command:
            with suppress(ProcessLookupError):  # it was on a leash with one before
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
    return killed
