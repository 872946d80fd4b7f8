"""Seconds between two tokens on each worker, learned from the streams that passed. No clock.

An engine's step grows with the sequences that it generates at once: a line over their number, by
least squares in which old streams fade.
"""

from dataclasses import dataclass

FORGET = 0.95  # a stream fades to a half in 14, as in `estimate`


@dataclass(slots=True)
class Line:
    """Sums over what was observed: weights, sequences x, seconds y, and their products."""

    n: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def observe(self, sequences: int, seconds: float) -> None:
        """A stream had ``seconds`` between its tokens while so many sequences were generated."""
        for name, value in (
            ("n", 1.0),
            ("x", float(sequences)),
            ("y", seconds),
            ("xx", float(sequences) ** 2),
            ("xy", sequences * seconds),
        ):
            setattr(self, name, FORGET * getattr(self, name) + value)

    def seconds(self, sequences: int) -> float:
        """Expected seconds between tokens with so many sequences; 0 before the first stream.

        Never falls with the number nor grows faster than it, and is the mean while all streams had
        the same number: of nearly equal ones noise alone says how steep the line is.
        """
        if not self.n:
            return 0.0
        spread = self.n * self.xx - self.x**2
        slope = (self.n * self.xy - self.x * self.y) / spread if spread > 1e-6 else 0.0
        slope = min(max(0.0, slope), self.y / self.x)
        return max(0.0, self.y / self.n + slope * (sequences - self.x / self.n))


class TokenTimes:
    """Owned by the router's event loop. A line a worker."""

    def __init__(self) -> None:
        self._lines: dict[str, Line] = {}

    def observe(self, worker: str, sequences: int, seconds: float) -> None:
        """See `Line.observe`."""
        self._lines.setdefault(worker, Line()).observe(sequences, seconds)

    def seconds(self, worker: str, sequences: int) -> float:
        """See `Line.seconds`."""
        line = self._lines.get(worker)
        return line.seconds(sequences) if line else 0.0

    def forget(self, worker: str) -> None:
        """Drop what was learned of a worker that is gone."""
        self._lines.pop(worker, None)
