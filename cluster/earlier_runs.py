"""Clears away what earlier runs of fleets on this machine left when they were killed from outside.

A fleet whose supervisor lives, or whose lock somebody holds, is left alone.
"""

from pathlib import Path

from prefixfleet.cluster.leftovers import end_processes, remove_files
from prefixfleet.cluster.run_state import RunDir, StateHome, start_ticks
from prefixfleet.store.errors import ConfigError

GRACE_S = 5.0
DEMO = "demo-"
"""A demo's folder is named by this and its process: nobody brings it up again."""


def clear_run(directory: RunDir) -> bool:
    """End and remove what the latest run of that fleet left; whether there was one.

    Raises `ConfigError` if something could not be ended or removed.
    """
    state = directory.read()
    if state is None:
        return False
    left = end_processes(state.run, GRACE_S)
    files = remove_files(Path(state.runtime_dir)) if state.runtime_dir else []
    if left or files:
        raise ConfigError(f"could not end processes {left} or remove {files}")
    directory.forget()
    return True


def clear_demos(home: StateHome) -> list[str]:
    """Clear away demos whose process is gone; their names. Raises as `clear_run`."""
    cleared = []
    for folder in sorted(home.path.glob(f"{DEMO}*")):
        process = folder.name.removeprefix(DEMO)
        if not process.isdecimal() or start_ticks(int(process)):
            continue
        directory = home.fleet(folder.name)
        try:
            directory.lock()
        except ConfigError:  # somebody else clears it away
            continue
        try:
            clear_run(directory)
            directory.remove()
        finally:
            directory.unlock()
        cleared.append(folder.name)
    return cleared
