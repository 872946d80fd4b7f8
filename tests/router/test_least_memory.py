"""The search for the memory that a policy needs: found within 2 %, in few rounds."""

import pytest
from least_memory import CLOSE_ENOUGH, TRIED_AT_ONCE, least_memory


class Curve:
    """Hit rates that reach 0.9 at ``needed`` blocks."""

    def __init__(self, needed):
        self.needed = needed
        self.rounds = []

    def __call__(self, sizes):
        self.rounds.append(sizes)
        return {size: 0.9 * size / self.needed for size in sizes}


@pytest.mark.parametrize("needed", [1, 2, 3, 77, 1_000, 40_000])
def test_the_least_size_that_is_enough_is_found_in_few_rounds(needed):
    curve = Curve(needed)

    found = least_memory(curve, 0.9, most=40_000)

    assert needed <= found <= max(needed + 1, needed * CLOSE_ENOUGH)
    assert len(curve.rounds) <= 10
    assert all(len(sizes) <= TRIED_AT_ONCE for sizes in curve.rounds)


def test_none_where_the_most_is_too_little():
    assert least_memory(Curve(1_001), 0.9, most=1_000) is None
