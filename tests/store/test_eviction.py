"""Least recently used, on its own: the pool's rules are in `test_pool.py`."""

import random

import pytest

from prefixfleet.store.eviction import LruOrder


@pytest.fixture
def order():
    return LruOrder()


def insert(order, slot, now):
    order.insert(slot, b"%d" % slot, parent=b"", now=now)
    order.offer(slot)


def evict_all(order):
    slots = []
    while (slot := order.first(now=0.0)) is not None:
        order.retract(slot)
        order.remove(slot)
        slots.append(slot)
    return slots


def test_nothing_is_first_when_nothing_is_offered(order):
    order.insert(3, b"x", parent=b"", now=1.0)

    assert order.first(now=2.0) is None


def test_the_oldest_use_goes_first(order):
    for slot, now in [(0, 3.0), (1, 1.0), (2, 2.0)]:
        insert(order, slot, now)

    assert evict_all(order) == [1, 2, 0]


def test_a_hit_moves_a_block_back(order):
    for slot in range(3):
        insert(order, slot, float(slot))

    order.touch(0, now=9.0)

    assert evict_all(order) == [1, 2, 0]


def test_asking_twice_gives_the_same_answer(order):
    insert(order, 5, 1.0)

    assert [order.first(now=1.0), order.first(now=2.0)] == [5, 5]


def test_a_retracted_block_is_passed_over_until_it_is_offered_again(order):
    insert(order, 0, 1.0)
    insert(order, 1, 2.0)
    order.retract(0)

    assert order.first(now=3.0) == 1
    order.offer(0)
    assert order.first(now=3.0) == 0


def test_a_slot_that_comes_back_has_the_age_of_its_new_block(order):
    insert(order, 0, 1.0)
    insert(order, 1, 2.0)
    order.retract(0)
    order.remove(0)

    insert(order, 0, 3.0)

    assert evict_all(order) == [1, 0]


def test_a_tie_goes_to_the_lower_slot(order):
    for slot in (2, 0, 1):
        insert(order, slot, 1.0)

    assert evict_all(order) == [0, 1, 2]


def test_memory_stays_bounded_by_what_is_offered(order):
    """A hot block that is pinned and released for hours must not grow the heap."""
    for slot in range(10):
        insert(order, slot, 0.0)

    for now in range(1, 10_000):
        order.retract(now % 10)
        order.touch(now % 10, now=float(now))
        order.offer(now % 10)

    assert len(order._heap) <= 2 * 10 + 65
    assert evict_all(order) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("seed", range(3))
def test_a_random_history_agrees_with_sorting(order, seed):
    chance = random.Random(seed)
    used, offered = {}, set()
    for now in range(2000):
        slot = chance.randrange(30)
        if slot not in used:
            insert(order, slot, float(now))
            used[slot] = now
            offered.add(slot)
            continue
        action = chance.choice(["touch", "toggle", "evict"])
        if action == "touch":
            order.touch(slot, now=float(now))
            used[slot] = now
        elif action == "toggle" and slot in offered:
            order.retract(slot)
            offered.remove(slot)
        elif action == "toggle":
            order.offer(slot)
            offered.add(slot)
        else:
            expected = min(offered, key=lambda s: used[s], default=None)
            assert order.first(now=float(now)) == expected
            if expected is not None:
                order.retract(expected)
                order.remove(expected)
                offered.remove(expected)
                del used[expected]
