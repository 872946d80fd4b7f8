"""`Guard`: whether a learned order may rank, or has fallen behind plain LRU.

Pure counting: what the pool served against what LRU would have served from as many blocks, which
`UseHistory` knows without a second pool. The shortfall is a CUSUM: what was gained earlier does
not buy the right to lose now.
"""

PATIENCE = 128
"""Average requests' worth of LRU hits that the order may be behind."""
FIRST_PAUSE = 512
LONGEST_PAUSE = 1 << 15
"""In requests. Doubles from trip to trip, and halves after as many requests without one."""
_MEMORY = 1 / 512


class Guard:
    """Owned by one order."""

    def __init__(self) -> None:
        self.trips = 0
        self._behind = 0.0
        self._mean_hits = 1.0
        self._pause = FIRST_PAUSE
        self._resumes_in = 0
        self._calm = 0

    @property
    def trusts(self) -> bool:
        """Whether the order may rank by what it learned."""
        return self._resumes_in == 0

    def follow(self, ours: int, lru: int) -> None:
        """One request found ``ours`` leading blocks; under LRU it would have found ``lru``."""
        self._mean_hits += (lru - self._mean_hits) * _MEMORY
        if self._resumes_in:
            self._resumes_in -= 1
            return
        self._behind = max(0.0, self._behind + lru - ours)
        self._calm += 1
        if self._behind > PATIENCE * max(1.0, self._mean_hits):
            self._trip()
        elif self._calm >= 8 * self._pause and self._pause > FIRST_PAUSE:
            self._pause //= 2
            self._calm = 0

    def _trip(self) -> None:
        self.trips += 1
        self._behind, self._calm = 0.0, 0
        self._resumes_in = self._pause
        self._pause = min(LONGEST_PAUSE, 2 * self._pause)
