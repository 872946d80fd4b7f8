"""Coalescing: neighbours on both sides are one range, and every block comes exactly once."""

from hypothesis import given
from hypothesis import strategies as st

from prefixfleet.transfer.extents import portions
from prefixfleet.transfer.link import Range

SLOT = 4096


def test_neighbours_on_both_sides_become_one_range():
    (portion,) = portions([5, 6, 7], [0, 1, 2], SLOT, 1 << 20)

    assert portion.sources == (Range(5 * SLOT, 3 * SLOT),)
    assert portion.targets == (Range(0, 3 * SLOT),)


def test_neighbours_on_one_side_only_stay_apart():
    (portion,) = portions([5, 6, 7], [0, 2, 3], SLOT, 1 << 20)

    assert portion.sources == (Range(5 * SLOT, SLOT), Range(6 * SLOT, 2 * SLOT))
    assert portion.targets == (Range(0, SLOT), Range(2 * SLOT, 2 * SLOT))


def test_a_block_larger_than_a_portion_is_a_portion():
    cut = list(portions([1, 2], [3, 4], 16 << 20, 4 << 20))

    assert [(p.first, p.last) for p in cut] == [(0, 1), (1, 2)]


SLOTS = st.lists(st.integers(0, 50), min_size=1, max_size=40, unique=True)


@given(SLOTS, st.randoms(), st.integers(1, 10))
def test_every_block_is_read_once_into_its_own_slot(sources, random, per_portion):
    targets = list(sources)
    random.shuffle(targets)

    moved = {}
    for portion in portions(sources, targets, SLOT, per_portion * SLOT):
        assert portion.size_bytes == (portion.last - portion.first) * SLOT
        for source, target in zip(portion.sources, portion.targets, strict=True):
            assert source.length == target.length
            for start in range(0, source.length, SLOT):
                moved[(target.offset + start) // SLOT] = (source.offset + start) // SLOT

    assert moved == dict(zip(targets, sources, strict=True))
