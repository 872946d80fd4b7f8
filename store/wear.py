"""`WearBudget`: how many bytes a disk may still take, spread over the day."""

from collections.abc import Callable

DAY_S = 86_400.0


class WearBudget:
    """Bytes that may be written a day, as a bucket that fills evenly and holds one hour's worth.

    Owned by its tier. ``None`` is no limit.
    """

    def __init__(self, bytes_per_day: int | None, clock: Callable[[], float]) -> None:
        self._rate = None if bytes_per_day is None else bytes_per_day / DAY_S
        self._clock = clock
        self._left = self._full = 0.0 if self._rate is None else self._rate * 3600
        self._at = clock()

    @property
    def left(self) -> float:
        """Part of the hour's worth that is left, 0 to 1."""
        if self._rate is None:
            return 1.0
        self._fill(self._rate)
        return self._left / self._full

    def take(self, size: int) -> bool:
        """Whether ``size`` bytes may be written now; they are counted if so."""
        if self._rate is None:
            return True
        self._fill(self._rate)
        if size > self._left:
            return False
        self._left -= size
        return True

    def _fill(self, rate: float) -> None:
        now = self._clock()
        self._left = min(self._full, self._left + (now - self._at) * rate)
        self._at = now
