"""Seconds that a prefill, a queue or a pull will take. Pure: no clock, no I/O.

A prefill of n tokens of which p are cached costs c0 + c1 (n - p) + c2 (n^2 - p^2) seconds: one
step's overhead, work linear in the new tokens, and attention of each new token over all before
it (Mooncake, FAST'25, eq. 1). The three numbers start from what the worker measured of itself
and follow the observed times to first token by recursive least squares with forgetting.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

KILO = 1_000.0  # tokens are counted in thousands, so that the three features have similar sizes
FORGET = 0.95  # a sample fades to a half in 14: engines warm up, get busy, slow down
_START_VARIANCE = (1e-2, 1e-1, 1e-3)  # how far from the worker's own figure we expect to end
_NOISE = 1e-2

Vector = tuple[float, float, float]
Matrix = tuple[Vector, Vector, Vector]


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """Coefficients c0 (s), c1 (s per 1,000 tokens), c2 (s per million), and their covariance."""

    coefficients: Vector
    covariance: Matrix
    samples: int = 0

    def seconds(self, tokens: int, cached: int) -> float:
        """Time to prefill ``tokens`` when the first ``cached`` of them are."""
        c0, c1, c2 = self.coefficients
        n, p = tokens / KILO, cached / KILO
        return c0 + (n - p) * (c1 + c2 * (n + p))


@lru_cache(maxsize=1_024)  # asked for every worker at every decision
def first_guess(tokens_per_s: float) -> PrefillModel:
    """The model of a worker that prefills at ``tokens_per_s`` and was never observed."""
    a, b, c = _START_VARIANCE
    covariance = ((a, 0.0, 0.0), (0.0, b, 0.0), (0.0, 0.0, c))
    return PrefillModel((0.0, KILO / max(tokens_per_s, 1.0), 0.0), covariance)


def observe(model: PrefillModel, tokens: int, cached: int, seconds: float) -> PrefillModel:
    """The model after a prefill that took ``seconds``; coefficients stay at 0 or above.

    Scaled by the size of the prompt, so that a long one does not outweigh a hundred short ones.
    """
    scale = 1.0 / max(0.05, model.seconds(tokens, cached))
    x = _scaled(_features(tokens, cached), scale)
    p_x = _times(model.covariance, x)
    gain = _scaled(p_x, 1.0 / (FORGET * _NOISE + _dot(x, p_x)))
    error = seconds * scale - _dot(x, model.coefficients)
    moved = [c + g * error for c, g in zip(model.coefficients, gain, strict=True)]
    covariance = tuple(
        tuple(
            min(_START_VARIANCE[i] if i == j else 1.0, (row[j] - gain[i] * p_x[j]) / FORGET)
            for j in range(3)
        )
        for i, row in enumerate(model.covariance)
    )
    c0, c1, c2 = (max(0.0, c) for c in moved)
    return replace(
        model,
        coefficients=(c0, max(c1, 1e-6), c2),
        covariance=covariance,  # type: ignore[arg-type]  # three by three by construction
        samples=model.samples + 1,
    )


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


def _features(tokens: int, cached: int) -> Vector:
    n, p = tokens / KILO, cached / KILO
    return (1.0, n - p, n * n - p * p)


def _scaled(vector: Vector, factor: float) -> Vector:
    a, b, c = vector
    return (a * factor, b * factor, c * factor)


def _dot(left: Vector, right: Vector) -> float:
    return left[0] * right[0] + left[1] * right[1] + left[2] * right[2]


def _times(matrix: Matrix, vector: Vector) -> Vector:
    a, b, c = matrix
    return (_dot(a, vector), _dot(b, vector), _dot(c, vector))
