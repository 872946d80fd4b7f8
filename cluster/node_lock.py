"""One daemon a node name: a lock file in the runtime folder."""

import contextlib
import fcntl
import os
from collections.abc import Iterator

from prefixfleet.cluster.leftovers import SHARED_MEMORY, pool_prefix
from prefixfleet.cluster.settings import NodeSettings
from prefixfleet.store.errors import ConfigError


@contextlib.contextmanager
def only_daemon(settings: NodeSettings) -> Iterator[None]:
    """Hold the node's name in its folder, and remove what a dead daemon of that name left.

    The lock file stays: to remove it would let two daemons hold two files of one name.
    """
    try:
        settings.runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = settings.runtime_dir / f"{settings.name}.lock"
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"node {settings.name}: {error}; set PREFIXFLEET_NODE_RUNTIME_DIR to a folder that "
            "can be written"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (SHARED_MEMORY / f"{pool_prefix(settings.runtime_dir)}{settings.name}").unlink(True)
        yield
    except BlockingIOError as error:
        raise ConfigError(
            f"a daemon of node {settings.name!r} already runs in {settings.runtime_dir}; "
            "set PREFIXFLEET_NODE_NAME so that every daemon has its own"
        ) from error
    finally:
        os.close(fd)
