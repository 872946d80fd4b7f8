"""The books of a pool, behaviour by behaviour; `test_pool_machine.py` has the random histories."""

import pytest

from prefixfleet.store.chain import SEGMENT_BLOCKS
from prefixfleet.store.eviction import LruOrder
from prefixfleet.store.holds import PoolCounts
from prefixfleet.store.pool import SlotPool


@pytest.fixture
def pool(clock):
    made = SlotPool(6, LruOrder(), clock)
    yield made
    made.check()


def chain_of(text):
    """Block i is named by the first i + 1 letters."""
    return [text[: i + 1].encode() for i in range(len(text))]


def fill(pool, text, parent=b""):
    """Make the blocks of ``text`` that are missing resident."""
    hashes = [h for h in chain_of(text) if len(h) > len(parent)]
    with pool.reserve(parent, hashes) as reservation:
        for block in hashes:
            reservation.commit(block)
    pool.check()


def evict(pool, count):
    victims = pool.choose_victims(count)
    pool.free(victims)
    pool.check()
    return list(victims.hashes)


def used(**expected):
    counts = dict.fromkeys(PoolCounts.__slots__, 0) | expected
    counts["free"] = 6 - sum(n for name, n in counts.items() if name != "pinned")
    return PoolCounts(**counts)


# --- matching and pins


def test_a_match_counts_the_leading_resident_blocks(pool):
    fill(pool, "abc")

    assert pool.match(chain_of("abcd")) == 3
    assert pool.match(chain_of("ab")) == 2
    assert pool.match(chain_of("xbc")) == 0
    assert pool.match([]) == 0


def test_a_reserved_block_is_not_matched_before_it_is_committed(pool):
    with pool.reserve(b"", chain_of("ab")) as reservation:
        reservation.commit(b"a")

        assert pool.match(chain_of("ab")) == 1
        assert len(pool.pin(chain_of("ab")).hashes) == 1


def test_a_pin_names_the_slots_of_the_leading_run(pool):
    with pool.reserve(b"", chain_of("abc")) as reservation:
        for block in reservation.hashes:
            reservation.commit(block)

    with pool.pin(chain_of("abx")) as pin:
        assert pin.hashes == (b"a", b"ab")
        assert pin.slots == reservation.slots[:2]


def test_a_pin_may_begin_in_the_middle_of_a_chain(pool):
    fill(pool, "abc")

    with pool.pin(chain_of("abc")[1:]) as pin:
        assert pin.hashes == (b"ab", b"abc")


def test_a_pin_of_nothing_is_empty_and_released_like_any_other(pool):
    pin = pool.pin(chain_of("abc"))

    pin.release()

    assert (pin.hashes, pin.slots) == ((), ())


def test_pinned_blocks_are_never_victims(pool):
    fill(pool, "abc")
    fill(pool, "x")

    with pool.pin(chain_of("ab")):
        assert pool.counts() == used(resident=4, pinned=2)
        assert set(evict(pool, 6)) == {b"abc", b"x"}

    assert evict(pool, 6) == [b"ab", b"a"]


def test_a_block_is_held_until_its_last_pin_goes(pool):
    fill(pool, "a")
    first, second = pool.pin([b"a"]), pool.pin([b"a"])

    first.release()
    first.release()

    assert evict(pool, 1) == []
    second.release()
    assert evict(pool, 1) == [b"a"]


# --- reserving


def test_blocks_that_are_there_already_get_no_slot(pool):
    fill(pool, "ab")

    with pool.reserve(b"", chain_of("abcd")) as reservation:
        assert reservation.slots[:2] == (-1, -1)
        assert min(reservation.slots[2:]) >= 0
        assert not reservation.commit(b"a")


def test_blocks_that_somebody_else_writes_get_no_slot(pool):
    first = pool.reserve(b"", chain_of("ab"))

    with first, pool.reserve(b"", chain_of("abc")) as second:
        assert second.slots[:2] == (-1, -1)
        assert second.slots[2] >= 0


def test_the_first_block_without_room_ends_a_reservation(pool):
    with pool.reserve(b"", chain_of("abcdefgh")) as reservation:
        assert sorted(reservation.slots[:6]) == [0, 1, 2, 3, 4, 5]
        assert reservation.slots[6:] == (-1, -1)
        assert pool.free_slots == 0


@pytest.mark.parametrize("parent", [b"unknown", b"abc"])
def test_nothing_follows_a_parent_that_is_not_here(pool, parent):
    fill(pool, "ab")

    with pool.reserve(parent, [parent + b"x"]) as reservation:
        assert reservation.slots == (-1,)


def test_a_leaving_block_cannot_be_reserved_nor_followed(pool):
    """Its withdrawal from the index may still be on its way, behind a new publication."""
    fill(pool, "a")
    victims = pool.choose_victims(1)

    with pool.reserve(b"", chain_of("ab")) as again, pool.reserve(b"a", [b"ab"]) as child:
        assert again.slots == (-1, -1)
        assert child.slots == (-1,)

    pool.free(victims)
    with pool.reserve(b"", chain_of("ab")) as again:
        assert min(again.slots) >= 0


def test_leaving_a_reservation_gives_back_what_was_not_committed(pool):
    with pool.reserve(b"", chain_of("abc")) as reservation:
        reservation.commit(b"a")

    assert pool.counts() == used(resident=1)


def test_an_abandoned_block_orphans_what_should_follow_it(pool):
    with pool.reserve(b"", chain_of("abc")) as reservation:
        reservation.commit(b"a")
        reservation.abandon(b"ab")
        reservation.abandon(b"ab")

        assert not reservation.commit(b"abc")
        assert not reservation.commit(b"ab")

    assert pool.match(chain_of("abc")) == 1


def test_committing_a_child_before_its_parent_drops_it(pool):
    with pool.reserve(b"", chain_of("ab")) as reservation:
        assert not reservation.commit(b"ab")
        assert reservation.commit(b"a")

    assert pool.counts() == used(resident=1)


def test_a_child_waits_for_a_parent_that_another_reservation_writes(pool):
    with pool.reserve(b"", [b"a"]) as first, pool.reserve(b"a", [b"ab"]) as second:
        first.commit(b"a")

        assert second.commit(b"ab")

    assert pool.match(chain_of("ab")) == 2


def test_a_child_of_a_reservation_that_came_to_nothing_is_dropped(pool):
    with pool.reserve(b"", [b"a"]):
        second = pool.reserve(b"a", [b"ab"])
    fill(pool, "a")  # somebody else writes the parent, in another slot perhaps

    with second:
        assert not second.commit(b"ab")

    assert pool.match(chain_of("ab")) == 1


def test_a_block_named_twice_in_one_reservation_has_one_slot(pool):
    with pool.reserve(b"", [b"a", b"a", b"ab"]) as reservation:
        assert reservation.slots[1] == -1
        assert reservation.commit(b"a")
        assert reservation.commit(b"ab")


def test_a_reserved_child_keeps_its_parent_from_eviction(pool):
    fill(pool, "a")

    with pool.reserve(b"a", [b"ab"]):
        assert evict(pool, 1) == []

    assert evict(pool, 1) == [b"a"]


# --- quarantine


def test_a_slot_in_quarantine_is_nobodys_until_it_is_released(pool):
    """A pull that ran out of time may still write into it."""
    with pool.reserve(b"", chain_of("ab")) as reservation:
        slots = [reservation.quarantine(block) for block in reservation.hashes]
        assert slots == list(reservation.slots)
        assert reservation.quarantine(b"a") == -1

    assert pool.counts() == used(quarantined=2)
    with pool.reserve(b"", chain_of("abcdef")) as other:
        assert not set(slots) & set(other.slots)
        assert sum(slot >= 0 for slot in other.slots) == 4

    pool.release_quarantine(slots)
    assert pool.counts() == used()


# --- eviction


def test_a_chain_is_evicted_from_its_end(pool):
    fill(pool, "abc")

    assert evict(pool, 2) == [b"abc", b"ab"]
    assert pool.match(chain_of("abc")) == 1


def test_the_least_recently_used_chain_goes_first(pool, clock):
    for text in ("a", "b", "c"):
        fill(pool, text)
        clock.advance(1)
    with pool.pin([b"a"]):
        pass

    assert evict(pool, 2) == [b"b", b"c"]


def test_a_shared_prefix_outlives_every_chain_on_it(pool):
    fill(pool, "ab")
    fill(pool, "abx", parent=b"ab")
    fill(pool, "aby", parent=b"ab")

    assert set(evict(pool, 2)) == {b"abx", b"aby"}
    assert evict(pool, 6) == [b"ab", b"a"]


def test_victims_are_not_matched_and_not_free_until_they_are_freed(pool):
    fill(pool, "ab")

    victims = pool.choose_victims(1)

    assert pool.match(chain_of("ab")) == 1
    assert pool.counts() == used(resident=1, leaving=1)
    assert pool.segments_of(victims.hashes) == {b"a": [b"ab"]}
    pool.free(victims)
    assert pool.counts() == used(resident=1)


def test_victims_can_be_freed_once(pool):
    fill(pool, "a")
    victims = pool.choose_victims(1)
    pool.free(victims)

    with pytest.raises(AssertionError, match="freed already"):
        pool.free(victims)


def test_two_evictions_at_once_choose_different_blocks(pool):
    fill(pool, "ab")

    child, parent = pool.choose_victims(1), pool.choose_victims(1)
    pool.free(parent)
    pool.free(child)

    assert (child.hashes, parent.hashes) == ((b"ab",), (b"a",))
    assert pool.counts() == used()


def test_a_corrupt_block_takes_its_descendants_along(pool):
    fill(pool, "abc")
    fill(pool, "ax", parent=b"a")
    fill(pool, "z")

    victims = pool.drop(b"ab")

    assert victims.hashes == (b"abc", b"ab")
    pool.free(victims)
    assert {block for block, _ in pool.resident()} == {b"a", b"ax", b"z"}


def test_a_dropped_block_that_is_pinned_keeps_its_slot_until_the_pin_goes(pool):
    """Somebody reads it; they get what they get, but nobody writes under their eyes."""
    fill(pool, "a")
    pin = pool.pin([b"a"])

    pool.free(pool.drop(b"a"))

    assert pool.match([b"a"]) == 0
    with pool.reserve(b"", chain_of("uvwxyz")) as other:
        assert not set(pin.slots) & set(other.slots)
    assert pool.counts() == used(leaving=1, pinned=1)
    pin.release()
    assert pool.counts() == used()


def test_a_dropped_block_can_be_written_anew_while_the_old_one_is_read(pool):
    fill(pool, "a")

    with pool.pin([b"a"]) as old:
        pool.free(pool.drop(b"a"))
        fill(pool, "a")

        with pool.pin([b"a"]) as new:
            assert new.slots != old.slots


def test_a_drop_orphans_what_is_being_written_after_it(pool):
    fill(pool, "a")

    with pool.reserve(b"a", [b"ab"]) as reservation:
        pool.free(pool.drop(b"a"))

        assert not reservation.commit(b"ab")

    assert pool.counts() == used()


def test_what_is_leaving_and_pinned_keeps_its_slot_until_the_pin_goes(pool):
    fill(pool, "abc")
    victims = pool.choose_victims(2)
    pin = pool.pin_leaving(victims.slots)
    assert pin.hashes == victims.hashes

    pool.free(victims)

    pool.check()
    assert pool.free_slots == 3
    assert not pool.knows(victims.hashes[0])
    pin.release()
    assert pool.free_slots == 5


@pytest.mark.parametrize("block", [b"unknown", b"ab"])
def test_dropping_what_is_not_resident_does_nothing(pool, block):
    with pool.reserve(b"", chain_of("ab")):
        assert pool.drop(block).hashes == ()


# --- segments


def test_blocks_are_grouped_by_the_first_block_of_their_segment(clock):
    pool = SlotPool(4 * SEGMENT_BLOCKS, LruOrder(), clock)
    trunk = [b"%16d" % i for i in range(2 * SEGMENT_BLOCKS + 1)]
    branch = [b"b%15d" % i for i in range(SEGMENT_BLOCKS)]
    fill_hashes(pool, b"", trunk)
    fill_hashes(pool, trunk[9], branch)

    groups = pool.segments_of([*trunk, *branch, b"unknown"])

    first, second = trunk[:SEGMENT_BLOCKS], trunk[SEGMENT_BLOCKS : 2 * SEGMENT_BLOCKS]
    split = SEGMENT_BLOCKS - 10  # the branch begins at position 10
    assert groups == {
        trunk[0]: first + branch[:split],
        trunk[SEGMENT_BLOCKS]: second,
        trunk[-1]: trunk[-1:],
        branch[split]: branch[split:],
    }
    pool.check()


def test_resident_blocks_come_with_their_segment_parents_first(pool):
    fill(pool, "abc")
    fill(pool, "ax", parent=b"a")
    evict(pool, 1)
    fill(pool, "z")

    found = list(pool.resident())

    assert set(found) <= {(b, b[:1]) for b in [b"a", b"ab", b"abc", b"ax", b"z"]}
    order = [block for block, _ in found]
    assert all(len(b) == 1 or order.index(b[:-1]) < order.index(b) for b in order)


def fill_hashes(pool, parent, hashes):
    with pool.reserve(parent, hashes) as reservation:
        assert all(reservation.commit(block) for block in hashes)
