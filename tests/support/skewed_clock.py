"""A wall clock that another process may set forward and back, as an operator or NTP does.

The clock is the one of `time.time`; a monotonic clock cannot be set. Call `install` before anything
is imported that keeps a reference to it.
"""

import mmap
import struct
import time
from pathlib import Path

_SECONDS = struct.Struct("<d")


def install(path: Path) -> None:
    """From now on `time.time` is off by the seconds in ``path``, which is made if need be."""
    if not path.exists():
        set_skew(path, 0.0)
    with path.open("r+b") as file:
        skew = mmap.mmap(file.fileno(), _SECONDS.size)
    true_time, true_time_ns = time.time, time.time_ns

    def skewed() -> float:
        return true_time() + float(_SECONDS.unpack_from(skew)[0])

    def skewed_ns() -> int:
        return true_time_ns() + int(_SECONDS.unpack_from(skew)[0] * 1e9)

    time.time, time.time_ns = skewed, skewed_ns


def set_skew(path: Path, seconds: float) -> None:
    """Set the clock of whoever has ``path``."""
    with path.open("r+b" if path.exists() else "w+b") as file:
        file.write(_SECONDS.pack(seconds))
