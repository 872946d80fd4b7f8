"""Percentiles that mean one thing wherever they are shown. Pure.

P90 and P99 always speak of the unlucky requests: of seconds, what nine tenths and 99 of 100 stay
at or below; of hit rates, where more is better, what nine tenths and 99 of 100 reach at least. So
a P99 is never better than the P90, nor that than the median.
"""

import math
from collections.abc import Sequence

PERCENTILES = (50, 90, 99)
REACHED = "P90, P99: what nine tenths, 99 of 100 requests reach at least"
"""Said beside every hit rate that is shown."""


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile: a value that occurred; 0 when there are none."""
    if not values:
        return 0.0
    rank = max(1, math.ceil(len(values) * percent / 100))
    return sorted(values)[rank - 1]


def reached(values: Sequence[float], percent: float) -> float:
    """What ``percent`` of the values reach at least: the largest such value; 0 without any."""
    if not values:
        return 0.0
    rank = max(1, math.ceil(len(values) * percent / 100))
    return sorted(values, reverse=True)[rank - 1]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles of what is better small, as seconds are."""
    ordered = sorted(values)
    return {"mean": mean(values)} | {f"p{p}": percentile(ordered, p) for p in PERCENTILES}


def reach(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles of what is better large, as hit rates are."""
    ordered = sorted(values)
    return {"mean": mean(values)} | {f"p{p}": reached(ordered, p) for p in PERCENTILES}


def mean(values: Sequence[float]) -> float:
    """0 without values."""
    return math.fsum(values) / len(values) if values else 0.0
