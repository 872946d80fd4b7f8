"""What a node says a block of its own takes: learned, weighted by blocks, and not led astray."""

import pytest
from clocks import ManualClock

from prefixfleet.store.hit_times import FLOOR_S, HALF_S, KEPT_BLOCKS, OUTLIER, HitTimes


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def times(clock):
    return HitTimes(clock)


def test_nothing_is_known_before_the_first_load(times):
    times.read(0, 1.0)  # nothing was found: nobody waited for a block

    assert times.numbers() == {"block_s": 0.0, "read_s": 0.0, "copy_s": 0.0}


def test_memory_and_disk_are_averaged_by_their_blocks(times):
    times.read(10, 10 * FLOOR_S)
    times.read(30, 0.0)

    assert times.numbers()["read_s"] == pytest.approx(FLOOR_S / 4)


def test_the_routers_count_reading_and_copying(times):
    times.read(10, 0.02)
    times.copied(10, 0.01)

    assert times.numbers()["block_s"] == pytest.approx(0.003)


def test_one_load_that_took_ages_counts_as_eight(times):
    times.read(100, 0.1)
    times.read(100, 1_000.0)

    assert times.numbers()["read_s"] == pytest.approx(0.001 * (1 + OUTLIER) / 2)


def test_a_disk_that_has_become_slow_is_known_as_that_in_the_end(times):
    times.read(KEPT_BLOCKS, 0.0)
    for _ in range(100):
        times.read(KEPT_BLOCKS // 8, 0.01 * KEPT_BLOCKS // 8)

    assert times.numbers()["read_s"] == pytest.approx(0.01, rel=0.1)


def test_a_node_that_nobody_asks_since_its_disk_hung_is_asked_again(times, clock):
    """Where hits seem slower than computing, routers send it prompts that it has not: no load."""
    times.read(KEPT_BLOCKS, 2.0 * KEPT_BLOCKS)
    for _ in range(15):
        times.read(0, 0.0)
        clock.advance(HALF_S)

    assert times.numbers()["block_s"] < FLOOR_S


def test_what_is_old_weighs_little_against_a_load_of_now(times, clock):
    times.read(KEPT_BLOCKS, 2.0 * KEPT_BLOCKS)
    clock.advance(12 * HALF_S)
    times.read(64, 64 * FLOOR_S)

    assert times.numbers()["read_s"] == pytest.approx((2.0 + 64 * FLOOR_S) / 65)


def test_a_slow_disk_that_is_read_all_the_time_stays_known_as_slow(times, clock):
    for _ in range(100):
        times.read(10, 0.1)
        clock.advance(HALF_S / 10)

    assert times.numbers()["read_s"] == pytest.approx(0.01, rel=0.1)
