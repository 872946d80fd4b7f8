"""Learned speed of each (peer, link): what a pull of so many bytes will take. Pure.

Bandwidth and set-up time are separated by what a pull itself observes: the time until its lease
was granted is set-up, the rest is transfer.
"""

from dataclasses import dataclass

WEIGHT = 0.25
"""Of the newest observation in the moving average."""
OUTLIER = 8.0
"""An observation counts at most so many times, and at least one such part of, what is known."""
MIN_BYTES = 256 * 1024
"""Smaller pulls say nothing about bandwidth."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Moving averages over the pulls from one peer over one link."""

    bytes_per_s: float = 0.0  # 0: not known yet
    setup_s: float = 0.0
    pulls: int = 0

    def after(self, *, size_bytes: int, transfer_s: float, setup_s: float) -> "Speed":
        """The averages with one more pull, which brought ``size_bytes``."""
        rate = self.bytes_per_s
        if size_bytes >= MIN_BYTES and transfer_s > 0:
            rate = _blend(rate, size_bytes / transfer_s)
        return Speed(rate, _blend(self.setup_s, setup_s), self.pulls + 1)


def _blend(known: float, seen: float) -> float:
    if known <= 0:
        return seen
    bounded = min(max(seen, known / OUTLIER), known * OUTLIER)
    return known + WEIGHT * (bounded - known)


class Estimates:
    """Speeds by (peer, link), of at most ``max_entries`` pairs, the least recently used dropped.

    Owned by the daemon's event loop.
    """

    def __init__(self, max_entries: int = 4096) -> None:
        self._max_entries = max_entries
        self._speeds: dict[tuple[str, str], Speed] = {}

    def speed(self, peer: str, link: str) -> Speed:
        """What is known; all zero for a pair that was never used."""
        return self._speeds.get((peer, link), Speed())

    def observe(
        self, peer: str, link: str, *, size_bytes: int, transfer_s: float, setup_s: float
    ) -> None:
        """One pull that brought all it asked for."""
        speed = self._speeds.pop((peer, link), Speed())
        self._speeds[peer, link] = speed.after(
            size_bytes=size_bytes, transfer_s=transfer_s, setup_s=setup_s
        )
        while len(self._speeds) > self._max_entries:
            del self._speeds[next(iter(self._speeds))]

    def as_dict(self) -> dict[str, dict[str, dict[str, float]]]:
        """Peer to link to {"bytes_per_s", "setup_s", "pulls"}: for status and the routers."""
        result: dict[str, dict[str, dict[str, float]]] = {}
        for (peer, link), speed in self._speeds.items():
            result.setdefault(peer, {})[link] = {
                "bytes_per_s": speed.bytes_per_s,
                "setup_s": speed.setup_s,
                "pulls": speed.pulls,
            }
        return result
