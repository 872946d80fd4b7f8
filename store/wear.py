"""`WearBudget`: how many bytes a disk may still take, spread over the day. No I/O."""

import math
from collections.abc import Callable

DAY_S = 86_400.0
SHOWN_S = 60.0
"""A budget that refused something counts as used up for so long, however little it got since."""


class WearBudget:
    """Bytes that may be written a day, as a bucket that fills evenly and holds one hour's worth,
    or ``least_bytes`` if that is more: what is smaller than one write would allow none, ever.

    Owned by who opened the disk, for all namespaces. ``bytes_per_day`` None is no limit. It starts
    with ``left_bytes``, those that an earlier life left; full if that is None.
    """

    def __init__(
        self,
        bytes_per_day: int | None,
        clock: Callable[[], float],
        *,
        least_bytes: int = 0,
        left_bytes: float | None = None,
    ) -> None:
        self._rate = math.inf if bytes_per_day is None else bytes_per_day / DAY_S
        self._clock = clock
        self._full = max(self._rate * 3600, least_bytes)
        self._left = self._full if left_bytes is None else min(left_bytes, self._full)
        self._at = clock()
        self._refused_at = -math.inf

    @property
    def left(self) -> float:
        """Part of what it holds when it is full, 0 to 1."""
        return self.left_bytes / self._full if math.isfinite(self._full) else 1.0

    @property
    def left_bytes(self) -> float:
        """Bytes that may be written now; infinite without a limit."""
        if math.isfinite(self._full):
            now = self._clock()
            self._left = min(self._full, self._left + (now - self._at) * self._rate)
            self._at = now
        return self._left

    @property
    def used_up(self) -> bool:
        """Whether something was refused a short while ago."""
        return self._clock() - self._refused_at < SHOWN_S

    def hold_at_least(self, size: int) -> None:
        """One write of ``size`` bytes must be possible when it is full."""
        self._full = max(self._full, size)

    def affords(self, size: int, count: int) -> int:
        """How many of ``count`` writes of ``size`` bytes may be made now; others are refused."""
        left = self.left_bytes
        if left >= size * count:
            return count
        self._refused_at = self._clock()
        return int(left // size)

    def take(self, size: int) -> bool:
        """Whether ``size`` bytes may be written now; they are counted if so."""
        if not self.affords(size, 1):
            return False
        self._left -= size
        return True
