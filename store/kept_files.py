"""`KeptFiles`: what a namespace left on disk of which no engine has come since.

Nothing is known of them but name, size and age. They count in the cap and go as any others do; when
an engine comes they are recovered as a tier's own.
"""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prefixfleet.store.disk_threads import DiskThreads
from prefixfleet.store.slot_files import BUCKET_GLOB

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, order=True)
class KeptFile:
    """A file that was written at ``written_s``, a wall clock's time."""

    written_s: float
    path: Path
    size: int


def files_in(folder: Path) -> list[KeptFile]:
    """The bucket files in ``folder``, the oldest first. Raises `OSError`."""
    found = []
    for path in folder.glob(BUCKET_GLOB):
        told = path.stat()
        found.append(KeptFile(told.st_mtime, path, told.st_size))
    return sorted(found)


class KeptFiles:
    """Owned by the `DiskSpace` that it is a holder of. Their blocks count as used when it was
    made, as those of a tier do when they are recovered."""

    def __init__(
        self, files: list[KeptFile], threads: DiskThreads, clock: Callable[[], float]
    ) -> None:
        self._files = files
        self._threads = threads
        self._clock = clock
        self._since_s = clock()

    @property
    def open(self) -> bool:
        """See `Holder`."""
        return False

    @property
    def files(self) -> int:
        """See `Holder`."""
        return len(self._files)

    @property
    def held_bytes(self) -> int:
        """See `Holder`."""
        return sum(file.size for file in self._files)

    def idle_s(self) -> float:
        """See `Holder`."""
        return self._clock() - self._since_s

    async def give(self) -> bool:
        """See `Holder`; the file that was written longest ago, and after the last their folder."""
        delete = _delete if len(self._files) > 1 else _delete_last
        try:
            await self._threads.in_order(delete, self._files[0].path)
        except OSError as error:
            log.warning("ssd tier: %s", error)
            return False
        del self._files[0]
        return True


def _delete(path: Path) -> None:
    path.unlink(missing_ok=True)


def _delete_last(path: Path) -> None:
    _delete(path)
    with contextlib.suppress(OSError):  # something else lies in it
        path.parent.rmdir()
