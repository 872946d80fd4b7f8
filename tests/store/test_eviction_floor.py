"""The order that learns is never below the one that does not: on what LRU is best at, as well."""

import random

import pytest
from eviction_replay import belady, replay
from workloads import WORKLOADS

from prefixfleet.store.eviction_guard import PATIENCE, Guard

REQUESTS = 1500


@pytest.mark.parametrize(
    ("name", "blocks"),
    [("recency", 300), ("recency", 1000), ("agents", 300), ("documents", 300), ("scans", 300)],
)
def test_it_finds_no_fewer_blocks_than_lru_and_no_more_than_the_optimum(name, blocks):
    requests = WORKLOADS[name]()[:REQUESTS]

    lru, ours, best = (
        replay(requests, "lru", blocks), replay(requests, "value", blocks), belady(requests, blocks)
    )  # fmt: skip

    assert lru.late_found <= ours.late_found <= best.late_found
    assert lru.found <= best.found


@pytest.mark.parametrize("seed", range(4))
def test_an_order_that_is_always_wrong_loses_little_before_it_is_stopped(seed):
    """What it may lose between two pauses is bounded, and the pauses grow."""
    draw, guard = random.Random(seed), Guard()
    lost, followed = 0, 0
    for _ in range(100_000):
        lru = draw.randrange(20)
        if guard.trusts:
            lost += lru
            followed += 1
        guard.follow(0 if guard.trusts else lru, lru)

    assert followed < 3_000
    assert lost <= (guard.trips + 1) * (PATIENCE + 1) * 20


def test_an_order_that_is_as_good_is_never_stopped():
    guard = Guard()
    for n in range(20_000):
        guard.follow(n % 7, 6 - n % 7)

    assert guard.trusts
    assert guard.trips == 0
