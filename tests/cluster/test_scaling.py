"""More nodes when requests wait, fewer when they do not, and neither for a moment's sake."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixfleet.cluster.scaling import (
    DOWN_AFTER_S,
    UP_AFTER_S,
    Scaler,
    predicted_wait_s,
    wanted_nodes,
)
from prefixfleet.store.load_board import WAITING, SharedLoad
from prefixfleet.store.records import FleetWish

WISH = FleetWish(least=2, most=10, wait_s=2.0)


@pytest.mark.parametrize(
    ("wait_s", "nodes", "wanted"),
    [
        (2.0, 4, 4),
        (0.5, 4, 4),
        (0.4, 4, 3),
        (0.0, 2, 2),
        (3.0, 4, 6),
        (2.1, 4, 5),
        (100.0, 4, 8),
        (100.0, 8, 10),
        (1.0, 1, 2),
        (1.0, 12, 10),
    ],
)
def test_the_number_that_brings_the_wait_to_the_wished_one(wait_s, nodes, wanted):
    assert wanted_nodes(wait_s, nodes, WISH) == wanted


@given(st.floats(0, 1e6), st.integers(1, 64), st.integers(1, 64), st.integers(0, 64))
def test_it_never_leaves_its_bounds(wait_s, nodes, least, more):
    wish = FleetWish(least=least, most=least + more, wait_s=1.0)

    assert least <= wanted_nodes(wait_s, nodes, wish) <= least + more


@pytest.mark.parametrize(
    ("wait_s", "after_s", "then"), [(3.0, UP_AFTER_S, 6), (0.0, DOWN_AFTER_S, 3)]
)
def test_only_what_lasts_counts(wait_s, after_s, then):
    scaler = Scaler()

    assert scaler.decide(wait_s, 4, WISH, 0.0) == 4
    assert scaler.decide(wait_s, 4, WISH, after_s - 1) == 4
    assert scaler.decide(1.0, 4, WISH, after_s) == 4  # a moment of calm: it starts again
    assert scaler.decide(wait_s, 4, WISH, after_s + 1) == 4
    assert scaler.decide(wait_s, 4, WISH, 2 * after_s) == 4
    assert scaler.decide(wait_s, 4, WISH, 2 * after_s + 1) == then


def test_after_a_step_the_next_one_must_last_anew():
    scaler = Scaler()
    scaler.decide(3.0, 4, WISH, 0.0)

    assert scaler.decide(3.0, 4, WISH, UP_AFTER_S) == 6
    assert scaler.decide(3.0, 6, WISH, UP_AFTER_S + 1) == 6
    assert scaler.decide(3.0, 6, WISH, 2 * UP_AFTER_S + 1) == 9


def test_bounds_hold_at_once():
    assert Scaler().decide(1.0, 1, WISH, 0.0) == 2
    assert Scaler().decide(1.0, 12, WISH, 0.0) == 10


def test_without_bounds_nothing_is_scaled():
    assert Scaler().decide(1e9, 3, FleetWish(), 0.0) == 3


def test_the_wait_is_the_mean_over_live_workers_of_what_all_routers_sent():
    def load(busy_s):
        return SharedLoad(0, 0, 0, busy_s)

    loads = [{"a": load(1.0), "gone": load(99.0)}, {"a": load(2.0), "b": load(1.0)}]

    assert predicted_wait_s(loads, ["a", "b"]) == 2.0
    assert predicted_wait_s([*loads, {WAITING: load(6.0)}], ["a", "b"]) == 5.0
    assert predicted_wait_s(loads, []) == 0.0
