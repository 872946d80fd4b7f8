"""Workers that left the fleet: when what was learned of one may go. The clock is an argument."""

from collections.abc import Callable, Collection, Sequence

GONE_S = 600.0
"""Who is back sooner was restarted, and is as fast as before; later it is gone for good."""


class Departed:
    """Owned by the router's event loop. ``forget`` are told the name of who is gone for good."""

    def __init__(
        self, clock: Callable[[], float], forget: Sequence[Callable[[str], object]]
    ) -> None:
        self._clock = clock
        self._forget = forget
        self._present: Collection[str] = frozenset()
        self._left_s: dict[str, float] = {}

    def look(self, present: Collection[str]) -> None:
        """These are in the fleet now. Call it again and again."""
        now = self._clock()
        self._left_s |= {name: now for name in self._present if name not in present}
        self._present = present
        for name, left_s in list(self._left_s.items()):
            if name in present:
                del self._left_s[name]
            elif now - left_s >= GONE_S:
                del self._left_s[name]
                for forget in self._forget:
                    forget(name)
