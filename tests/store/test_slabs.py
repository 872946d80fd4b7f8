"""Arithmetic of a segment that several namespaces share."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixfleet.store.slabs import MOST_WASTE, SLABS, Slabs

PAGE = 4096
pages = st.integers(1, 4_000)


def test_a_segment_is_cut_into_slabs_of_whole_pages_that_cover_it():
    slabs = Slabs.of(1000 * PAGE)

    bounds = [slabs.bounds(slab) for slab in range(slabs.count)]

    assert slabs.count == SLABS
    assert all(start % PAGE == 0 for start, _ in bounds)
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(bounds))
    assert (bounds[0][0], bounds[-1][1]) == (0, 1000 * PAGE)


@given(size=pages, slot=pages)
def test_who_has_all_slabs_loses_no_slot_to_them(size, slot):
    slabs = Slabs.of(size * PAGE)
    own = set(range(slabs.count))

    slots = {s for slab in own for s in slabs.whole(slab, own, slot * PAGE)}

    assert slots == set(range(size // slot))


@given(size=pages, sizes=st.tuples(pages, pages), split=st.sets(st.integers(0, SLABS - 1)))
def test_no_byte_is_of_two_namespaces(size, sizes, split):
    slabs = Slabs.of(size * PAGE)
    everything = set(range(slabs.count))
    taken = set()
    for own, slot in zip((everything & split, everything - split), sizes, strict=True):
        slots = {s for slab in own for s in slabs.whole(slab, own, slot * PAGE)}
        used = {page for s in slots for page in range(s * slot, (s + 1) * slot)}
        assert not taken & used
        taken |= used
        assert all(slabs.bounds(slab)[0] <= size * PAGE for slab in own)


@given(size=st.integers(1024, 40_000), own=st.sets(st.integers(0, SLABS - 1), min_size=1))
def test_waste_is_within_its_bound_for_every_slot_that_is_taken(size, own):
    slabs = Slabs.of(size * PAGE)
    for slot in {PAGE, slabs.most_slot_bytes // PAGE * PAGE}:
        slots = {s for slab in own for s in slabs.whole(slab, own, slot)}

        waste = slabs.bytes_of(own) - len(slots) * slot

        assert 0 <= waste <= MOST_WASTE * slabs.bytes_of(own)


@given(size=pages, slot=pages, slab=st.integers(0, SLABS - 1))
def test_a_slot_touches_the_slabs_that_it_has_bytes_in(size, slot, slab):
    slabs = Slabs.of(size * PAGE)
    slab %= slabs.count
    start, end = slabs.bounds(slab)

    touching = set(slabs.touching(slab, slot * PAGE))

    for number in range(size // slot):
        overlaps = number * slot * PAGE < end and (number + 1) * slot * PAGE > start
        assert (number in touching) == overlaps
        assert (slab in slabs.touched(number, slot * PAGE)) == overlaps


@pytest.mark.parametrize("slot_pages", [1, 3, 100])
def test_the_least_size_that_is_named_is_large_enough(slot_pages):
    slot = slot_pages * PAGE
    least = Slabs.of(1).least_size(slot)

    assert Slabs.of(least).most_slot_bytes >= slot
    assert Slabs.of(least - PAGE).most_slot_bytes < slot
