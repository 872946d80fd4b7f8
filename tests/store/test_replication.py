"""Whom a hot prefix is sent to, and who has room for it."""

import pytest

from prefixfleet.store.eviction import LruOrder
from prefixfleet.store.holds import NO_SLOT
from prefixfleet.store.pool import SlotPool
from prefixfleet.store.replication import MIN_RECEIVERS, enough, lacking, reserved_for

CHAIN = [b"a", b"ab", b"abc"]


@pytest.fixture
def pool(clock):
    made = SlotPool(4, LruOrder(), clock)
    yield made
    made.check()


def hold(pool, hashes):
    with pool.reserve(b"", hashes) as reservation:
        for block in hashes:
            reservation.commit(block)


def test_all_but_the_source_and_those_that_asked_lack_it_in_their_order():
    assert lacking(["c", "a", "s", "b"], "s", frozenset({"a"})) == ["c", "b"]
    assert lacking(["s", "a"], "s", frozenset({"a"})) == []


def test_it_takes_more_than_a_pull_would_serve():
    assert not enough(MIN_RECEIVERS - 1)
    assert enough(MIN_RECEIVERS)


def test_what_is_missing_is_reserved_and_what_is_here_stays(pool):
    hold(pool, CHAIN[:1])
    with reserved_for(pool, CHAIN) as reservation:
        assert reservation.slots[0] == NO_SLOT
        assert NO_SLOT not in reservation.slots[1:]


@pytest.mark.parametrize(
    ("held", "under_way", "why"),
    [
        (CHAIN, [], "nothing is missing"),
        ([], CHAIN[:1], "something is on its way"),
        ([b"x", b"xy"], [], "there is no room for all"),
    ],
)
def test_who_takes_no_part_reserves_nothing(pool, held, under_way, why):
    hold(pool, held)
    with pool.reserve(b"", under_way):
        free = pool.free_slots
        assert reserved_for(pool, CHAIN) is None, why
        assert pool.free_slots == free
