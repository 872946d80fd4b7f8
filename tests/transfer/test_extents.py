"""Coalescing: neighbours on both sides are one range, and every block comes exactly once."""

from hypothesis import given
from hypothesis import strategies as st

from prefixfleet.transfer.extents import extents
from prefixfleet.transfer.link import Range

SLOT = 4096


def test_neighbours_on_both_sides_become_one_range():
    assert extents([5, 6, 7], [0, 1, 2], SLOT) == (
        [Range(5 * SLOT, 3 * SLOT)],
        [Range(0, 3 * SLOT)],
    )


def test_neighbours_that_come_in_another_order_become_one_range():
    assert extents([7, 5, 6], [2, 0, 1], SLOT)[0] == [Range(5 * SLOT, 3 * SLOT)]


def test_neighbours_on_one_side_only_stay_apart():
    assert extents([5, 6, 7], [0, 2, 3], SLOT) == (
        [Range(5 * SLOT, SLOT), Range(6 * SLOT, 2 * SLOT)],
        [Range(0, SLOT), Range(2 * SLOT, 2 * SLOT)],
    )


SLOTS = st.lists(st.integers(0, 50), min_size=1, max_size=40, unique=True)


@given(SLOTS, st.randoms())
def test_every_block_is_read_once_into_its_own_slot(sources, random):
    targets = list(sources)
    random.shuffle(targets)

    moved = {}
    for source, target in zip(*extents(sources, targets, SLOT), strict=True):
        assert source.length == target.length
        for start in range(0, source.length, SLOT):
            moved[(target.offset + start) // SLOT] = (source.offset + start) // SLOT

    assert moved == dict(zip(targets, sources, strict=True))
