"""What a chaos run calls a leak."""

import pytest
from chaos_samples import MORE_BYTES, MORE_DESCRIPTORS, SHARED, leaks


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
