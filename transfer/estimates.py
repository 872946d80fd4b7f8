"""Learned speed of each (peer, link), in the direction from the peer to us: what a pull will take.

Bandwidth and set-up time are separated by what a pull itself observes: the time until its lease
was granted is set-up, the rest is transfer. Pure; the clock is an argument.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

WEIGHT = 0.25
"""Of the newest observation in the moving average."""
OUTLIER = 8.0
"""An observation counts at most so many times, and at least one such part of, what is known."""
PROMISE_S = 60.0
"""A source's queue is forgotten after so long: no read lease lasts longer."""
MIN_BYTES = 256 * 1024
"""Smaller pulls say nothing about bandwidth."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Moving averages over the pulls from one peer over one link.

    ``queued_bytes`` are those that the source had promised to others when it was asked last.
    """

    bytes_per_s: float = 0.0  # 0: not known yet
    setup_s: float = 0.0
    queued_bytes: int = 0
    pulls: int = 0

    def seconds(self, size_bytes: int) -> float:
        """What a pull of so many bytes will take; infinite while the bandwidth is unknown."""
        if self.bytes_per_s <= 0:
            return math.inf
        return self.setup_s + size_bytes / self.bytes_per_s

    def after(
        self, *, size_bytes: int, transfer_s: float, setup_s: float, queued_bytes: int
    ) -> "Speed":
        """The averages with one more pull, which brought ``size_bytes``."""
        rate = self.bytes_per_s
        if size_bytes >= MIN_BYTES and transfer_s > 0:
            rate = _blend(rate, size_bytes / transfer_s)
        return Speed(rate, _blend(self.setup_s, setup_s), queued_bytes, self.pulls + 1)

    def aged(self, age_s: float) -> "Speed":
        """The same ``age_s`` seconds later: the queue was sent at this link's pace meanwhile."""
        left = self.queued_bytes - int(age_s * self.bytes_per_s) if age_s < PROMISE_S else 0
        return replace(self, queued_bytes=max(0, left))


def _blend(known: float, seen: float) -> float:
    if known <= 0:
        return seen
    bounded = min(max(seen, known / OUTLIER), known * OUTLIER)
    return known + WEIGHT * (bounded - known)


class Estimates:
    """Speeds by (peer, link), of at most ``max_entries`` pairs, the longest unused dropped.

    Owned by the daemon's event loop.
    """

    def __init__(self, clock: Callable[[], float], max_entries: int = 4096) -> None:
        self._clock = clock
        self._max_entries = max_entries
        self._speeds: dict[tuple[str, str], tuple[Speed, float]] = {}  # with when it was seen

    def speed(self, peer: str, link: str) -> Speed:
        """What is known; all zero for a pair that was never used."""
        return self._speeds.get((peer, link), (Speed(), 0.0))[0]

    def age_s(self, peer: str, link: str) -> float:
        """Seconds since the pair was last observed; infinite for one that never was."""
        seen = self._speeds.get((peer, link))
        return math.inf if seen is None else self._clock() - seen[1]

    def observe(
        self,
        peer: str,
        link: str,
        *,
        size_bytes: int,
        transfer_s: float,
        setup_s: float,
        queued_bytes: int = 0,
    ) -> None:
        """One read that brought all it was asked for."""
        known, _ = self._speeds.pop((peer, link), (Speed(), 0.0))
        speed = known.after(
            size_bytes=size_bytes,
            transfer_s=transfer_s,
            setup_s=setup_s,
            queued_bytes=queued_bytes,
        )
        self._speeds[peer, link] = (speed, self._clock())
        while len(self._speeds) > self._max_entries:
            del self._speeds[next(iter(self._speeds))]

    def as_dict(self) -> dict[str, dict[str, dict[str, float]]]:
        """Peer to link to the fields of its `Speed` by now: for status and the routers."""
        now = self._clock()
        result: dict[str, dict[str, dict[str, float]]] = {}
        for (peer, link), (speed, at) in self._speeds.items():
            result.setdefault(peer, {})[link] = asdict(speed.aged(now - at))
        return result
