"""A lock file: at most one living process of this machine has what lies beside it."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from prefixfleet.cluster.leftovers import SHARED_MEMORY, pool_prefix
from prefixfleet.cluster.settings import NodeSettings
from prefixfleet.store.errors import ConfigError


@contextlib.contextmanager
def locked(path: Path, *, unwritable: str, taken: str) -> Iterator[None]:
    """Hold the lock ``path``; its folder is made, private, if it is not there.

    The file stays: to remove it would let two processes hold two files of one name.

    Raises:
        ConfigError: the folder cannot be made or written (the reason and ``unwritable``), or
            another process holds the lock (``taken``).
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{error}; {unwritable}") from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(taken) from error
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def only_daemon(settings: NodeSettings) -> Iterator[None]:
    """Hold a node's name in its folder, and remove what a dead daemon of that name left.

    Raises `ConfigError`: see `locked`."""
    folder, name = settings.runtime_dir, settings.name
    with locked(
        folder / f"{name}.lock",
        unwritable="set PREFIXFLEET_NODE_RUNTIME_DIR to a folder that can be written",
        taken=f"a daemon of node {name!r} already runs in {folder}; set PREFIXFLEET_NODE_NAME so "
        "that every daemon has its own",
    ):
        (SHARED_MEMORY / f"{pool_prefix(folder)}{name}").unlink(missing_ok=True)
        yield
