"""An engine's own cache, followed by its events: shapes on the wire, rules of known faults."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixfleet.store.chain import extend_chain
from prefixfleet.store.engine_events import AllCleared, BlocksStored, decode_batch
from prefixfleet.store.engine_mirror import Change, EngineMirror, Follow
from prefixfleet.store.errors import ProtocolError

KEY, BLOCK = b"k" * 32, 4


def root_of(salt):
    return (b"root" + salt.encode()).ljust(16, b"\0")


ROOT = root_of("")
TOKENS = list(range(12))
CHAIN = extend_chain(ROOT, TOKENS, BLOCK, KEY)
NAMES = [101, 102, 103]


def frames(*events, sequence=0, topic=b"kv@0"):
    payload = msgpack.packb([1.5, list(events), 0])
    return [*([topic] if topic else []), sequence.to_bytes(8, "big"), payload]


def stored(names=NAMES, tokens=TOKENS, parent=None, **more):
    event = {"type": "BlockStored", "block_hashes": names, "parent_block_hash": parent}
    event |= {"token_ids": tokens, "block_size": BLOCK, "lora_id": None, "medium": "GPU"}
    return event | more


def removed(names, **more):
    return {"type": "BlockRemoved", "block_hashes": names, "medium": "GPU"} | more


@pytest.fixture
def mirror():
    return EngineMirror(root_of, BLOCK, KEY)


def follow(mirror, *events, sequence=None):
    sequence = (mirror.expected or 0) if sequence is None else sequence
    return mirror.follow(decode_batch(frames(*events, sequence=sequence)))


def test_both_encodings_and_both_framings_say_the_same():
    as_map = decode_batch(frames(stored(), {"type": "AllBlocksCleared"}, sequence=7))
    as_array = decode_batch(
        frames(
            ["BlockStored", NAMES, None, TOKENS, BLOCK, None, "GPU"], ["AllBlocksCleared"],
            sequence=7, topic=None,
        )
    )  # fmt: skip

    assert as_map == as_array
    assert as_map.sequence == 7
    assert as_map.events[1] == AllCleared()


def test_hashes_may_be_whole_digests():
    (event,) = decode_batch(frames(stored(names=[b"a" * 32, b"b" * 32, b"c" * 32]))).events

    assert isinstance(event, BlocksStored)
    assert event.hashes[0] == b"a" * 32


def test_unknown_events_and_fields_are_skipped():
    batch = decode_batch(frames({"type": "BlockDreamt"}, ["BlockSung", 1], stored(colour="red")))

    assert len(batch.events) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        [b"x"], [b"t", b"short", b""], [*frames(), b"more"],
        [b"t", bytes(8), b"\xc1"], [b"t", bytes(8), msgpack.packb({})],
        [b"t", bytes(8), msgpack.packb([1.0])],
        frames(7), frames([]), frames(stored(names="abc")), frames(stored(tokens=["a"])),
        frames(stored(tokens=[-1])), frames({"type": "BlockRemoved"}),
        frames(stored(parent=[1])),
    ],
    ids=repr,
)  # fmt: skip
def test_junk_is_refused_whole(wrong):
    with pytest.raises(ProtocolError, match="engine events"):
        decode_batch(wrong)


def sequence_or_refusal(payload):
    try:
        return decode_batch([b"t", bytes(8), payload]).sequence
    except ProtocolError:
        return "refused"


@given(st.binary(max_size=200))
def test_no_bytes_crash_the_decoder(payload):
    assert sequence_or_refusal(payload) in (0, "refused")


def test_stored_blocks_get_our_names(mirror):
    outcome, change = follow(mirror, stored(NAMES[:2], TOKENS[:8]))
    _, more = follow(mirror, stored(NAMES[2:], TOKENS[8:], parent=NAMES[1]))

    assert outcome is Follow.APPLIED
    assert set(change.added) == set(CHAIN[:2])
    assert more.added == (CHAIN[2],)
    assert mirror.held == set(CHAIN)


def test_two_copies_need_two_removals(mirror):
    """vLLM 48933, Dynamo 8012: the first removal must not take the block out."""
    follow(mirror, stored(), stored())

    _, first = follow(mirror, removed(NAMES[2:]))
    _, second = follow(mirror, removed(NAMES[2:]))

    assert first == Change()
    assert second == Change(removed=(CHAIN[2],))


def test_a_removal_from_another_medium_or_group_is_not_this_copy(mirror):
    follow(mirror, stored())

    _, change = follow(mirror, removed(NAMES, medium="CPU"), removed(NAMES, group_idx=1))

    assert change == Change()
    assert mirror.held == set(CHAIN)


def test_a_restarted_engine_holds_nothing_of_before(mirror):
    follow(mirror, stored(), sequence=0)
    follow(mirror, sequence=1)

    outcome, change = follow(mirror, stored(NAMES[:1], TOKENS[:4]), sequence=0)

    assert outcome is Follow.RESTARTED
    assert change.added == ()
    assert set(change.removed) == set(CHAIN[1:])
    assert mirror.held == {CHAIN[0]}


def test_a_gap_applies_nothing_until_it_is_replayed(mirror):
    follow(mirror, stored(NAMES[:1], TOKENS[:4]), sequence=0)

    assert follow(mirror, removed(NAMES[:1]), sequence=2) == (Follow.GAP, Change())
    assert mirror.expected == 1
    follow(mirror, sequence=1)
    assert follow(mirror, removed(NAMES[:1]), sequence=2)[1].removed == (CHAIN[0],)


def test_a_replay_may_overlap_what_came_live(mirror):
    for sequence in (0, 1, 2):
        follow(mirror, sequence=sequence)

    assert follow(mirror, stored(), sequence=1) == (Follow.REPEATED, Change())
    assert mirror.held == set()


def test_all_cleared_drops_everything_and_goes_on(mirror):
    follow(mirror, stored())

    _, change = follow(mirror, {"type": "AllBlocksCleared"}, stored(NAMES[:1], TOKENS[:4]))

    assert set(change.removed) == set(CHAIN[1:])
    assert mirror.held == {CHAIN[0]}
    assert mirror.expected == 2


@pytest.mark.parametrize(
    "salted",
    [
        {"extra_keys": [["tenant"], None, None]},
        {"extra_keys": ["tenant", None, None]},
        {"cache_salt": "tenant"},
    ],
    ids=["vllm", "vllm before tags", "sglang"],
)
def test_a_salt_is_part_of_the_root_and_of_all_that_follows(mirror, salted):
    """A tenant's own prefixes are followed like any, and are nobody else's."""
    _, change = follow(mirror, stored(NAMES[:2], TOKENS[:8], **shortened(salted)))
    _, more = follow(mirror, stored(NAMES[2:], TOKENS[8:], parent=NAMES[1]))

    chain = extend_chain(root_of("tenant"), TOKENS, BLOCK, KEY)
    assert set(change.added) == set(chain[:2])
    assert more.added == (chain[2],)
    assert mirror.held.isdisjoint(CHAIN)


def shortened(fields):
    """Extra keys for two blocks."""
    return {k: v[:2] if isinstance(v, list) else v for k, v in fields.items()}


@pytest.mark.parametrize(
    "scope",
    [
        {"lora_id": 1},
        {"lora_name": "a"},
        {"lora_name": "a", "extra_keys": [["a", "tenant"], ["a"], ["a"]]},
        {"lora_name": 7, "lora_id": 1},
        {"extra_keys": [[["an image", 0]], None, None]},
        {"extra_keys": [["tenant", "and more"], None, None]},
        {"extra_keys": [["tenant"], ["in a later block"], None]},
        {"cache_salt": "tenant", "extra_keys": [["tenant"], [["an image", 3]], None]},
        {"cache_salt": 7},
    ],
)
def test_blocks_with_lora_or_image_are_counted_and_not_followed(mirror, scope):
    """Their tokens alone do not name them; following them would share what must not be shared."""
    _, change = follow(mirror, stored(**scope))

    assert change == Change()
    assert mirror.unfollowed == 3


def adapter_root(name, salt):
    return (b"lora" + f"{name}/{salt}".encode()).ljust(16, b"\0")


@pytest.mark.parametrize(
    ("salt", "keys"),
    [
        ("", None),
        ("", [["a"], ["a"], ["a"]]),
        ("tenant", [["a", "tenant"], ["a"], ["a"]]),
        ("a", [["a", "a"], ["a"], ["a"]]),
    ],
)
def test_an_adapters_blocks_have_a_root_of_their_own(salt, keys):
    """vLLM names the adapter with each block, before the salt, and neither with what it is."""
    mirror = EngineMirror(root_of, BLOCK, KEY, adapter_root)
    first, rest = stored(NAMES[:1], TOKENS[:4]), stored(NAMES[1:], TOKENS[4:], parent=NAMES[0])
    keys = keys or [None] * 3
    scope = {"lora_name": "a", "lora_id": 1}

    follow(
        mirror,
        first | scope | {"extra_keys": keys[:1] if keys[0] else None},
        rest | scope | {"extra_keys": keys[1:] if keys[0] else None},
    )

    assert mirror.held == set(extend_chain(adapter_root("a", salt), TOKENS, BLOCK, KEY))


@pytest.mark.parametrize(
    "scope",
    [
        {"lora_id": 1},
        {"lora_name": "a", "extra_keys": [["b"], ["b"], ["b"]]},
        {"lora_name": "a", "extra_keys": [["a"], None, ["a"]]},
        {"lora_name": "a", "extra_keys": [["a", ["an image", 0]], ["a"], ["a"]]},
        {"lora_name": "a", "extra_keys": [["a"], ["a", "in a later block"], ["a"]]},
    ],
)
def test_an_adapters_blocks_with_more_in_their_hashes_are_not_followed(scope):
    mirror = EngineMirror(root_of, BLOCK, KEY, adapter_root)

    assert follow(mirror, stored(**scope))[1] == Change()
    assert mirror.unfollowed == 3


@pytest.mark.parametrize(
    "event",
    [stored(parent=999), stored(block_size=8), stored(tokens=TOKENS[:-1])],
    ids=["unknown parent", "other block size", "tokens missing"],
)
def test_blocks_that_cannot_be_named_are_counted_and_not_followed(mirror, event):
    follow(mirror, event)

    assert mirror.held == set()
    assert mirror.unfollowed == 3
    assert follow(mirror, removed(NAMES))[1] == Change()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2)), max_size=40))
def test_what_is_held_is_what_was_stored_more_often_than_removed(steps):
    mirror = EngineMirror(root_of, BLOCK, KEY)
    follow(mirror, stored())
    copies = [1, 1, 1]
    for store, i in steps:
        parent = NAMES[i - 1] if i else None
        if store and (i == 0 or copies[i - 1]):
            follow(mirror, stored([NAMES[i]], TOKENS[i * BLOCK : i * BLOCK + BLOCK], parent=parent))
            copies[i] += 1
        elif not store:
            follow(mirror, removed([NAMES[i]]))
            copies[i] = max(0, copies[i] - 1)

    assert mirror.held == {CHAIN[i] for i in range(3) if copies[i]}
