"""Runs a command that must not outlive whoever started it: ``leash PARENT_PID COMMAND...``.

The command leads a process group, and keeps this process's number. The kernel sends it a SIGTERM
when the parent's starting thread ends, however it ends. A watcher in the same group kills what is
left of the group once the command has ended, or `GRACE_S` after the parent: an engine's own
children may neither get that signal nor heed it. Standard library only: it starts in 20 ms.
"""

import ctypes
import os
import select
import signal
import sys

_PR_SET_PDEATHSIG = 1
GRACE_S = 30.0
"""For the command to end in order when its parent is gone."""
_DEAF_TO = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def leashed(command: list[str], grace_s: float = GRACE_S) -> list[str]:
    """``command``, on a leash of this process."""
    here = [sys.executable, "-m", "prefixfleet.cluster.leash", str(os.getpid())]
    return [*here, f"{grace_s:g}", *command]


def main() -> None:
    """Replace this process by the command, and leave a watcher behind."""
    parent, grace_s, command = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it went before the leash was on
        sys.exit(f"leash: process {parent} is gone, {command[0]} not started")
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    _leave_watcher(os.pidfd_open(parent), os.pidfd_open(os.getpid()), grace_s)
    os.execvp(command[0], command)


def _leave_watcher(parent_fd: int, command_fd: int, grace_s: float) -> None:
    """Fork twice, so that the command has no child that it does not know."""
    if between := os.fork():
        os.waitpid(between, 0)
        return
    if os.fork() == 0:
        _watch(parent_fd, command_fd, grace_s)
    os._exit(0)


def _watch(parent_fd: int, command_fd: int, grace_s: float) -> None:
    """Being in the group, it keeps the group's number from being given to another one."""
    for number in _DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):  # whoever reads what the command prints must not wait for us
        os.dup2(nowhere, fd)
    either = select.poll()
    for fd in (parent_fd, command_fd):
        either.register(fd, select.POLLIN)
    ended = {fd for fd, _ in either.poll()}
    if command_fd not in ended:
        either.unregister(parent_fd)
        either.poll(grace_s * 1000)
    os.killpg(0, signal.SIGKILL)  # this process too


if __name__ == "__main__":
    main()
