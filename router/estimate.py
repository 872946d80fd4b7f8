"""Seconds that a prefill, a queue or a pull will take. Pure: no clock, no I/O.

A prefill of n tokens of which p are cached costs c0 + c1 (n - p) + c2 (n^2 - p^2) seconds: one
step's overhead, work linear in the new tokens, and attention of each new token over all before
it (Mooncake, FAST'25, eq. 1). The three numbers start from what the worker measured of itself
and follow what prefills took, by least squares in which old ones fade.

Prompts of a day may all be alike, and tell of one direction of the three only. What forgets all
directions alike then knows ever less of the other two, until noise moves them without a bound. So
certainty fades to that of the start here and not to nothing, as in Gay, "Dynamically regularized
fast RLS with application to echo cancellation", ICASSP 1996; and each step is a minimum over what
the three may be, so that it ends nearer to what was observed than it began.
"""

from dataclasses import dataclass
from functools import lru_cache

KILO = 1_000.0  # tokens are counted in thousands, so that the three features have similar sizes
FORGET = 0.95  # a sample fades to a half in 14: engines warm up, get busy, slow down
MOST = 4.0
"""An observation counts as so many times the estimate at most: one may be an engine's hiccup."""
LEAST_S = 0.05  # to which any observation may come, whatever was estimated
SHORT = 0.05  # thousands of tokens; prompts up to here count alike, longer ones by their length
SWEEPS = 8
_START = (0.1, 0.01, 1.0)  # certainty of the worker's own figures, in samples of unit size
_LEAST = (0.0, 1e-6, 0.0)  # no coefficient is negative, and no token costs nothing

Vector = tuple[float, float, float]
Matrix = tuple[Vector, Vector, Vector]
_NOTHING: Matrix = ((0.0, 0.0, 0.0),) * 3


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """Coefficients c0 (s), c1 (s per 1,000 tokens), c2 (s per million), and their certainty: the
    information matrix, the sum of the outer products of what was observed."""

    coefficients: Vector
    information: Matrix = _NOTHING
    samples: int = 0

    def seconds(self, tokens: int, cached: int) -> float:
        """Time to prefill ``tokens`` when the first ``cached`` of them are."""
        c0, c1, c2 = self.coefficients
        n, p = tokens / KILO, cached / KILO
        return c0 + (n - p) * (c1 + c2 * (n + p))


@lru_cache(maxsize=1_024)  # asked for every worker at every decision
def first_guess(tokens_per_s: float) -> PrefillModel:
    """The model of a worker that prefills at ``tokens_per_s`` and was never observed."""
    return PrefillModel((0.0, KILO / max(tokens_per_s, 1.0), 0.0))


@dataclass(slots=True)
class Prefills:
    """Prefills that a worker did one after the other, as one observation: the law is linear in
    its terms, so it holds for their sums, and who of them took how long need not be known.

    Owned by whoever adds to it.
    """

    count: int = 0
    seconds: float = 0.0
    linear: float = 0.0  # sum of n - p, in thousands of tokens
    square: float = 0.0  # sum of n^2 - p^2, in millions

    def add(self, tokens: int, cached: int, seconds: float) -> None:
        """One more, of ``tokens`` of which ``cached`` had their KV."""
        n, p = tokens / KILO, cached / KILO
        self.count += 1
        self.seconds += seconds
        self.linear += n - p
        self.square += n * n - p * p


def observe(model: PrefillModel, done: Prefills) -> PrefillModel:
    """The model after ``done``, at least one prefill: its mean counts as one sample.

    Scaled by the size of the prompts, so that a long one does not outweigh a hundred short ones.
    """
    x = (1.0, done.linear / done.count, done.square / done.count)
    expected_s = _dot(x, model.coefficients)
    seconds = min(done.seconds / done.count, MOST * max(expected_s, LEAST_S / MOST))
    # not by the estimate: what was estimated too low for a while would weigh more for ever
    scale = 1.0 / (SHORT + x[1])
    x = _scaled(x, scale)
    information = _plus(model.information, FORGET if model.samples else 0.0, x)
    moved = _minimum(model.coefficients, information, x, (seconds - expected_s) * scale)
    return PrefillModel(moved, information, model.samples + 1)


def _minimum(start: Vector, information: Matrix, x: Vector, error: float) -> Vector:
    """What lies nearest to the observation and to ``start``, each by its certainty, with no
    coefficient below its least: by coordinate descent, of which no step leads away."""
    d = [0.0, 0.0, 0.0]
    for _ in range(SWEEPS):
        for i in range(3):
            row = information[i]
            pulled = error * x[i] - sum(row[j] * d[j] for j in range(3) if j != i)
            d[i] = max(_LEAST[i] - start[i], pulled / row[i])
    return (start[0] + d[0], start[1] + d[1], start[2] + d[2])


def _plus(information: Matrix, fade: float, x: Vector) -> Matrix:
    """What is left of the certainty, as much of the start's as faded, and that of ``x``."""
    rows = []
    for i, row in enumerate(information):
        new = [fade * row[j] + x[i] * x[j] for j in range(3)]
        new[i] += (1 - fade) * _START[i]
        rows.append((new[0], new[1], new[2]))
    return (rows[0], rows[1], rows[2])


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """What a node measured of its pulls from one peer."""

    bytes_per_s: float
    setup_s: float


UNMEASURED = LinkSpeed(bytes_per_s=1.25e9, setup_s=0.002)
"""A link that nobody used yet: 10 Gbit/s. Optimistic, so that it is tried and then measured."""


def pull_seconds(num_bytes: int, link: LinkSpeed) -> float:
    """Time to pull ``num_bytes`` over ``link``; 0 for nothing."""
    return link.setup_s + num_bytes / max(link.bytes_per_s, 1.0) if num_bytes else 0.0


def _scaled(vector: Vector, factor: float) -> Vector:
    a, b, c = vector
    return (a * factor, b * factor, c * factor)


def _dot(left: Vector, right: Vector) -> float:
    return left[0] * right[0] + left[1] * right[1] + left[2] * right[2]
