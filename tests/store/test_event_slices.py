"""Slices say what the events say; a mirror that is full believes less, and never more."""

import pytest
from engine_following import BLOCK, KEY, ROOT
from hypothesis import given
from hypothesis import strategies as st

from prefixfleet.store import engine_mirror, event_slices
from prefixfleet.store.chain import extend_chain
from prefixfleet.store.engine_events import AllCleared, BlocksRemoved, BlocksStored
from prefixfleet.store.engine_mirror import Change, EngineMirror
from prefixfleet.store.event_slices import slices, turns

BLOCKS = 12
TOKENS = tuple(range(BLOCKS * BLOCK))


def mirror():
    return EngineMirror(lambda salt: ROOT, BLOCK, KEY)


def stored(start=0, end=BLOCKS, *, medium="GPU", missing=0):
    """Blocks ``start`` to ``end`` of one prompt; the last ``missing`` token ids are left out."""
    ids = TOKENS[start * BLOCK : end * BLOCK - missing]
    return BlocksStored(
        hashes=tuple(range(start, end)), parent=start - 1 if start else None, token_ids=ids,
        block_tokens=BLOCK, medium=medium, group=0, salt="", scoped=False,
    )  # fmt: skip


def removed(start=0, end=BLOCKS, *, medium="GPU"):
    return BlocksRemoved(hashes=tuple(range(start, end)), medium=medium, group=0)


def ranged(build, **more):
    bounds = st.tuples(st.integers(0, BLOCKS), st.integers(0, BLOCKS)).map(sorted)
    media = st.sampled_from(["GPU", "CPU"])
    return st.builds(lambda b, m, **k: build(*b, medium=m, **k), bounds, media, **more)


EVENTS = st.lists(
    st.one_of(
        ranged(stored, missing=st.sampled_from([0, 1])), ranged(removed), st.just(AllCleared())
    )
)


def followed(told, held):
    """Apply what was ``told`` to a set that was ``held``, and check that it fits."""
    assert held.isdisjoint(told.added)
    assert held >= set(told.removed)
    return (held - set(told.removed)) | set(told.added)


@given(EVENTS, st.integers(2, 7))
def test_slices_say_what_the_events_say(events, size):
    whole, cut, held = mirror(), mirror(), set()
    held_whole = followed(whole.more(events), set())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(event_slices, "TURN", size)
        for piece in slices(events):
            assert sum(1 + len(getattr(event, "hashes", ())) for event in piece) <= size
            for turn in turns(cut.more(piece)):
                assert len(turn.added) + len(turn.removed) <= size
                held = followed(turn, held)

    assert held == cut.held == whole.held == held_whole
    assert cut.unfollowed == whole.unfollowed


@given(EVENTS, st.integers(1, 30))
def test_a_bounded_mirror_believes_less_and_never_more(events, bound):
    free, bounded = mirror(), mirror()
    for event in events:
        free.more([event])
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(engine_mirror, "MAX_COPIES", bound)
            bounded.more([event])
        assert bounded.held <= free.held
        assert len(bounded._copies) <= bound
        assert set(bounded._held) == set(bounded._ours) == {name for name, *_ in bounded._copies}
        assert bounded.refused or bounded.held == free.held


def test_a_block_that_left_came_back_and_left_in_one_batch_is_gone():
    engine = mirror()
    engine.more([stored(0, 1)])

    change = engine.more([removed(0, 1), stored(0, 1), removed(0, 1)])

    assert change == Change(removed=tuple(extend_chain(ROOT, TOKENS[:BLOCK], BLOCK, KEY)))


def test_a_change_of_nothing_is_a_turn_too():
    assert list(turns(Change())) == [Change()]
