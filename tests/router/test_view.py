"""The view answers as the index would, and knows some things before it."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixfleet.router import assumed
from prefixfleet.router.assumed import ASSUMED_S
from prefixfleet.router.view import (
    INHERIT_S,
    LOAD_STEP_BLOCKS,
    REPUBLISH_S,
    SETTLE_S,
    SUSPECT_S,
    View,
)
from prefixfleet.store.index import FIELD_BYTES, IndexEvent, Membership, Snapshot

A, B, C = Membership("a", 1, 0), Membership("b", 2, 1), Membership("c", 3, 70)


def chain(length, salt=0):
    return [bytes([salt, i % 256, i // 256]).ljust(16, b"\7") for i in range(length)]


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def view(clock):
    view = View(clock)
    for member in (A, B, C):
        view.apply(IndexEvent("join", member))
    return view


def publish(view, member, blocks):
    view.apply(IndexEvent("publish", member, tuple(blocks)))


def test_every_node_is_found_with_its_own_length(view):
    blocks = chain(300)
    for member, length in ((A, 300), (B, 1), (C, 257)):
        publish(view, member, blocks[:length])

    assert view.leading(blocks) == {"a": 300, "b": 1, "c": 257}
    assert view.leading(blocks[:100]) == {"a": 100, "b": 1, "c": 100}
    assert view.leading(chain(5, salt=9)) == {}
    assert view.leading([]) == {}


@given(st.lists(st.integers(0, 40), min_size=3, max_size=3), st.integers(0, 40))
def test_lengths_are_exact_for_any_holdings(lengths, asked):
    view = View(lambda: 0.0)
    blocks = chain(40)
    for member, length in zip((A, B, C), lengths, strict=True):
        view.apply(IndexEvent("join", member))
        publish(view, member, blocks[:length])

    expected = {m.node: min(n, asked) for m, n in zip((A, B, C), lengths, strict=True)}
    assert view.leading(blocks[:asked]) == {node: n for node, n in expected.items() if n}


def test_withdrawn_blocks_are_gone_and_leave_nothing_behind(view):
    publish(view, A, chain(10))
    view.apply(IndexEvent("withdraw", A, tuple(chain(10)[4:])))

    assert view.leading(chain(10)) == {"a": 4}
    assert len(view) == 4


def test_withdrawing_what_was_never_held_changes_nothing(view):
    view.apply(IndexEvent("withdraw", A, tuple(chain(3))))

    assert len(view) == 0


def test_a_node_that_left_matches_nothing_and_neither_does_the_next_in_its_slot(view):
    publish(view, A, chain(10))
    publish(view, B, chain(4))
    view.apply(IndexEvent("leave", A))

    assert view.leading(chain(10)) == {"b": 4}

    view.apply(IndexEvent("join", Membership("new", 9, A.slot)))

    assert view.leading(chain(10)) == {"b": 4}


def test_a_node_that_joined_again_starts_empty_and_its_old_life_changes_nothing(view):
    publish(view, A, chain(10))
    again = Membership("a", 8, 5)
    view.apply(IndexEvent("join", again))
    publish(view, A, chain(10))

    assert view.leading(chain(10)) == {}

    publish(view, again, chain(3))
    view.apply(IndexEvent("leave", A))

    assert view.leading(chain(10)) == {"a": 3}


def test_events_of_unknown_nodes_are_ignored(view):
    publish(view, Membership("x", 1, 9), chain(3))
    view.apply(IndexEvent("leave", Membership("x", 1, 9)))

    assert len(view) == 0


def load(view, members, held):
    holders: dict[bytes, int] = {}
    for member, blocks in held.items():
        for block in blocks:
            holders[block[:FIELD_BYTES]] = holders.get(block[:FIELD_BYTES], 0) | 1 << member.slot
    return view.load(Snapshot(tuple(members), holders, "0-1"))


def test_a_snapshot_replaces_everything(view):
    publish(view, A, chain(10))
    publish(view, B, chain(9, salt=3))

    steps = load(view, (A, B, C), {B: chain(2), C: chain(5)})
    next(steps)
    assert view.leading(chain(10)) == {"a": 10}  # half loaded is not loaded
    list(steps)

    assert view.leading(chain(10)) == {"b": 2, "c": 5}
    assert view.leading(chain(9, salt=3)) == {}
    assert set(view.members) == {"a", "b", "c"}
    assert len(view) == 5


def test_a_big_index_is_taken_in_by_bounded_steps_and_the_old_view_answers_meanwhile(view):
    """Dynamo 10580: a dump of two million events held the router up for 45 s."""
    publish(view, A, chain(10))
    count, sizes = 10 * LOAD_STEP_BLOCKS, []
    many = [i.to_bytes(16, "big") for i in range(1, count + 1)]
    holders = {block[-FIELD_BYTES:]: 1 << B.slot for block in many}

    for _ in view.load(Snapshot((A, B, C), holders, "0-1")):
        sizes.append(len(view._blocks))
        if len(sizes) <= count // LOAD_STEP_BLOCKS:
            assert view.leading(chain(10)) == {"a": 10}

    assert len(sizes) == count // LOAD_STEP_BLOCKS + 1
    assert max(after - before for before, after in pairwise(sizes[:-1])) <= LOAD_STEP_BLOCKS
    assert len(view) == count


def test_a_node_that_left_while_events_were_lost_is_believed_for_a_while(view, clock):
    publish(view, A, chain(10))
    list(load(view, (B, C), {}))

    assert view.leading(chain(10)) == {"a": 10}
    assert set(view.members) == {"b", "c"}

    clock.now += INHERIT_S

    assert view.leading(chain(10)) == {}
    assert len(view) == 0


def test_after_the_index_lost_its_memory_every_node_is_believed_until_it_has_published(view, clock):
    publish(view, A, chain(10))
    publish(view, B, chain(4))
    list(load(view, (), {}))
    assert view.leading(chain(10)) == {"a": 10, "b": 4}
    assert view.awaited == {"a", "b", "c"}

    again = Membership("a", 900, B.slot)  # the slots of the index begin anew
    view.apply(IndexEvent("join", again))
    assert view.awaited == {"b", "c"}
    publish(view, again, chain(2))
    view.forget([again])
    assert view.leading(chain(10)) == {"a": 10, "b": 4}

    clock.now += INHERIT_S

    assert view.awaited == set()
    assert view.leading(chain(10)) == {"a": 10}  # it has joined, and has not published all yet
    view.settle(again)
    clock.now += SETTLE_S
    assert view.leading(chain(10)) == {"a": 2}
    view.forget([again])
    assert view.leading(chain(10)) == {}


def test_who_never_says_that_it_has_published_all_is_not_believed_for_ever(view, clock):
    publish(view, A, chain(10))
    again = Membership("a", 900, B.slot)
    list(load(view, (again,), {}))
    clock.now += REPUBLISH_S - 1
    assert view.leading(chain(10)) == {"a": 10}

    clock.now += 1

    assert view.leading(chain(10)) == {}
    assert len(view) == 0


def test_what_a_node_withdraws_before_it_has_published_all_is_believed_no_more(view):
    publish(view, A, chain(10))
    again = Membership("a", 900, B.slot)
    list(load(view, (again,), {}))
    view.apply(IndexEvent("publish", again, tuple(chain(10))))

    view.apply(IndexEvent("withdraw", again, tuple(chain(10)[4:])))

    assert view.leading(chain(10)) == {"a": 4}


def test_an_index_that_loses_its_memory_twice_leaves_what_the_first_life_had(view, clock):
    publish(view, A, chain(10))
    list(load(view, (), {}))
    again = Membership("a", 900, B.slot)
    view.apply(IndexEvent("join", again))
    publish(view, again, chain(2))

    list(load(view, (), {}))
    third = Membership("a", 901, A.slot)
    view.apply(IndexEvent("join", third))

    assert view.leading(chain(10)) == {"a": 10}
    view.settle(again)  # of a life that is over: says nothing
    view.settle(third)
    clock.now += SETTLE_S
    assert view.leading(chain(10)) == {}
    assert len(view) == 0


def test_a_node_that_restarts_is_not_believed(view):
    publish(view, A, chain(10))
    view.apply(IndexEvent("join", Membership("a", 900, 5)))

    assert view.leading(chain(10)) == {}


def test_bits_of_the_gone_are_used_again(view, clock):
    for i in range(200):
        member = Membership("x", 100 + i, 7)
        view.apply(IndexEvent("join", member))
        publish(view, member, chain(3))
        if i % 3 == 0:
            list(load(view, (A, B, C), {}))
            clock.now += INHERIT_S

    assert view._bits_made < 12


def test_members_whose_lease_ended_are_forgotten(view):
    publish(view, A, chain(3))
    publish(view, B, chain(3))

    view.forget([A])

    assert view.leading(chain(3)) == {"b": 3}


def test_a_node_that_failed_before_our_eyes_matches_nothing_for_a_while(view, clock):
    publish(view, A, chain(3))
    view.suspect("a")

    assert view.leading(chain(3)) == {}

    clock.now += SUSPECT_S

    assert view.leading(chain(3)) == {"a": 3}


def test_a_prompt_just_routed_counts_until_it_is_old(view, clock):
    view.assume("a", chain(20))

    assert view.expected(chain(30)) == {"a": 20}
    assert view.expected(chain(7)) == {"a": 7}
    assert view.expected(chain(7, salt=1)) == {}

    clock.now += 2 * ASSUMED_S

    assert view.expected(chain(30)) == {}


def test_a_prompt_that_keeps_coming_keeps_counting(view, clock):
    for _ in range(5):
        view.assume("a", chain(20))
        clock.now += ASSUMED_S * 0.9

        assert view.expected(chain(20)) == {"a": 20}


def test_assumptions_end_with_the_life_of_the_node(view):
    for forget in (
        lambda: view.suspect("a"),
        lambda: view.apply(IndexEvent("join", Membership("a", 50, 3))),
        lambda: view.apply(IndexEvent("leave", Membership("a", 50, 3))),
    ):
        view.assume("a", chain(20))
        forget()

        assert view.expected(chain(20)) == {}


def test_assumptions_are_bounded(view, clock, monkeypatch):
    monkeypatch.setattr(assumed, "MAX_ASSUMED_BLOCKS", 1_000)
    for i in range(0, 10_000, 100):
        clock.now += 0.1
        view.assume("a", [(i + k).to_bytes(16) for k in range(100)])

    assert len(view._assumed) <= 2 * 1_000


def test_what_was_assumed_of_a_node_that_is_gone_is_not_assumed_of_another(view, clock):
    """Bits are used again, but not while a block may still have them."""
    for number in range(12):
        view.assume(f"gone-{number}", chain(20))
        view.suspect(f"gone-{number}")
        view.assume("a", chain(5, salt=number + 1))
        clock.now += ASSUMED_S / 3

        assert view.expected(chain(20)) == {}
        assert view.expected(chain(5, salt=number + 1)) == {"a": 5}
    assert view._assumed._bits_made <= 10


def test_every_node_is_expected_to_hold_what_it_was_sent(view):
    for number, node in enumerate("cab"):
        view.assume(node, chain(10 * (number + 1)))

    assert view.expected(chain(25)) == {"c": 10, "a": 20, "b": 25}
