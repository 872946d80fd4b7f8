"""Runs a command that must not outlive whoever started it: ``leash PARENT_PID COMMAND...``.

The kernel sends the command a SIGTERM when the parent's starting thread ends, however it ends;
an engine shuts its own children down on that. Standard library only: it starts in 20 ms.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def leashed(command: list[str]) -> list[str]:
    """``command``, on a leash of this process."""
    return [sys.executable, "-m", "prefixfleet.cluster.leash", str(os.getpid()), *command]


def main() -> None:
    """Replace this process by the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it went before the leash was on
        sys.exit(f"leash: process {parent} is gone, {command[0]} not started")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
