"""Time in a simulation: it stands still but for going from one thing that happens to the next."""

import heapq
import itertools
from collections.abc import Callable


class SimulatedTime:
    """A clock, and what happens when. Owned by its simulation, which alone sets ``now``."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def __call__(self) -> float:
        """Seconds since the start."""
        return self.now

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Have this happen; of what happens at the same moment, what was asked for first."""
        heapq.heappush(self._events, (when, next(self._order), action))

    def advance(self, until: float) -> None:
        """Let everything happen that is due by then, and what follows from it by then. It is
        the time of the last of it afterwards."""
        while self._events and self._events[0][0] <= until:
            self.now, _, action = heapq.heappop(self._events)
            action()
