"""Who gives memory to whom, and who keeps it."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixfleet.store.slab_shares import LEAST_AGE_S, OLDER, Holding, Move, floor_of, next_move

OLD, YOUNG = 600.0, 5.0


def holding(name, slabs, engines=1, wants=True, idle_s=YOUNG):
    return Holding(name, slabs, engines, wants, idle_s)


def test_a_new_namespace_gets_its_floor_whoever_has_the_memory():
    shares = [holding("a", 32), holding("b", 0, wants=False)]

    assert next_move(shares) == Move("a", "b", due=True)
    assert floor_of(shares) == 4
    assert next_move([holding("a", 28), holding("b", 4, wants=False)]) is None


def test_memory_goes_from_old_blocks_to_young_ones():
    assert next_move([holding("a", 16, idle_s=OLD), holding("b", 16)]) == Move("a", "b")


def test_two_that_are_equally_busy_keep_what_they_have():
    assert next_move([holding("a", 28), holding("b", 4)]) is None
    assert next_move([holding("a", 28, idle_s=YOUNG * OLDER), holding("b", 4)]) is None


def test_who_evicts_nothing_takes_nothing():
    shares = [holding("a", 16, idle_s=OLD), holding("b", 16, wants=False)]

    assert next_move(shares) is None


def test_blocks_that_were_just_used_are_not_given_for_younger_ones():
    shares = [holding("a", 16, idle_s=LEAST_AGE_S), holding("b", 16, idle_s=0.1)]

    assert next_move(shares) is None


def test_who_has_no_engine_gives_first_and_all():
    shares = [
        holding("a", 1, engines=0, idle_s=0.0),
        holding("b", 15, idle_s=OLD),
        holding("c", 16),
    ]

    assert next_move(shares) == Move("a", "c")


def test_who_keeps_something_without_an_engine_gives_the_rest():
    ending = replace(holding("a", 2, engines=0, wants=False), ends=True, least=1)
    taker = holding("b", 30)

    assert next_move([ending, taker]) == Move("a", "b", due=True)
    assert next_move([replace(ending, slabs=1), taker]) is None
    assert next_move([replace(ending, slabs=1), replace(taker, wants=False)]) is None


def test_who_has_an_engine_keeps_its_floor():
    shares = [holding("a", 4, idle_s=math.inf), holding("b", 28)]

    assert floor_of(shares) == 4
    assert next_move(shares) is None


def test_who_gives_nothing_for_a_while_keeps_nobody_else_from_giving():
    """Who has no engine would give first, but what it has is read by somebody."""
    shares = [holding("a", 8, engines=0), holding("b", 20, idle_s=OLD), holding("c", 4)]

    assert next_move(shares) == Move("a", "c")
    assert next_move([replace(shares[0], stuck=True), *shares[1:]]) == Move("b", "c")
    assert next_move([replace(h, stuck=True) for h in shares]) is None


def test_who_ends_gives_all_also_to_who_wants_nothing():
    shares = [
        holding("a", 20, wants=False),
        holding("b", 8, engines=0, wants=False, idle_s=0.0),
        holding("c", 4, engines=0, wants=False, idle_s=math.inf),
    ]

    assert next_move(shares) is None
    ending = replace(shares[1], ends=True)
    assert next_move([shares[0], ending, shares[2]]) == Move("b", "a", due=True)
    assert next_move([shares[0], replace(ending, stuck=True), shares[2]]) is None
    assert next_move([replace(shares[0], engines=0), ending]) == Move("b", "a", due=True)


def test_one_alone_moves_nothing():
    assert next_move([holding("a", 32)]) is None


holdings = st.lists(
    st.builds(
        Holding,
        st.just(""),
        st.integers(0, 32),
        st.integers(0, 2),
        st.booleans(),
        st.one_of(st.floats(0, 1e6), st.just(math.inf)),
    ),
    max_size=8,
).map(lambda found: [replace(one, name=number) for number, one in enumerate(found)])


@given(holdings)
def test_a_move_is_between_two_and_is_not_taken_back(shares):
    """As long as nothing but the slab has changed."""
    move = next_move(shares)
    if move is None:
        return
    giver, taker = shares[move.giver], shares[move.taker]
    assert giver is not taker
    assert giver.slabs > (floor_of(shares) if giver.engines else 0)
    assert taker.engines
    moved = [replace(h, slabs=h.slabs + (h is taker) - (h is giver)) for h in shares]
    back = next_move(moved)
    assert back is None or (back.giver, back.taker) != (move.taker, move.giver)


@given(st.lists(st.integers(0, 2), min_size=2, max_size=8), st.integers(0, 7))
def test_everybody_with_an_engine_reaches_the_floor(engines, first):
    """From one that has all, in as many moves as it takes."""
    first %= len(engines)
    slabs = [32 if i == first else 0 for i in range(len(engines))]
    for _ in range(40):
        shares = [
            Holding(i, s, e, wants=False, idle_s=0.0)
            for i, (s, e) in enumerate(zip(slabs, engines, strict=True))
        ]
        if (move := next_move(shares)) is None:
            break
        slabs[move.giver] -= 1
        slabs[move.taker] += 1
    served = [s for s, e in zip(slabs, engines, strict=True) if e]
    assert min(served, default=32) >= min(floor_of(shares), 32 // max(1, len(served)))


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=8))
def test_steady_traffic_comes_to_rest_with_blocks_of_like_age_or_at_a_floor(rates):
    """A block stays for as long as it takes to store once what there is room for."""
    slabs = [32, *([0] * (len(rates) - 1))]
    for _ in range(100):
        shares = [
            holding(i, s, idle_s=60.0 * s / rate)
            for i, (s, rate) in enumerate(zip(slabs, rates, strict=True))
        ]
        if (move := next_move(shares)) is None:
            break
        slabs[move.giver] -= 1
        slabs[move.taker] += 1
    else:
        pytest.fail("slabs still move")
    floor = floor_of(shares)
    youngest = min(h.idle_s for h in shares)
    for share in shares:
        assert share.slabs >= floor
        assert share.slabs == floor or share.idle_s <= max(LEAST_AGE_S, OLDER * youngest)
