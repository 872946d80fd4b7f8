"""Prefixes that must stay: for as long as wished, within the quota, and no longer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixfleet.store.eviction import LruOrder
from prefixfleet.store.pool import SlotPool
from prefixfleet.store.retention import MAX_TTL_S, Retention

CHAIN = [bytes([n + 1]) * 16 for n in range(8)]


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def pool(clock):
    pool = SlotPool(16, LruOrder(), clock)
    yield pool
    pool.check()


def commit(pool, chain, parent=b""):
    with pool.reserve(parent, chain) as reservation:
        for block in chain:
            assert reservation.commit(block)


def evict_all(pool):
    victims = pool.choose_victims(pool.num_slots)
    pool.free(victims)
    return set(victims.hashes)


def test_a_kept_prefix_survives_eviction_until_its_time_is_over(pool, clock):
    commit(pool, CHAIN)
    retention = Retention(pool, clock)
    assert retention.keep(CHAIN[:3], ttl_s=10) == 3

    assert evict_all(pool) == set(CHAIN[3:])
    clock.now = 10.0
    retention.expire()
    assert evict_all(pool) == set(CHAIN[:3])


def test_blocks_that_come_later_are_kept_too(pool, clock):
    retention = Retention(pool, clock)
    retention.keep(CHAIN[:2], ttl_s=10)

    commit(pool, CHAIN)
    for block in CHAIN:
        retention.arrived(block)

    assert evict_all(pool) == set(CHAIN[2:])


def test_wishes_end_at_the_quota(pool, clock):
    commit(pool, CHAIN)
    retention = Retention(pool, clock, quota=3)

    assert retention.keep(CHAIN, ttl_s=10) == 3
    assert retention.keep([b"x" * 16], ttl_s=10) == 0
    assert retention.stats() == {"kept": 3, "wished": 3, "quota": 3, "displaced_blocks": 0}


def test_a_wish_can_be_taken_back_and_is_never_shortened_by_another(pool, clock):
    commit(pool, CHAIN)
    retention = Retention(pool, clock)
    retention.keep(CHAIN[:4], ttl_s=100)
    retention.keep(CHAIN[:4], ttl_s=1)
    clock.now = 50.0
    retention.expire()
    assert retention.stats()["kept"] == 4

    retention.keep(CHAIN[:4], ttl_s=0)

    assert evict_all(pool) == set(CHAIN)


def test_no_wish_lasts_for_ever(pool, clock):
    commit(pool, CHAIN)
    retention = Retention(pool, clock)
    retention.keep(CHAIN[:1], ttl_s=float("inf"))

    clock.now = MAX_TTL_S
    retention.expire()

    assert retention.stats()["kept"] == 0


def test_closing_leaves_no_pin_behind(pool, clock):
    commit(pool, CHAIN)
    retention = Retention(pool, clock)
    retention.keep(CHAIN[:4], ttl_s=100)

    retention.close()

    assert pool.counts().pinned == 0


OTHER = [bytes([n + 101]) * 16 for n in range(8)]


def test_a_higher_priority_takes_the_place_of_the_lowest_leaf_first(pool, clock):
    for blocks in (CHAIN[:4], OTHER[:4]):
        commit(pool, blocks)
    retention = Retention(pool, clock, quota=6)
    retention.keep(CHAIN[:4], ttl_s=10, priority=1)
    retention.keep(OTHER[:2], ttl_s=10, priority=2)

    assert retention.keep(OTHER[:4], ttl_s=10, priority=5) == 4

    assert evict_all(pool) == set(CHAIN[2:4])
    assert retention.stats()["displaced_blocks"] == 2


@pytest.mark.parametrize("priority", [0, 5])
def test_a_wish_takes_nothing_from_one_of_its_priority_or_more(pool, clock, priority):
    commit(pool, CHAIN)
    retention = Retention(pool, clock, quota=3)
    retention.keep(CHAIN[:3], ttl_s=10, priority=5)

    assert retention.keep(OTHER[:2], ttl_s=10, priority=priority) == 0

    assert evict_all(pool) == set(CHAIN[3:])


def test_no_more_than_needed_is_displaced_and_never_the_wish_itself(pool, clock):
    commit(pool, CHAIN)
    retention = Retention(pool, clock, quota=6)
    retention.keep(CHAIN[:4], ttl_s=10)

    assert retention.keep(CHAIN[:8], ttl_s=10, priority=9) == 6

    assert retention.stats() == {"kept": 6, "wished": 6, "quota": 6, "displaced_blocks": 0}


@settings(max_examples=60)
@given(
    wishes=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 6), st.integers(0, 3), st.integers(1, 5)),
        max_size=12,
    )
)
def test_what_is_kept_is_always_within_the_quota_and_unbroken(wishes):
    """Whatever wishes come: no block is kept without the one before it."""
    clock = Clock()
    pool = SlotPool(32, LruOrder(), clock)
    chains = [[bytes([c + 1, n + 1]) * 8 for n in range(6)] for c in range(3)]
    for chain in chains:
        commit(pool, chain)
    retention = Retention(pool, clock, quota=7)
    for chain, length, priority, ttl_s in wishes:
        clock.now += 1.0
        retention.keep(chains[chain][:length], ttl_s, priority)
        kept = set(retention._kept)
        assert len(kept) <= 7
        for blocks in chains:
            here = [block in kept for block in blocks]
            assert here == sorted(here, reverse=True)
    retention.close()
    pool.check()
