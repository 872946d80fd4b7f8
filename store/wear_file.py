"""`WearFile`: what is left of a wear budget, across restarts of its node.

A restart must not give a disk a new hour's worth: a node in a loop of crashes would write without
a limit. A file that cannot be believed counts as a budget that is used up: it fills again within
the hour, so that the worst it costs is an hour of writes, and never more wear than was allowed.
"""

import logging
import os
import zlib
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

MAGIC = "prefixfleet wear 1"
MAX_BYTES = 200


class WearFile:
    """Read once, then owned by the one thread that writes to the disk.

    ``wall_clock`` is of a kind that goes on while the node is down. Set back, it gives no credit.
    """

    def __init__(self, path: Path, wall_clock: Callable[[], float]) -> None:
        self._path = path
        self._wall_clock = wall_clock

    def left_bytes(self, bytes_per_day: int) -> float | None:
        """Bytes that may be written by now; None where no budget was ever kept."""
        try:
            with self._path.open("rb") as file:
                left, at = _read(file.read(MAX_BYTES + 1))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.warning("%s: %s; the wear budget counts as used up", self._path, error)
            return 0.0
        return left + max(0.0, self._wall_clock() - at) * bytes_per_day / 86_400

    def write(self, left_bytes: float) -> None:
        """Replace what is known, whole or not at all. Raises `OSError`.

        Not synced: after a power cut it may be an old one or none to be believed.
        """
        new = self._path.with_suffix(".new")
        new.write_bytes(_record(left_bytes, self._wall_clock()))
        os.replace(new, self._path)


def _record(left_bytes: float, at: float) -> bytes:
    text = f"{MAGIC} {left_bytes:.0f} {at:.3f}".encode()
    return text + b" %08x\n" % zlib.crc32(text)


def _read(record: bytes) -> tuple[float, float]:
    """Bytes left, and when. Raises `ValueError`."""
    text, _, crc = record.rstrip(b"\n").rpartition(b" ")
    magic, *numbers = text.decode().rsplit(" ", 2)
    if magic != MAGIC or len(numbers) != 2 or crc != b"%08x" % zlib.crc32(text):
        raise ValueError(f"got {record[:60]!r}, expected {MAGIC!r}, two numbers and their checksum")
    return float(numbers[0]), float(numbers[1])
