"""The bytes of a node's pool: one file in shared memory that the daemon and its engines map.

Must not know blocks; it is a run of bytes with a name.
"""

import os
from pathlib import Path

from prefixfleet.store.errors import ConfigError
from prefixfleet.store.mapping import map_shared


class Segment:
    """A mapped file. Owned by the node daemon; engines map the same file by its path."""

    def __init__(self, path: Path, view: memoryview) -> None:
        self.path = path
        self.view = view

    @classmethod
    def create(cls, path: Path, size_bytes: int) -> "Segment":
        """Make the file, private to this user, with all its memory reserved now: a page that is
        missing later would end whoever touches it. Raises `ConfigError`."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
            return cls(path, map_shared(fd, size_bytes))
        except OSError as error:
            path.unlink()
            free = os.statvfs(path.parent)
            raise ConfigError(
                f"pool of {size_bytes} bytes: {path.parent} has "
                f"{free.f_bavail * free.f_frsize} bytes left ({error.strerror}); "
                "set PREFIXFLEET_NODE_POOL_BYTES lower, or give the host or container more "
                "shared memory"
            ) from error
        finally:
            os.close(fd)

    def close(self) -> None:
        """Remove the file. The bytes stay for whoever still maps or views them, and go after."""
        self.path.unlink(missing_ok=True)
