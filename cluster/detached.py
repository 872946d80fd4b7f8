"""``up --detach``: a fleet whose supervisor runs on in a session of its own."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from prefixfleet.cluster.run_state import RunDir, RunState
from prefixfleet.cluster.settings import MAX_START_S
from prefixfleet.store.errors import ConfigError

START_S = MAX_START_S + 60.0  # the supervisor knows itself how long its engines may
END_S = 90.0
LOOK_S = 0.1


def start_detached(
    directory: RunDir, arguments: Sequence[str], environ: Mapping[str, str]
) -> RunState:
    """Run ``up`` with these arguments and this besides our environment, and wait until it serves.

    Raises:
        ConfigError: it failed; says why, and where its log is.
    """
    log_file = directory.logs / "up.log"
    with log_file.open("ab") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "prefixfleet.cluster", "up", *arguments],
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    state = _until_settled(directory, child)
    if state is None or state.phase != "ready":
        child.terminate()
        child.wait(END_S)
        why = (state.error if state else "") or "it ended before it could say why"
        raise ConfigError(f"the fleet did not start: {why}; see {log_file}")
    return state


def _until_settled(directory: RunDir, child: "subprocess.Popen[bytes]") -> RunState | None:
    deadline = time.monotonic() + START_S
    while child.poll() is None and time.monotonic() < deadline:
        state = directory.read()
        if state and state.phase != "starting":
            return state
        time.sleep(LOOK_S)
    return directory.read()
