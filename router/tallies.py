"""Prometheus counters and histograms that cost an addition each time, and a sum at each scrape.

Those of the library take a lock and some ten calls for every number, several times a request. Here
one thread counts, and `prometheus_client` gets the sums when somebody asks for them.
"""

from bisect import bisect_left
from collections.abc import Iterable

from prometheus_client import Counter, Histogram
from prometheus_client.samples import Sample


class Count(Counter):
    """Owned by the router's event loop, scrapes included."""

    def _metric_init(self) -> None:
        super()._metric_init()
        self._more = 0.0  # since the last scrape

    def inc(self, amount: float = 1, exemplar: dict[str, str] | None = None) -> None:
        """Count ``amount`` more, which is not negative; there are no exemplars."""
        self._more += amount

    def _child_samples(self) -> Iterable[Sample]:
        more, self._more = self._more, 0.0
        super().inc(more)
        return super()._child_samples()


class Spread(Histogram):
    """Owned by the router's event loop, scrapes included."""

    def _metric_init(self) -> None:
        super()._metric_init()
        self._start()

    def _start(self) -> None:
        self._sum_more = 0.0  # since the last scrape
        self._more = [0] * len(self._upper_bounds)

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        """Count ``amount`` in the first bucket whose bound is not below; there are no exemplars."""
        self._sum_more += amount
        self._more[bisect_left(self._upper_bounds, amount)] += 1

    def _child_samples(self) -> Iterable[Sample]:
        self._sum.inc(self._sum_more)
        for bucket, count in zip(self._buckets, self._more, strict=True):
            bucket.inc(count)
        self._start()
        return super()._child_samples()
