"""How large files are, and which of those that are there go on after the cap has changed."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixfleet.store.bucket_file import bucket_file_bytes
from prefixfleet.store.bucket_shape import (
    FEWEST_BUCKETS,
    MOST_BUCKETS,
    SHRUNK,
    BucketShape,
    shape_of,
)
from prefixfleet.store.kept_files import KeptFile
from prefixfleet.store.slot_files import BUCKET_BYTES, LEAST_BUCKETS, MAX_BUCKET_SLOTS

SLOT = 1 << 20
GIB = 1 << 30


def files(slots, *numbers, slot_bytes=SLOT):
    size = bucket_file_bytes(slot_bytes, slots)
    return [KeptFile(0.0, Path(f"bucket-{number:06}.slots"), size) for number in numbers]


def of(room, *found):
    return shape_of(SLOT, room, found)


def test_without_files_there_are_32_or_more_of_a_quarter_gib_at_most():
    assert of(2 * GIB).slots == 64
    assert of(100 * GIB).slots == BUCKET_BYTES // SLOT
    assert LEAST_BUCKETS - 1 <= of(2 * GIB).files <= 2 * LEAST_BUCKETS  # the tables count too


@pytest.mark.parametrize("room", [2 * GIB, GIB, GIB // 2, 8 * GIB, 60 * GIB])
def test_files_that_are_there_keep_their_size_where_the_cap_changes(room):
    assert of(room, *files(64, *range(5))).slots == 64


@pytest.mark.parametrize("room", [GIB // 4, 100 * GIB])
def test_a_cap_for_which_they_are_much_too_large_or_small_makes_others(room):
    assert of(room, *files(64, *range(5))) == of(room)


def test_of_two_sizes_the_one_of_most_files_goes_on():
    assert of(2 * GIB, *files(64, 0), *files(32, 1, 2)).slots == 32


def test_files_keep_their_numbers_within_bounds():
    fit = of(GIB, *files(64, 0)).files

    assert of(GIB, *files(64, 0, 3 * fit)).files == 3 * fit + 1
    assert of(GIB, *files(64, 0, SHRUNK * (fit + 1))).files == fit
    assert of(GIB, *files(64, 0), *files(32, 3 * fit)).files == fit  # of no use


@pytest.mark.parametrize("slot_bytes", [8_192, 65_536, SLOT, 5 * SLOT])
@pytest.mark.parametrize("room", [GIB // 4, GIB, 3 * GIB, 8 * GIB, 63 * GIB])
def test_to_a_quarter_of_the_cap_every_file_that_stays_is_found(slot_bytes, room):
    full = shape_of(slot_bytes, room, [])
    last = files(full.slots, full.files - 1, slot_bytes=slot_bytes)

    assert shape_of(slot_bytes, room // SHRUNK, last) == full


def test_a_room_for_no_file_is_for_none():
    assert of(SLOT).files == 0
    assert of(SLOT, *files(64, *range(9))).files == 0


@given(
    st.integers(1, 4096).map(lambda pages: pages * 4096),
    st.integers(0, 1 << 44),
    st.lists(
        st.builds(
            KeptFile,
            st.floats(0, 1),
            st.sampled_from(["bucket-000001.slots", "bucket-x.slots", "bucket-99999999.slots"]).map(
                Path
            ),
            st.integers(0, 1 << 30),
        ),
        max_size=3,
    ),
)
def test_whatever_lies_there_books_and_sizes_are_bounded(slot_bytes, room, found):
    shape = shape_of(slot_bytes, room, found)

    assert 1 <= shape.slots <= MAX_BUCKET_SLOTS
    fit = room // bucket_file_bytes(slot_bytes, shape.slots)
    assert fit <= shape.files < SHRUNK * (fit + 1)
    assert fit or not shape.files
    new = shape_of(slot_bytes, room, [])
    assert shape.slots == new.slots or FEWEST_BUCKETS <= fit <= MOST_BUCKETS


@given(st.integers(1, 64), st.integers(1, MAX_BUCKET_SLOTS))
def test_a_files_size_tells_how_many_slots_it_has(pages, slots):
    slot_bytes = 4096 * pages
    room = 32 * bucket_file_bytes(slot_bytes, slots)

    found = files(slots, 40, slot_bytes=slot_bytes)
    assert shape_of(slot_bytes, room, found) == BucketShape(slots, 41)
