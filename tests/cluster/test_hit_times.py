"""What a node says a block of its own takes: learned, weighted by blocks, and not led astray."""

import pytest

from prefixfleet.cluster.hit_times import FLOOR_S, KEPT_BLOCKS, OUTLIER, HitTimes


@pytest.fixture
def times():
    return HitTimes()


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
