"""What a chaos run calls a leak."""

import os

import pytest
from chaos_samples import MORE_BYTES, MORE_DESCRIPTORS, SHARED, descriptors_of, leaks


@pytest.mark.parametrize(
    ("rest", "found"),
    [
        ((1_000, 10), 0),
        ((1_000 + MORE_BYTES, 10 + MORE_DESCRIPTORS), 0),
        ((1_001 + MORE_BYTES, 10), 1),
        ((1_000, 11 + MORE_DESCRIPTORS), 1),
    ],
)
def test_a_process_may_hold_a_little_more_than_before(rest, found):
    assert len(leaks({"r0": (1_000, 10)}, {"r0": rest})) == found


def test_shared_memory_may_hold_nothing_more():
    assert leaks({SHARED: (100, 2)}, {SHARED: (100, 2)}) == []
    assert len(leaks({SHARED: (100, 2)}, {SHARED: (101, 3)})) == 2


def test_files_of_a_disk_tier_do_not_count_as_descriptors(tmp_path):
    before = descriptors_of(os.getpid())

    with (tmp_path / "bucket-1.slots").open("w"), (tmp_path / "other").open("w"):
        assert descriptors_of(os.getpid()) == before + 1
