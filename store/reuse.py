"""`ReuseModel`: how likely a block comes back, learned on line from those that did and did not.

A discrete hazard: the chance that a block is used again while its age (seconds since its last
use) lies in a bucket is ``base[bucket] x product of factors``, one factor a feature of the
block's class, and one more for (gap, bucket), since what came back soon goes cold soon. All of it
is observed over expected counts, shrunk to 1, so that few observations say little. No parameter
comes from a trace. What is learned is turned into an index a class and a bucket: the most reuses
a block-second can bring from that age on (Gittins; cf. LHD, Beckmann et al., NSDI 2018).
Must not know blocks, slots or chains.
"""

import itertools
import math
from array import array
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

BUCKETS = 36
EDGES_S = (0.0, *(2.0 ** (k / 2) for k in range(BUCKETS)))
"""Bucket k holds ages from ``EDGES_S[k]`` to ``EDGES_S[k + 1]``: half octaves, 1 s to 36 h."""
WIDTHS_S = tuple(b - a for a, b in itertools.pairwise(EDGES_S))
PRIOR = tuple(0.3 * (b - a) / (1 + (a + b) / 2) for a, b in itertools.pairwise(EDGES_S))
"""Before anything is known the chance falls with 1/age: the order is that of LRU."""

PRIOR_WEIGHT = 2.0
FACTOR_WEIGHT = 4.0
SHAPE_WEIGHT = 10.0
"""Uses it takes before the base, a factor and a shape leave what is assumed of them."""
MOST_HAZARD = 0.95
FIRST_REFIT = 32
REFIT_EVERY = 512
HALVE_EVERY = 1 << 15
"""In classified stretches: old evidence fades."""
UNKNOWN = 0
"""The class of blocks whose use was not seen: nothing but age counts."""


class Features(NamedTuple):
    """What a class is made of; small numbers, equal or not, no order among them."""

    request: int  # does it go on a conversation, how much of it is new, is this part new
    hits: int  # how often these blocks were used before
    source: int  # how well what comes from the same prompt template comes back
    gap: int  # time between the last two uses


def bucket(age_s: float) -> int:
    """The bucket of an age."""
    return 0 if age_s < 1.0 else min(BUCKETS - 1, int(2 * math.log2(age_s)) + 1)


class ReuseModel:
    """Owned by one history. Takes about 2 KB a class; there are a few hundred of them."""

    def __init__(self) -> None:
        self._class_of: dict[Features, int] = {}
        self._features: list[Features] = []
        self._at_risk: list[array[float]] = []  # by class, then bucket
        self._returned: list[array[float]] = []
        self._base = list(PRIOR)
        self._factors: tuple[dict[int, float], ...] = ({}, {}, {}, {})
        self._shapes: dict[int, list[float]] = {}
        self._hazards: list[list[float] | None] = []
        self._index: list[list[float] | None] = []
        self._classified = 0
        self._refit_at = FIRST_REFIT
        self._new_class(Features(-1, -1, -1, -1))

    def classify(self, features: Features) -> int:
        """The class of a stretch of blocks that was just used."""
        self._classified += 1
        if self._classified >= self._refit_at:
            self._refit_at = self._classified + min(REFIT_EVERY, self._classified)
            self.refit()
        if self._classified % HALVE_EVERY == 0:
            self._halve()
        known = self._class_of.get(features)
        return self._new_class(features) if known is None else known

    def entered(self, kind: int, age: int, weight: float) -> None:
        """``weight`` stretches of class ``kind`` came into bucket ``age``.

        Half counts now, half when they leave it: those still inside are half at risk.
        """
        self._at_risk[kind][age] += weight / 2

    def passed(self, kind: int, age: int, weight: float) -> float:
        """They left it for the next by growing older. Returns how many were due to be used in
        it, with nothing known of their source."""
        at_risk = self._at_risk[kind]
        at_risk[age] += weight / 2
        at_risk[age + 1] += weight / 2
        hazards = self._hazards[kind] or self._plain_hazards(kind)
        return weight * hazards[age]

    def returned(self, kind: int, age: int, weight: float) -> None:
        """They left it by being used again."""
        self._at_risk[kind][age] += weight / 2
        self._returned[kind][age] += weight

    def index(self, kind: int) -> Sequence[float]:
        """By bucket: reuses per block-second that a block of this age is worth keeping for."""
        index = self._index[kind]
        if index is None:
            index = gittins(self._hazards_of(self._features[kind]))
            self._index[kind] = index
        return index

    def refit(self) -> None:
        """Take in what was observed since the last time. O(classes x buckets)."""
        self._refit_base()
        self._refit_factors()
        self._refit_shapes()
        self._hazards = [None] * len(self._features)
        self._index = [None] * len(self._features)

    def _new_class(self, features: Features) -> int:
        self._class_of[features] = len(self._features)
        self._features.append(features)
        self._at_risk.append(array("d", [0.0]) * BUCKETS)
        self._returned.append(array("d", [0.0]) * BUCKETS)
        self._hazards.append(None)
        self._index.append(None)
        return len(self._features) - 1

    def _plain_hazards(self, kind: int) -> list[float]:
        hazards = self._hazards_of(self._features[kind]._replace(source=0))
        self._hazards[kind] = hazards
        return hazards

    def _hazards_of(self, features: Features) -> list[float]:
        scale = self._scale(features)
        shape = self._shapes.get(features.gap, self._base)
        return [min(MOST_HAZARD, scale * h) for h in shape]

    def _scale(self, features: Features) -> float:
        scale = 1.0
        for factors, value in zip(self._factors, features, strict=True):
            scale *= factors.get(value, 1.0)
        return scale

    def _refit_base(self) -> None:
        at_risk = _smooth([sum(column) for column in zip(*self._at_risk, strict=True)], 0.25)
        returned = _smooth([sum(column) for column in zip(*self._returned, strict=True)], 0.25)
        self._base = [
            (r + PRIOR_WEIGHT * p) / (n + PRIOR_WEIGHT)
            for r, n, p in zip(returned, at_risk, PRIOR, strict=True)
        ]

    def _refit_factors(self) -> None:
        """One round of iterative proportional fitting from where the last one ended."""
        observed = [sum(row) for row in self._returned]
        expected = [
            sum(map(float.__mul__, row, self._shapes.get(f.gap, self._base)))
            for row, f in zip(self._at_risk, self._features, strict=True)
        ]
        for place, factors in enumerate(self._factors):
            seen: defaultdict[int, float] = defaultdict(float)
            due: defaultdict[int, float] = defaultdict(float)
            for features, o, e in zip(self._features, observed, expected, strict=True):
                value = features[place]
                seen[value] += o
                due[value] += e * self._scale(features) / factors.get(value, 1.0)
            for value, o in seen.items():
                factors[value] = (o + FACTOR_WEIGHT) / (due[value] + FACTOR_WEIGHT)

    def _refit_shapes(self) -> None:
        seen: defaultdict[int, list[float]] = defaultdict(lambda: [0.0] * BUCKETS)
        due: defaultdict[int, list[float]] = defaultdict(lambda: [0.0] * BUCKETS)
        for features, n, r in zip(self._features, self._at_risk, self._returned, strict=True):
            scale, gap = self._scale(features), features.gap
            seen[gap] = [a + b for a, b in zip(seen[gap], r, strict=True)]
            due[gap] = [a + scale * b * h for a, b, h in zip(due[gap], n, self._base, strict=True)]
        self._shapes = {
            gap: [
                h * (o + SHAPE_WEIGHT) / (e + SHAPE_WEIGHT)
                for h, o, e in zip(
                    self._base, _smooth(seen[gap], 0.5), _smooth(due[gap], 0.5), strict=True
                )
            ]
            for gap in seen
        }

    def _halve(self) -> None:
        for rows in (self._at_risk, self._returned):
            for row in rows:
                for age, count in enumerate(row):
                    row[age] = count / 2


def gittins(hazards: Sequence[float]) -> list[float]:
    """By bucket: the greatest rate of reuse, over all ages to give up at, in reuses a second.

    With F the chance to have been used and A the expected seconds held up to an age, it is the
    slope from (A, F) to the next corner of the upper hull to the right. Linear time.
    """
    alive, area = 1.0, 0.0
    points = [(0.0, 0.0)]
    for chance, width in zip(hazards, WIDTHS_S, strict=True):
        after = alive * (1 - chance)
        area += (alive + after) / 2 * width
        alive = after
        points.append((area, 1 - alive))
    index = [0.0] * len(hazards)
    hull = [points[-1]]
    for k in range(len(hazards) - 1, -1, -1):
        x, y = points[k]
        while len(hull) > 1 and _slope(x, y, hull[-1]) <= _slope(x, y, hull[-2]):
            hull.pop()
        index[k] = _slope(x, y, hull[-1])
        hull.append((x, y))
    return index


def _slope(x: float, y: float, to: tuple[float, float]) -> float:
    return (to[1] - y) / (to[0] - x) if to[0] > x else 0.0


def _smooth(counts: Sequence[float], share: float) -> list[float]:
    """Each count with ``share`` of its neighbours'; the ends count themselves twice."""
    padded = [counts[0], *counts, counts[-1]] if counts else []
    return [b + share * (a + c) for a, b, c in zip(padded, padded[1:], padded[2:], strict=False)]
