"""Learned speeds: they follow what is seen, and one odd pull does not turn them over."""

import math
import time

import pytest
from clocks import ManualClock

from prefixfleet.transfer.estimates import MIN_BYTES, OUTLIER, PROMISE_S, Estimates

MiB = 1024 * 1024


def observe(estimates, rate, size=10 * MiB, setup_s=0.001, peer="a", link="tcp"):
    estimates.observe(peer, link, size_bytes=size, transfer_s=size / rate, setup_s=setup_s)


def test_nothing_is_known_before_the_first_pull():
    assert Estimates(time.monotonic).speed("a", "tcp").bytes_per_s == 0
    assert Estimates(time.monotonic).as_dict() == {}


def test_the_first_pull_is_believed():
    estimates = Estimates(time.monotonic)

    observe(estimates, 1e9)

    assert estimates.speed("a", "tcp").bytes_per_s == pytest.approx(1e9)


def test_the_estimate_follows_a_change():
    estimates = Estimates(time.monotonic)
    observe(estimates, 1e9)

    for _ in range(20):
        observe(estimates, 2e8)

    assert estimates.speed("a", "tcp").bytes_per_s == pytest.approx(2e8, rel=0.1)


@pytest.mark.parametrize("rate", [1.0, 1e15])
def test_one_odd_pull_moves_it_by_a_bounded_factor(rate):
    estimates = Estimates(time.monotonic)
    observe(estimates, 1e9)

    observe(estimates, rate)

    assert 1e9 / OUTLIER < estimates.speed("a", "tcp").bytes_per_s < 1e9 * OUTLIER


def test_a_tiny_pull_teaches_the_set_up_time_only():
    estimates = Estimates(time.monotonic)

    observe(estimates, 1e3, size=MIN_BYTES - 1, setup_s=0.004)

    speed = estimates.speed("a", "tcp")
    assert (speed.bytes_per_s, speed.setup_s, speed.pulls) == (0, 0.004, 1)


def test_peers_and_links_are_apart_and_their_number_is_bounded():
    estimates = Estimates(time.monotonic, max_entries=2)
    observe(estimates, 1e9, peer="a", link="tcp")
    observe(estimates, 2e9, peer="a", link="ucx")
    observe(estimates, 1e9, peer="a", link="tcp")

    observe(estimates, 3e9, peer="b", link="tcp")

    assert {peer: set(links) for peer, links in estimates.as_dict().items()} == {
        "a": {"tcp"},
        "b": {"tcp"},
    }


def test_seconds_are_set_up_and_transfer_and_infinite_while_unknown():
    estimates = Estimates(time.monotonic)
    assert estimates.speed("a", "tcp").seconds(1) == math.inf

    observe(estimates, 1e9, setup_s=0.25)

    assert estimates.speed("a", "tcp").seconds(500_000_000) == pytest.approx(0.75)


def test_an_estimate_has_an_age(clock):
    estimates = Estimates(clock)
    assert estimates.age_s("a", "tcp") == math.inf
    observe(estimates, 1e9)

    clock.advance(60)

    assert estimates.age_s("a", "tcp") == 60


def test_the_queue_of_the_source_is_what_it_said_last_and_shrinks_as_it_is_sent():
    clock = ManualClock()
    estimates = Estimates(clock)
    for queued in (5, 7):
        estimates.observe(
            "a", "tcp", size_bytes=MiB, transfer_s=0.1, setup_s=0.1, queued_bytes=queued * MiB
        )

    def queued():
        return estimates.as_dict()["a"]["tcp"]["queued_bytes"]

    assert queued() == 7 * MiB
    clock.advance(0.25)  # at 10 MiB/s
    assert queued() == 4.5 * MiB
    clock.advance(1.0)
    assert queued() == 0


def test_no_promise_of_a_source_outlasts_a_lease():
    clock = ManualClock()
    estimates = Estimates(clock)
    queue = {"queued_bytes": 2**50}
    estimates.observe("a", "tcp", size_bytes=MiB, transfer_s=1.0, setup_s=0.1, **queue)

    clock.advance(PROMISE_S)

    assert estimates.as_dict()["a"]["tcp"]["queued_bytes"] == 0
