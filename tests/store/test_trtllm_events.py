"""TensorRT-LLM's events: shapes of the published serializer, and which of them may be believed."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trtllm_server import TrtllmServer, moved, names_of, removed

from prefixfleet.store import engine_mirror, trtllm_events
from prefixfleet.store.chain import extend_chain
from prefixfleet.store.engine_mirror import EngineMirror
from prefixfleet.store.errors import ProtocolError
from prefixfleet.store.event_slices import TURN
from prefixfleet.store.trtllm_events import MAX_POLL_ITEMS, decode_poll
from prefixfleet.store.trtllm_mirror import QUIET_EVENTS, PolledMirror

KEY, BLOCK = b"k" * 32, 16


def root_of(salt):
    return (b"root" + salt.encode()).ljust(16, b"\0")


TOKENS = list(range(48))
CHAIN = extend_chain(root_of(""), TOKENS, BLOCK, KEY)
OTHERS = list(range(100, 132))
OTHER_CHAIN = extend_chain(root_of(""), OTHERS, BLOCK, KEY)


@pytest.fixture
def engine():
    return TrtllmServer(BLOCK)


@pytest.fixture
def polled():
    return PolledMirror(EngineMirror(root_of, BLOCK, KEY))


def poll(engine, polled):
    """What one poll makes of what the engine told; checks the changes against what is held."""
    before = polled.mirror.held
    body = json.dumps(list(engine._waiting)).encode()
    engine._waiting.clear()
    believed = set(before)
    for change in polled.take(decode_poll(body, BLOCK)):
        assert set(change.removed) <= believed
        assert len(change.removed) + len(change.added) <= TURN
        believed = (believed - set(change.removed)) | set(change.added)
    assert believed == polled.mirror.held
    return polled.mirror.held


def test_full_blocks_come_and_go_and_a_block_in_host_memory_stays(engine, polled):
    data = engine.stored([*TOKENS, 1, 2])  # the last block is not full
    engine.tell(data)
    assert poll(engine, polled) == set(CHAIN)

    names = names_of(data)
    engine.tell(moved(names[0]))
    engine.tell(removed(names[2], names[3]))

    assert poll(engine, polled) == set(CHAIN[:2])
    assert polled.whole
    assert not polled.is_losing


def test_a_chain_goes_on_in_a_later_event(engine, polled):
    first = engine.stored(TOKENS[:16])
    engine.tell(first)
    poll(engine, polled)
    engine.tell(engine.stored(TOKENS[16:], parent=names_of(first)[-1]))

    assert poll(engine, polled) == set(CHAIN)


def test_hashes_are_text_in_the_newer_manager_and_signed_in_some(engine, polled):
    data = engine.stored(TOKENS)
    for block, name in zip(data["blocks"], ("aa", "bb", "cc"), strict=True):
        block["block_hash"] = name
    engine.tell(data, hash_algo="v2_sha256", layer_group_id=0)
    signed = engine.stored(OTHERS)
    engine.tell(signed)
    poll(engine, polled)

    engine.tell(removed("cc"))
    engine.tell(removed(*(name - 2**64 for name in names_of(signed))))

    assert poll(engine, polled) == set(CHAIN[:2])


def test_a_lost_event_drops_what_was_known_and_is_counted(engine, polled):
    data = engine.stored(TOKENS)
    engine.tell(data)
    poll(engine, polled)

    engine.tell(removed(*names_of(data)), lost=True)
    engine.tell(engine.stored(OTHERS))

    assert poll(engine, polled) == set(OTHER_CHAIN)
    assert (polled.losses.gaps, polled.whole, polled.is_losing) == (1, False, True)
    for _ in range(QUIET_EVENTS):
        engine.tell(moved(1))
        poll(engine, polled)
    assert not polled.is_losing


def test_a_gap_inside_one_poll_drops_what_came_before_it(engine, polled):
    engine.tell(engine.stored(TOKENS))
    engine.tell(removed(1), lost=True)
    engine.tell(engine.stored(OTHERS))

    assert poll(engine, polled) == set(OTHER_CHAIN)


def test_a_buffer_that_overflowed_is_a_gap(polled):
    engine = TrtllmServer(BLOCK, buffer=2)
    engine.tell(engine.stored(TOKENS))
    poll(engine, polled)
    for tokens in (TOKENS, OTHERS, TOKENS):
        engine.tell(engine.stored(tokens))

    assert poll(engine, polled) == {*CHAIN, *OTHER_CHAIN}
    assert polled.losses.gaps == 1


def test_a_restarted_engine_holds_nothing_of_before(engine, polled):
    engine.tell(engine.stored(TOKENS))
    poll(engine, polled)

    engine.restart()
    engine.tell(engine.stored(OTHERS))

    assert poll(engine, polled) == set(OTHER_CHAIN)
    assert (polled.losses.restarts, polled.losses.gaps, polled.whole) == (1, 0, True)


def test_who_comes_late_knows_that_something_is_missing(engine, polled):
    engine._waiting.clear()
    engine.tell(engine.stored(TOKENS))

    assert poll(engine, polled) == set(CHAIN)
    assert (polled.losses.gaps, polled.whole) == (0, False)


def test_ranks_count_their_events_apart_and_hold_copies_of_their_own(engine, polled):
    engine.restart()
    engine._waiting.clear()
    first, second = engine.stored(TOKENS), engine.stored(TOKENS)
    for block, same in zip(second["blocks"], names_of(first), strict=True):
        block["block_hash"] = same  # equal keys have equal hashes on every rank
    engine.tell(first, rank=0)
    engine.tell(second, rank=1)
    assert poll(engine, polled) == set(CHAIN)

    engine.tell(removed(*names_of(first)), rank=0)
    assert poll(engine, polled) == set(CHAIN)
    engine.tell(removed(*names_of(first)), rank=1)

    assert poll(engine, polled) == set()
    assert polled.losses.gaps == 0


def test_only_the_widest_window_names_whole_prefixes(polled):
    engine = TrtllmServer(BLOCK, windows=(128, 8_192))
    engine.tell(engine.stored(OTHERS), window=128)
    engine.tell(engine.stored(TOKENS), window=8_192)

    assert poll(engine, polled) == set(CHAIN)
    assert polled.whole


def test_a_wider_window_that_shows_up_late_replaces_what_was_believed(engine, polled):
    engine._waiting.clear()
    engine.tell(engine.stored(OTHERS), window=128)
    assert poll(engine, polled) == set(OTHER_CHAIN)

    engine.tell(engine.stored(TOKENS), window=4_096)

    assert poll(engine, polled) == set(CHAIN)


def test_a_salt_that_is_told_is_part_of_the_chain(engine, polled):
    engine.tell(engine.stored(TOKENS, cache_salt="tenant"))

    assert poll(engine, polled) == set(extend_chain(root_of("tenant"), TOKENS, BLOCK, KEY))


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_salt": 4_711},
        {"lora_id": 3},
        {"lora_name": "adapter"},
        {"mm_keys": [{"type": "mm_key", "hash": "ab", "start_offset": 0}]},
    ],
)
def test_blocks_that_tokens_and_salt_do_not_name_are_not_followed(engine, polled, fields):
    engine.tell(engine.stored(TOKENS, **fields))

    assert poll(engine, polled) == set()
    assert polled.mirror.unfollowed == 3


@pytest.mark.parametrize("token", [{"token_id": "d1g3st"}, {"token_id": 5, "token_extra_id": 9}])
def test_blocks_after_an_image_are_not_followed_and_those_before_it_are(engine, polled, token):
    data = engine.stored(TOKENS)
    data["blocks"][1]["tokens"][3] = token
    engine.tell(data)

    assert poll(engine, polled) == set(CHAIN[:1])


@pytest.mark.parametrize("size", [8, 32])
def test_another_block_size_is_seen(polled, size):
    engine = TrtllmServer(size)
    engine.tell(engine.stored(list(range(96))))

    assert poll(engine, polled) == set()
    assert polled.mirror.other_block_tokens == size


def test_unknown_kinds_and_fields_are_skipped_and_counted_in_the_sequence(engine, polled):
    engine.tell({"type": "defragmented", "what": [1]}, more={"a": 1})
    engine.tell(engine.stored(TOKENS))

    assert poll(engine, polled) == set(CHAIN)
    assert polled.losses.gaps == 0


def test_an_answer_that_cannot_be_read_drops_what_was_known(engine, polled):
    engine.tell(engine.stored(TOKENS))
    poll(engine, polled)

    assert {block for change in polled.lost() for block in change.removed} == set(CHAIN)
    assert (polled.losses.malformed, polled.is_losing) == (1, True)


class Forgetful(EngineMirror):
    """Counts how often everything is dropped; the sets that it makes take long."""

    forgets = 0

    def forget(self):
        self.forgets += 1
        return super().forget()


@pytest.fixture
def forgetful():
    return PolledMirror(Forgetful(root_of, BLOCK, KEY))


def test_windows_that_rise_event_by_event_drop_what_was_known_once(forgetful):
    engine = TrtllmServer(BLOCK, buffer=5_000)
    for first in range(0, 2_000 * BLOCK, 50 * BLOCK):
        engine.tell(engine.stored(range(first, first + 50 * BLOCK)))
    assert len(poll(engine, forgetful)) == 2_000
    before = forgetful.mirror.forgets

    for window in range(10_000, 13_000):
        engine.tell(moved(1), window=window)
    engine.tell(engine.stored(TOKENS), window=13_000)

    assert poll(engine, forgetful) == set(CHAIN)
    assert forgetful.mirror.forgets == before + 1
    assert forgetful.losses.gaps == 0


def test_many_gaps_in_one_poll_are_all_counted_and_drop_what_was_known_once(engine, forgetful):
    engine.tell(engine.stored(OTHERS))
    poll(engine, forgetful)
    before = forgetful.mirror.forgets

    for _ in range(300):
        engine.tell(removed(1), lost=True)
        engine.tell(engine.stored(TOKENS))

    assert poll(engine, forgetful) == set(CHAIN)
    assert forgetful.mirror.forgets == before + 1
    assert forgetful.losses.gaps == 300


def test_a_prompt_of_many_blocks_is_taken_in_pieces_that_follow_each_other(engine, polled):
    tokens = list(range((2 * TURN + 5) * BLOCK))
    chain = extend_chain(root_of("tenant"), tokens, BLOCK, KEY)
    data = engine.stored(tokens, cache_salt="tenant")
    engine.tell(data)
    assert poll(engine, polled) == set(chain)

    engine.tell(removed(*names_of(data)[3:]))

    assert poll(engine, polled) == set(chain[:3])


def test_an_answer_of_too_many_hashes_is_lost():
    def body(hashes):
        data = {"type": "removed", "block_hashes": [1] * hashes}
        return json.dumps([GOOD | {"data": data}]).encode()

    with pytest.raises(ProtocolError, match=f"expected {MAX_POLL_ITEMS}"):
        decode_poll(body(MAX_POLL_ITEMS), BLOCK)
    (event,) = decode_poll(body(MAX_POLL_ITEMS - 1), BLOCK)

    changes = PolledMirror(EngineMirror(root_of, BLOCK, KEY)).take([event])
    assert len(list(changes)) > MAX_POLL_ITEMS / TURN  # so often others get a turn


def test_an_answer_of_too_many_values_is_not_even_decoded(monkeypatch):
    monkeypatch.setattr(trtllm_events, "MAX_POLL_VALUES", 10)

    with pytest.raises(ProtocolError, match="got 11 values, expected 10"):
        decode_poll(b"," * 11, BLOCK)
    with pytest.raises(ProtocolError, match="JSON"):
        decode_poll(b"," * 10, BLOCK)


def test_an_engine_that_tells_more_blocks_than_are_followed_is_believed_nothing(
    engine, polled, monkeypatch
):
    monkeypatch.setattr(engine_mirror, "MAX_COPIES", 4)
    data = engine.stored(TOKENS)
    engine.tell(data)
    assert poll(engine, polled) == set(CHAIN)

    engine.tell(data, layer_group_id=1)  # the same blocks, but something is kept for each copy

    assert poll(engine, polled) == set()
    assert (polled.losses.overflows, polled.whole, polled.is_losing) == (1, False, True)


NO_TOKEN = {"block_hash": 1, "tokens": [{"token_id": -1}]}
GOOD = {"event_id": 0, "window_size": 1, "data": {"type": "removed", "block_hashes": [1]}}


@pytest.mark.parametrize(
    ("told", "named"),
    [
        (b"[{", "truncated"),
        (b'{"events": []}', "array"),
        (b"[1]", "object"),
        ([GOOD | {"event_id": -1}], "event_id"),
        ([GOOD | {"event_id": True}], "event_id"),
        ([GOOD | {"attention_dp_rank": "x"}], "attention_dp_rank"),
        ([GOOD | {"attention_dp_rank": 1_024}], "attention_dp_rank"),
        ([GOOD | {"data": {"type": "removed", "block_hashes": ["a" * 129]}}], "block_hashes"),
        ([GOOD | {"data": {"type": "removed", "block_hashes": 1}}], "block_hashes"),
        ([GOOD | {"data": {"type": "removed", "block_hashes": [1.5]}}], "hash"),
        ([GOOD | {"data": {"type": "stored", "parent_hash": None}}], "blocks"),
        ([GOOD | {"data": {"type": "stored", "blocks": [{"block_hash": 1}]}}], "tokens"),
        ([GOOD | {"data": {"type": "stored", "blocks": [NO_TOKEN]}}], "token_id"),
    ],
)
def test_wrong_shapes_are_refused_by_name(told, named):
    body = told if isinstance(told, bytes) else json.dumps(told).encode()

    with pytest.raises(ProtocolError, match=named):
        decode_poll(body, BLOCK)


STEPS = ("store", "store unheard", "remove", "remove unheard", "restart", "poll")


@given(st.lists(st.sampled_from(STEPS), max_size=40))
def test_after_each_poll_only_a_loss_that_nothing_followed_can_be_believed_in(steps):
    """What the engine holds no more is believed only until it tells anything else."""
    engine, polled = TrtllmServer(BLOCK), PolledMirror(EngineMirror(root_of, BLOCK, KEY))
    held, unheard, first = {}, set(), 0
    for step in [*steps, "poll"]:
        waiting = len(engine._waiting)
        if step == "poll":
            assert poll(engine, polled) <= set(held.values()) | unheard
        elif step == "restart":
            engine.restart()
            held.clear()
        elif step.startswith("store"):
            first += BLOCK
            data = engine.stored(range(first, first + BLOCK))
            tokens = list(range(first, first + BLOCK))
            (held[names_of(data)[0]],) = extend_chain(root_of(""), tokens, BLOCK, KEY)
            engine.tell(data, lost=step == "store unheard")
        elif held:
            name = next(iter(held))
            block = held.pop(name)
            engine.tell(removed(name), lost=step == "remove unheard")
            if step == "remove unheard":
                unheard.add(block)
        if len(engine._waiting) > waiting or step == "restart":
            unheard.clear()  # something is told after it: its number shows the gap
