"""Blocks under way: every rank hears the same, and nothing is lost when one goes."""

import time

import pytest

from prefixfleet.cluster.writes import AWAIT_S, LATE_S, Writes
from prefixfleet.store.errors import ProtocolError
from prefixfleet.store.eviction import LruOrder
from prefixfleet.store.pool import SlotPool


def blocks(*names):
    return [name.encode().ljust(16, b".") for name in names]


@pytest.fixture
def pool():
    pool = SlotPool(4, LruOrder(), time.monotonic)
    yield pool
    pool.check()


def test_a_written_block_is_whole_when_it_is_committed(pool, clock):
    writes = Writes(pool, shards=1, clock=clock)
    a, b = blocks("a", "b")

    slots = writes.reserve(1, 0, b"", [a, b])

    assert len({*slots} - {-1}) == 2
    assert writes.commit(1, 0, [a]) == [a]
    assert pool.match([a, b]) == 1
    assert writes.commit(1, 0, [b]) == [b]
    assert len(writes) == 0


def test_a_block_is_whole_only_when_every_rank_has_committed_it(pool, clock):
    writes = Writes(pool, shards=2, clock=clock)
    chain = blocks("a", "b")

    slots = [writes.reserve(session, rank, b"", chain) for session, rank in ((7, 0), (8, 1))]

    assert slots[0] == slots[1]
    assert writes.commit(7, 0, chain) == []
    assert writes.commit(8, 1, chain) == chain
    assert pool.match(chain) == 2


def test_a_rank_that_asks_after_another_has_committed_still_gets_its_slots(pool, clock):
    writes = Writes(pool, shards=2, clock=clock)
    chain = blocks("a")
    first = writes.reserve(7, 0, b"", chain)
    writes.commit(7, 0, chain)

    assert writes.reserve(8, 1, b"", chain) == first
    assert writes.commit(8, 1, chain) == chain


def test_what_cannot_be_stored_is_not_asked_room_for(pool, clock):
    """Another rank was told of it already, or what comes before it is not here."""
    writes = Writes(pool, shards=2, clock=clock)
    chain = blocks(*"abcdef")
    assert writes.undecided(0, b"", chain) == chain

    assert writes.reserve(7, 0, b"", chain).count(-1) == 2
    assert writes.undecided(1, b"", chain) == []
    assert writes.undecided(0, chain[4], chain[5:]) == []
    assert writes.undecided(0, chain[3], chain[4:]) == chain[4:]


def test_what_one_rank_was_refused_the_others_are_refused_too(pool, clock):
    writes = Writes(pool, shards=2, clock=clock)
    others = pool.reserve(b"", blocks("w", "x", "y"))
    chain = blocks("a", "b")

    first = writes.reserve(7, 0, b"", chain)
    for block in reversed(others.hashes):  # there is room again, too late
        others.abandon(block)

    assert [slot == -1 for slot in first] == [False, True]
    assert writes.reserve(8, 1, b"", chain) == first
    writes.commit(7, 0, chain)
    assert writes.commit(8, 1, chain) == chain[:1]


def test_a_refusal_is_forgotten_once_every_rank_has_heard_it(pool, clock):
    writes = Writes(pool, shards=2, clock=clock)
    others = pool.reserve(b"", blocks("w", "x", "y", "z"))
    for session, rank in ((7, 0), (8, 1)):
        assert writes.reserve(session, rank, b"", blocks("a")) == [-1]
    for block in reversed(others.hashes):
        others.abandon(block)

    slots = [writes.reserve(s, r, b"", blocks("a")) for s, r in ((7, 0), (8, 1))]

    assert slots[0] == slots[1] != [-1]
    writes.disconnect(7)
    writes.disconnect(8)


def test_a_block_that_is_being_written_is_not_given_out_twice(pool, clock):
    writes = Writes(pool, shards=1, clock=clock)
    chain = blocks("a")
    writes.reserve(1, 0, b"", chain)

    assert writes.reserve(2, 0, b"", chain) == [-1]
    assert writes.commit(2, 0, chain) == []  # not theirs
    assert writes.commit(1, 0, chain) == chain


def test_a_block_abandoned_by_one_rank_is_lost_for_all_and_its_slot_waits_for_the_last(pool, clock):
    writes = Writes(pool, shards=2, clock=clock)
    chain = blocks("a")
    writes.reserve(7, 0, b"", chain)
    writes.reserve(8, 1, b"", chain)

    writes.abandon(7, 0, chain)

    assert pool.counts().free == 3  # rank 1 may still write there
    assert writes.commit(8, 1, chain) == []
    assert pool.counts().free == 4
    assert pool.match(chain) == 0


def test_a_rank_that_asks_for_a_lost_block_gets_nothing_to_write(pool, clock):
    writes = Writes(pool, shards=2, clock=clock)
    chain = blocks("a")
    writes.reserve(7, 0, b"", chain)
    writes.abandon(7, 0, chain)

    assert writes.reserve(8, 1, b"", chain) == [-1]
    assert pool.counts().free == 4


@pytest.mark.parametrize("committed_first", [False, True])
def test_a_session_that_ends_frees_what_it_was_writing(pool, clock, committed_first):
    writes = Writes(pool, shards=2, clock=clock)
    chain = blocks("a", "b", "c")
    writes.reserve(7, 0, b"", chain)
    if committed_first:
        writes.commit(7, 0, chain)

    writes.disconnect(7)

    assert len(writes) == 0
    writes.expire()
    assert pool.counts().free == (4 if committed_first else 1)
    clock.advance(LATE_S)
    writes.expire()
    assert pool.counts().free == 4


def test_what_a_session_was_writing_when_it_ended_is_nobody_elses_for_a_while(pool, clock):
    """Its engine may not know yet, and go on copying."""
    writes = Writes(pool, shards=1, clock=clock)
    (late,) = writes.reserve(7, 0, b"", blocks("a"))
    writes.disconnect(7)

    taken = writes.reserve(8, 0, b"", blocks("b", "c", "d", "e"))
    assert late not in taken
    assert taken.count(-1) == 1
    assert pool.counts().quarantined == 1


def test_a_slot_that_two_ranks_left_is_free_a_while_after_the_last(pool, clock):
    writes = Writes(pool, shards=2, clock=clock)
    writes.reserve(7, 0, b"", blocks("a"))
    writes.reserve(8, 1, b"", blocks("a"))
    writes.disconnect(7)
    clock.advance(LATE_S - 1)
    writes.disconnect(8)
    clock.advance(LATE_S - 1)
    writes.expire()
    assert pool.counts().quarantined == 1

    clock.advance(1)
    writes.expire()
    assert pool.counts().free == 4


@pytest.mark.parametrize("committed", [True, False])
def test_a_block_that_one_rank_never_asks_for_is_not_kept_for_ever(pool, clock, committed):
    """Its question was lost with its connection; the others' connections live on."""
    writes = Writes(pool, shards=2, clock=clock)
    chain = blocks("a", "b")
    writes.reserve(7, 0, b"", chain)
    if committed:
        writes.commit(7, 0, chain)

    clock.advance(AWAIT_S - 1)
    writes.expire()
    assert pool.counts().reserved == 2
    clock.advance(1)
    writes.expire()

    if not committed:  # it may still write there
        assert pool.counts().reserved == 2
        assert writes.commit(7, 0, chain) == []
    assert pool.counts().free == 4
    slots = [writes.reserve(s, r, b"", chain) for s, r in ((8, 1), (7, 0))]
    assert slots[0] == slots[1]
    assert -1 not in slots[0]
    writes.commit(8, 1, chain)
    assert writes.commit(7, 0, chain) == chain
    clock.advance(AWAIT_S)
    writes.expire()
    assert pool.match(chain) == 2


def test_a_session_that_ends_leaves_the_writes_of_others(pool, clock):
    writes = Writes(pool, shards=1, clock=clock)
    writes.reserve(1, 0, b"", blocks("a"))
    writes.reserve(2, 0, b"", blocks("b"))

    writes.disconnect(1)

    assert writes.commit(2, 0, blocks("b")) == blocks("b")


def test_a_block_whose_parent_was_lost_is_not_resident(pool, clock):
    writes = Writes(pool, shards=1, clock=clock)
    a, b = blocks("a", "b")
    writes.reserve(1, 0, b"", [a, b])

    writes.abandon(1, 0, [a])

    assert writes.commit(1, 0, [b]) == []
    assert pool.counts().free == 4


def test_a_rank_that_the_engine_does_not_have_is_refused(pool, clock):
    writes = Writes(pool, shards=2, clock=clock)

    with pytest.raises(ProtocolError, match="rank 2, expected below 2"):
        writes.reserve(1, 2, b"", blocks("a"))


def test_refusals_that_nobody_asks_for_again_do_not_pile_up(pool, clock, monkeypatch):
    monkeypatch.setattr("prefixfleet.cluster.writes.MAX_REFUSALS", 8)
    writes = Writes(pool, shards=2, clock=clock)
    pool.reserve(b"", blocks("w", "x", "y", "z"))

    for i in range(50):
        assert writes.reserve(7, 0, b"", blocks(f"n{i}")) == [-1]

    assert len(writes._refused) == 8
