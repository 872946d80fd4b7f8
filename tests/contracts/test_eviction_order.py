"""Contract of an eviction order, on a real pool. Every order passes this file unchanged."""

import math
import random

import pytest

from prefixfleet.store.admission import make_room
from prefixfleet.store.eviction import LruOrder
from prefixfleet.store.eviction_fifo import FifoOrder, S3FifoOrder
from prefixfleet.store.eviction_value import ValueOrder
from prefixfleet.store.pool import SlotPool

SLOTS = 40
ORDERS = {
    "lru": lambda slots: LruOrder(),
    "fifo": lambda slots: FifoOrder(),
    "s3-fifo": S3FifoOrder,
    "value": ValueOrder,
}


@pytest.fixture(params=sorted(ORDERS))
def new_pool(request, clock):
    """Makes pools with the order under test."""
    return lambda slots=SLOTS: SlotPool(slots, ORDERS[request.param](slots), clock)


def chain(name, length):
    return [f"{name}-{i}".encode().ljust(16, b".") for i in range(length)]


def serve(pool, blocks):
    """What a node does for one request; how many of its blocks were there."""
    pool.observe(blocks)
    with pool.pin(blocks) as here:
        hits = len(here.hashes)
        room = make_room(pool, blocks[hits:])
        pool.free(room.victims)
        wanted = blocks[hits : hits + room.blocks]
        with pool.reserve(blocks[hits - 1] if hits else b"", wanted) as reservation:
            for block in wanted:
                reservation.commit(block)
    return hits


def requests(seed, count=400):
    """Conversations that grow, shared documents, and prompts that nobody asks again."""
    source = random.Random(seed)
    turns = [0] * 12
    for i in range(count):
        kind = source.random()
        if kind < 0.5:
            user = source.randrange(len(turns))
            turns[user] = min(turns[user] + source.randrange(1, 4), 14)
            yield chain(f"user{user}", turns[user])
        elif kind < 0.8:
            document = chain(f"document{source.randrange(3)}", 6)
            yield document + chain(f"question{i}", 1)
        else:
            yield chain(f"once{i}", 8)


@pytest.mark.parametrize("seed", range(4))
def test_the_books_balance_after_every_request(new_pool, clock, seed):
    pool = new_pool()
    for blocks in requests(seed):
        clock.advance(random.Random(seed).expovariate(0.5))
        serve(pool, blocks)

        pool.check()


def test_equal_requests_give_equal_choices(new_pool, clock):
    def hits():
        pool = new_pool()
        return [serve(pool, blocks) for blocks in requests(7)]

    assert hits() == hits()


def test_a_set_that_fits_is_never_evicted(new_pool, clock):
    pool = new_pool()
    chains = [chain(f"c{i}", 8) for i in range(5)]
    for blocks in chains:
        serve(pool, blocks)

    for _ in range(20):
        clock.advance(1.0)
        assert [serve(pool, blocks) for blocks in chains] == [8] * 5


def test_a_pinned_block_is_never_a_victim_and_a_leaf_goes_before_its_parent(new_pool, clock):
    pool = new_pool()
    pinned, free = chain("pinned", 4), chain("free", 4)
    serve(pool, pinned)
    serve(pool, free)

    with pool.pin(pinned):
        victims = pool.choose_victims(100)
        pool.free(victims)

        assert list(victims.hashes) == free[::-1]
        assert pool.match(pinned) == 4
    pool.check()


def test_an_order_with_prices_evicts_nothing_for_less_than_it_is_worth(clock):
    """Admission rests on it; the orders without prices store everything."""
    pool = SlotPool(SLOTS, ValueOrder(SLOTS), clock)
    serve(pool, chain("c", 8))

    assert pool.choose_victims(8, below=-math.inf).hashes == ()
    assert len(pool.choose_victims(8).hashes) == 8


def test_what_is_said_of_copies_changes_no_books(new_pool, clock):
    pool = new_pool()
    for i, blocks in enumerate(requests(3)):
        clock.advance(0.5)
        serve(pool, blocks)
        soon = pool.soon(5)

        assert len(soon) <= 5
        assert all(pool.match([block]) == 1 for block in soon)
        pool.note_copies(dict.fromkeys((*soon, *blocks, b"unknown".ljust(16)), i % 3))
        pool.check()


def test_a_copy_goes_before_a_last_copy_that_was_used_a_little_earlier(clock):
    """And not before one that was not used for long."""
    pool = SlotPool(SLOTS, ValueOrder(SLOTS), clock)
    for name in ("older", "old", "copied"):
        serve(pool, chain(name, 8))
        clock.advance(100.0 if name == "older" else 1.0)
    clock.advance(10.0)
    assert set(pool.soon(3)) == {chain(name, 8)[-1] for name in ("older", "old", "copied")}
    pool.note_copies({chain("copied", 8)[-1]: 1})

    gone = pool.choose_victims(16).hashes

    assert gone == (*chain("older", 8)[::-1], *chain("copied", 8)[::-1])


def test_an_order_starts_anew_when_everything_was_dropped(new_pool, clock):
    pool = new_pool()
    blocks = chain("c", 8)
    serve(pool, blocks)
    pool.free(pool.drop(blocks[0]))
    pool.check()

    assert serve(pool, blocks) == 0
    assert serve(pool, blocks) == 8


def test_a_scan_over_many_prompts_ends_within_the_pool(new_pool, clock):
    pool = new_pool()
    for i in range(300):
        clock.advance(0.1)
        serve(pool, chain(f"once{i}", 9))

    pool.check()
    assert pool.counts().resident <= SLOTS


def test_a_chain_longer_than_the_pool_keeps_its_head(new_pool, clock):
    pool = new_pool(8)

    serve(pool, chain("long", 30))

    pool.check()
    assert 0 < pool.match(chain("long", 30)) <= 8
