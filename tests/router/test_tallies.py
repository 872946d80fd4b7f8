"""Counters and histograms of our own tell Prometheus what the library's own tell it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from prefixfleet.router.tallies import Count, Spread

BOUNDS = (0.0, 0.25, 1.0)
# sums of these are exact, in any order
numbers = st.lists(st.sampled_from((0.0, 0.125, 0.25, 0.5, 1.0, 2.0)), max_size=20)


def told(registry):
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


@pytest.mark.parametrize("times", [1, 3])
@given(values=numbers)
def test_a_scrape_reads_what_the_librarys_own_would_tell(times, values):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    made = [
        (Count("c", "d", ["l"], registry=ours), Spread("s", "d", buckets=BOUNDS, registry=ours))
    ]
    made.append(
        (
            Counter("c", "d", ["l"], registry=theirs),
            Histogram("s", "d", buckets=BOUNDS, registry=theirs),
        )
    )

    for _ in range(times):  # a scrape takes nothing away
        for count, spread in made:
            for number, value in enumerate(values):
                count.labels(str(number % 2)).inc(value)
                spread.observe(value)
        assert told(ours) == told(theirs)
        assert told(ours) == told(theirs)
