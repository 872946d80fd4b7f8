"""Contract of the prefix index. Every backend passes this file unchanged."""

import asyncio
import random

import pytest
from indexes import (
    MAX_EVENTS,
    Backend,
    MemoryBackend,
    RedisBackend,
    chain_of,
    fork,
    node_record,
    segments,
)

from prefixfleet.store.errors import Fenced
from prefixfleet.store.index import FIELD_BYTES, Membership, StreamGap

CHAIN = chain_of("a", 4)
LONG = chain_of("long", 3000)


@pytest.fixture(params=["memory", "redis"])
async def backend(request):
    made: Backend = MemoryBackend()
    if request.param == "redis":
        made = RedisBackend(*map(request.getfixturevalue, ("redis_url", "fleet")))
    yield made
    await made.close()


@pytest.fixture
def index(backend):
    return backend.index


async def take(stream, count):
    """The next ``count`` events."""
    async with asyncio.timeout(20):
        return [await anext(stream) for _ in range(count)]


def told(events):
    return [(event.kind, event.member.node, event.hashes) for event in events]


def fields(chain):
    return tuple(block[:FIELD_BYTES] for block in chain)


# --- lengths, holes, sizes


async def test_an_empty_index_matches_nothing(index):
    assert await index.match(CHAIN) == {}


async def test_an_empty_chain_matches_nobody(backend, index):
    await index.publish(await backend.join("a"), segments(CHAIN))

    assert await index.match([]) == {}


async def test_a_node_without_blocks_is_left_out_of_a_match(backend, index):
    await backend.join("a")

    assert await index.match(CHAIN) == {}


@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 255, 256, 257, 1023, 1024, 1025, 3000])
async def test_a_published_chain_is_matched_to_its_end(backend, index, length):
    """Around the sizes of a segment (128), of a publishing call (256) and of a lookup (1024)."""
    a = await backend.join("a")
    await index.publish(a, segments(LONG[:length]))

    assert await index.match(LONG) == {"a": length}
    assert await index.match(LONG[:length]) == {"a": length}
    assert await index.match(LONG[: length // 2 + 1]) == {"a": length // 2 + 1}


@pytest.mark.parametrize("hole", [0, 1, 2])
async def test_a_match_ends_at_the_first_missing_block(backend, index, hole):
    """KV of a block is useless without all before it."""
    present = [i for i in range(4) if i != hole]
    await index.publish(await backend.join("a"), segments(CHAIN, *present))

    assert await index.match(CHAIN) == ({"a": hole} if hole else {})


@pytest.mark.parametrize("hole", [127, 128, 129, 1024, 2047])
async def test_a_hole_in_a_long_chain_ends_the_match_there(backend, index, hole):
    a = await backend.join("a")
    await index.publish(a, segments(LONG))

    await index.withdraw(a, segments(LONG, hole))

    assert await index.match(LONG) == {"a": hole}


async def test_a_missing_segment_ends_the_match_before_it(backend, index):
    a = await backend.join("a")
    await index.publish(a, segments(LONG))

    await index.withdraw(a, segments(LONG, *range(256, 384)))

    assert await index.match(LONG) == {"a": 256}


async def test_each_node_is_matched_to_its_own_length(backend, index):
    for name, length in [("a", 3000), ("b", 1), ("c", 128), ("d", 1100)]:
        await index.publish(await backend.join(name), segments(LONG[:length]))

    assert await index.match(LONG) == {"a": 3000, "b": 1, "c": 128, "d": 1100}


async def test_chains_that_diverge_match_up_to_the_fork(backend, index):
    """They share a segment key, since they begin with the same block."""
    trunk = chain_of("trunk", 200)
    branch = fork(trunk, 100, "branch", 200)
    await index.publish(await backend.join("a"), segments(trunk))
    await index.publish(await backend.join("b"), segments(branch))

    assert await index.match(trunk) == {"a": 200, "b": 100}
    assert await index.match(branch) == {"a": 100, "b": 200}


async def test_chains_without_a_common_block_do_not_meet(backend, index):
    await index.publish(await backend.join("a"), segments(CHAIN))

    assert await index.match(chain_of("other", 4)) == {}


async def test_many_nodes_are_told_apart(backend, index):
    """More nodes than bits in a byte."""
    for number in range(20):
        a = await backend.join(f"n{number}")
        await index.publish(a, segments(LONG[: number + 1]))

    assert await index.match(LONG) == {f"n{number}": number + 1 for number in range(20)}


# --- publish, withdraw, reference counts


async def test_two_publishes_and_one_withdrawal_leave_a_block_absent(backend, index):
    a = await backend.join("a")
    await index.publish(a, segments(CHAIN))
    await index.publish(a, segments(CHAIN))

    await index.withdraw(a, segments(CHAIN, 2, 3))

    assert await index.match(CHAIN) == {"a": 2}


async def test_withdrawing_unknown_blocks_changes_nothing(backend, index):
    a = await backend.join("a")
    await index.publish(a, segments(CHAIN))

    await index.withdraw(a, segments(chain_of("other", 300)))
    await index.withdraw(a, segments(CHAIN, 3))
    await index.withdraw(a, segments(CHAIN, 3))

    assert await index.match(CHAIN) == {"a": 3}


async def test_a_withdrawal_takes_one_nodes_copy_only(backend, index):
    a, b = await backend.join("a"), await backend.join("b")
    await index.publish(a, segments(CHAIN))
    await index.publish(b, segments(CHAIN))

    await index.withdraw(a, segments(CHAIN))

    assert await index.match(CHAIN) == {"b": 4}


async def test_a_block_published_again_after_its_withdrawal_is_matched(backend, index):
    a = await backend.join("a")
    await index.publish(a, segments(CHAIN))
    await index.withdraw(a, segments(CHAIN))

    await index.publish(a, segments(CHAIN))

    assert await index.match(CHAIN) == {"a": 4}


async def test_publishing_nothing_is_allowed(backend, index):
    a = await backend.join("a")

    await index.publish(a, {})
    await index.publish(a, {CHAIN[0]: []})
    await index.withdraw(a, {})

    assert (await index.snapshot()).holders == {}


async def test_copies_counts_the_live_holders_of_each_block(backend, index):
    a, b = await backend.join("a"), await backend.join("b")
    await index.publish(a, segments(LONG[:300]))
    await index.publish(b, segments(LONG[:200]))

    counts = await index.copies(segments(LONG[:400]))

    assert counts == {b: 2 if i < 200 else int(i < 300) for i, b in enumerate(LONG[:400])}
    assert await index.copies({}) == {}


async def test_copies_on_ended_lives_do_not_count(backend, index):
    a, b = await backend.join("a"), await backend.join("b", mortal=True)
    c = await backend.join("c")
    for member in (a, b, c):
        await index.publish(member, segments(CHAIN))

    await index.leave(c)
    await backend.lapse()

    assert set((await index.copies(segments(CHAIN))).values()) == {1}


async def test_publishers_at_once_lose_nothing(backend, index):
    members = [await backend.join(f"n{i}") for i in range(4)]

    await asyncio.gather(*(index.publish(member, segments(LONG[:600])) for member in members))

    assert await index.match(LONG) == {f"n{i}": 600 for i in range(4)}


# --- epochs


async def test_blocks_of_an_earlier_life_are_not_matched(backend, index):
    """A restarted node has other bytes at the old addresses."""
    await index.publish(await backend.join("a"), segments(CHAIN))

    await backend.join("a")

    assert await index.match(CHAIN) == {}


async def test_every_life_has_a_higher_epoch(backend):
    lives = [await backend.join(name) for name in "ababba"]

    epochs = [life.epoch for life in lives]

    assert epochs == sorted(set(epochs))


@pytest.mark.parametrize("change", ["renew", "publish", "withdraw"])
async def test_an_earlier_life_is_fenced(backend, index, change):
    old = await backend.join("a")
    new = await backend.join("a")
    await index.publish(new, segments(CHAIN))
    argument = node_record("a") if change == "renew" else segments(CHAIN)

    with pytest.raises(Fenced):
        await getattr(index, change)(old, argument)

    assert await index.match(CHAIN) == {"a": 4}
    assert [member for member, _ in await index.members()] == [new]


@pytest.mark.parametrize("wrong", ["epoch", "slot", "node", "huge"])
async def test_a_member_that_never_joined_is_fenced(backend, index, wrong):
    a = await backend.join("a")
    forged = {
        "epoch": Membership("a", a.epoch + 1, a.slot),
        "slot": Membership("a", a.epoch, a.slot + 1),
        "node": Membership("b", a.epoch, a.slot),
        "huge": Membership("a", a.epoch, 1 << 40),
    }[wrong]

    with pytest.raises(Fenced):
        await index.publish(forged, segments(CHAIN))

    assert (await index.snapshot()).holders == {}


async def test_leaving_as_an_earlier_life_does_not_end_the_new_one(backend, index):
    old = await backend.join("a")
    new = await backend.join("a")
    await index.publish(new, segments(CHAIN))

    await index.leave(old)

    assert await index.match(CHAIN) == {"a": 4}


# --- leases, one node's loss


async def test_a_node_that_leaves_matches_nothing_at_once(backend, index):
    a, b = await backend.join("a"), await backend.join("b")
    await index.publish(a, segments(CHAIN))
    await index.publish(b, segments(CHAIN, 0, 1))

    await index.leave(a)
    await index.leave(a)

    assert await index.match(CHAIN) == {"b": 2}
    assert [member for member, _ in await index.members()] == [b]


async def test_a_node_matches_nothing_once_its_lease_has_ended(backend, index):
    """And the others' blocks stay: one node's loss is one node's loss."""
    a, b = await backend.join("a", mortal=True), await backend.join("b")
    await index.publish(a, segments(CHAIN))
    await index.publish(b, segments(CHAIN, 0))

    await backend.lapse()

    assert await index.match(CHAIN) == {"b": 1}
    snapshot = await index.snapshot()
    assert snapshot.members == (b,)
    assert snapshot.holders == {CHAIN[0][:FIELD_BYTES]: 1 << b.slot}


@pytest.mark.parametrize("change", ["renew", "publish", "withdraw"])
async def test_a_node_whose_lease_has_ended_is_fenced(backend, index, change):
    """It must join again: nobody kept track of it meanwhile."""
    a = await backend.join("a", mortal=True)
    await backend.lapse()
    argument = node_record("a") if change == "renew" else segments(CHAIN)

    with pytest.raises(Fenced):
        await getattr(index, change)(a, argument)


async def test_a_node_that_joins_after_its_lease_ended_starts_empty(backend, index):
    a = await backend.join("a", mortal=True)
    await index.publish(a, segments(CHAIN))
    await backend.lapse()

    again = await backend.join("a")

    assert again.epoch > a.epoch
    assert await index.match(CHAIN) == {}
    await index.publish(again, segments(CHAIN, 0))
    assert await index.match(CHAIN) == {"a": 1}


async def test_renewing_replaces_the_record(backend, index):
    a = await backend.join("a")
    record = node_record("a", contacts={"tcp": "127.0.0.1:1"}, stats={"blocks": 7})

    await index.renew(a, record)

    assert await index.members() == [(a, record)]


async def test_members_lists_every_live_node_with_its_record(backend, index):
    joined = {name: await backend.join(name) for name in "abc"}

    listed = await index.members()

    assert {member.node: member for member, _ in listed} == joined
    assert all(record == node_record(member.node) for member, record in listed)


# --- slots


async def test_live_members_never_share_a_slot(backend, index):
    members = [await backend.join(f"n{i}") for i in range(10)]
    for member in members[::2]:
        await index.leave(member)
    members = members[1::2] + [await backend.join(f"m{i}") for i in range(10)]

    assert len({member.slot for member in members}) == len(members)


async def test_a_slot_is_used_again_and_holds_nothing_then(backend, index):
    """Bitmaps must not grow with every restart; old bits must not count for a new node."""
    keeper = await backend.join("keeper")
    await index.publish(keeper, segments(LONG[:500]))
    slots = []
    for number in range(12):
        life = await backend.join(f"n{number}")
        slots.append(life.slot)
        assert await index.match(LONG) == {"keeper": 500}
        await index.publish(life, segments(LONG[:600]))
        assert await index.match(LONG) == {"keeper": 500, life.node: 600}
        await index.leave(life)
        for _ in range(10):  # each renewal sweeps a little
            await index.renew(keeper, node_record("keeper"))

    assert len(set(slots)) < len(slots)
    assert await index.match(LONG) == {"keeper": 500}


# --- events, order, gaps


async def test_events_come_in_the_order_of_the_changes(backend, index):
    stream = index.follow((await index.snapshot()).cursor)
    a = await backend.join("a")
    await index.publish(a, segments(CHAIN))
    await index.withdraw(a, segments(CHAIN, 2, 3))
    b = await backend.join("b")
    await index.leave(a)

    events = await take(stream, 5)

    assert told(events) == [
        ("join", "a", ()),
        ("publish", "a", fields(CHAIN)),
        ("withdraw", "a", fields(CHAIN[2:])),
        ("join", "b", ()),
        ("leave", "a", ()),
    ]
    assert [event.member for event in events] == [a, a, a, b, a]
    await stream.aclose()


async def test_a_follower_waits_for_the_next_event(backend, index):
    stream = index.follow((await index.snapshot()).cursor)
    waiting = asyncio.create_task(take(stream, 1))
    await asyncio.sleep(0)

    await backend.join("a")

    assert told(await waiting) == [("join", "a", ())]
    await stream.aclose()


async def test_changes_that_change_nothing_make_no_event(backend, index):
    a = await backend.join("a")
    await index.publish(a, segments(CHAIN))
    stream = index.follow((await index.snapshot()).cursor)

    await index.publish(a, segments(CHAIN))
    await index.withdraw(a, segments(chain_of("other", 3)))
    await index.renew(a, node_record("a"))
    await index.withdraw(a, segments(CHAIN, 3))

    assert told(await take(stream, 1)) == [("withdraw", "a", fields(CHAIN[3:]))]
    await stream.aclose()


async def test_a_repeated_publish_tells_only_what_is_new(backend, index):
    a = await backend.join("a")
    await index.publish(a, segments(CHAIN, 0, 1))
    stream = index.follow((await index.snapshot()).cursor)

    await index.publish(a, segments(CHAIN))

    assert told(await take(stream, 1)) == [("publish", "a", fields(CHAIN[2:]))]
    await stream.aclose()


async def test_large_changes_are_told_completely(backend, index):
    a = await backend.join("a")
    stream = index.follow((await index.snapshot()).cursor)

    await index.publish(a, segments(LONG))

    seen: list[bytes] = []
    while len(seen) < len(LONG):
        (event,) = await take(stream, 1)
        assert (event.kind, event.member) == ("publish", a)
        seen += event.hashes
    assert tuple(seen) == fields(LONG)
    await stream.aclose()


async def test_a_second_life_is_told_as_the_end_of_the_first(backend, index):
    """Followers clear the bits of a slot before somebody else can get it."""
    old = await backend.join("a")
    stream = index.follow((await index.snapshot()).cursor)

    new = await backend.join("a")

    events = await take(stream, 2)
    assert [(event.kind, event.member) for event in events] == [("leave", old), ("join", new)]
    await stream.aclose()


async def test_a_lease_that_ends_is_told_before_anything_that_follows(backend, index):
    a = await backend.join("a", mortal=True)
    stream = index.follow((await index.snapshot()).cursor)
    await backend.lapse()

    b = await backend.join("b")

    events = await take(stream, 2)
    assert [(event.kind, event.member) for event in events] == [("leave", a), ("join", b)]
    await stream.aclose()


async def test_two_followers_see_the_same(backend, index):
    cursor = (await index.snapshot()).cursor
    streams = [index.follow(cursor), index.follow(cursor)]
    a = await backend.join("a")
    await index.publish(a, segments(CHAIN))

    first, second = [await take(stream, 2) for stream in streams]

    assert first == second
    for stream in streams:
        await stream.aclose()


async def test_a_follower_who_falls_too_far_behind_sees_a_gap(backend, index):
    a = await backend.join("a")
    cursor = (await index.snapshot()).cursor
    for block in chain_of("many", 3 * MAX_EVENTS):
        await index.publish(a, {block: [block]})

    stream = index.follow(cursor)
    with pytest.raises(StreamGap):
        await take(stream, 3 * MAX_EVENTS)

    snapshot = await index.snapshot()
    assert len(snapshot.holders) == 3 * MAX_EVENTS


@pytest.mark.parametrize("cursor", ["", "junk", "1-2-3", "9999999999999-1", "77", "-1", "é"])
async def test_a_cursor_that_is_none_of_this_index_is_a_gap(backend, index, cursor):
    await backend.join("a")

    with pytest.raises(StreamGap):
        await take(index.follow(cursor), 2)


# --- snapshots


async def test_a_snapshot_holds_every_block_with_its_live_holders(backend, index):
    a, b = await backend.join("a"), await backend.join("b")
    await index.publish(a, segments(LONG[:2000]))
    await index.publish(b, segments(LONG[:10]))

    snapshot = await index.snapshot()

    both = 1 << a.slot | 1 << b.slot
    expected = {f: both if i < 10 else 1 << a.slot for i, f in enumerate(fields(LONG[:2000]))}
    assert snapshot.holders == expected
    assert sorted(snapshot.members, key=lambda m: m.node) == [a, b]


async def test_a_snapshot_of_an_empty_index_can_be_followed(backend, index):
    snapshot = await index.snapshot()
    assert (snapshot.members, dict(snapshot.holders)) == ((), {})

    stream = index.follow(snapshot.cursor)
    await backend.join("a")

    assert told(await take(stream, 1)) == [("join", "a", ())]
    await stream.aclose()


async def test_a_snapshot_taken_during_changes_becomes_right_by_its_events(backend, index):
    """Whoever loads while others publish must end with what a later snapshot says."""
    members = [await backend.join(f"n{i}") for i in range(3)]
    for member in members:
        await index.publish(member, segments(LONG[:1500]))

    async def churn(seed):
        chance = random.Random(seed)
        for _ in range(10):
            start = chance.randrange(2000)
            some = segments(LONG, *range(start, start + 300))
            change = chance.choice([index.publish, index.withdraw])
            await change(members[seed], some)

    snapshot, *_ = await asyncio.gather(index.snapshot(), *(churn(seed) for seed in range(3)))
    last = await backend.join("last")
    held = dict(snapshot.holders)
    async for event in index.follow(snapshot.cursor):
        if event.member == last:
            break
        bit = 1 << event.member.slot
        for field in event.hashes:
            if event.kind == "publish":
                held[field] = held.get(field, 0) | bit
            else:
                held[field] = held.get(field, 0) & ~bit

    assert {f: bits for f, bits in held.items() if bits} == (await index.snapshot()).holders


# --- hostile input


@pytest.mark.parametrize("filler", [b"\0", b"\xff", b"\n", b" ", b"*", b"}", b"\r\n$5", b"%"])
async def test_hashes_of_any_bytes_are_kept_apart(backend, index, filler):
    chain = [bytes([i]) + (filler * 16)[:15] for i in range(4)]
    other = [bytes([i + 128]) + (filler * 16)[:15] for i in range(4)]
    await index.publish(await backend.join("a"), segments(chain))

    assert await index.match(chain) == {"a": 4}
    assert await index.match(other) == {}
    assert await index.match([chain[0], *other]) == {"a": 1}


@pytest.mark.parametrize("name", ["two words", "ключ", "1 2", " ", "a\nb", "x" * 300])
async def test_node_names_of_any_text_come_back(backend, index, name):
    a = await backend.join(name)
    await index.publish(a, segments(CHAIN))

    assert await index.match(CHAIN) == {name: 4}
    assert [member for member, _ in await index.members()] == [a]


async def test_a_hash_too_short_for_a_field_is_refused(backend, index):
    a = await backend.join("a")

    with pytest.raises(ValueError, match="shorter than 8 bytes"):
        await index.publish(a, {b"short": [b"short"]})


# --- all together


@pytest.mark.parametrize("seed", range(5))
async def test_a_random_history_agrees_with_a_plain_model(backend, index, seed):
    chance = random.Random(seed)
    trunk = chain_of("t", 140)
    chains = [trunk, fork(trunk, 5, "u", 300), fork(trunk, 130, "v", 150), chain_of("w", 20)]
    lives: dict[str, Membership] = {}
    held: dict[str, set[bytes]] = {}
    for _ in range(120):
        name = chance.choice("abcd")
        action = chance.choice(["join", "leave", "publish", "publish", "withdraw", "withdraw"])
        if action == "join" or name not in lives:
            lives[name] = await backend.join(name)
            held[name] = set()
        elif action == "leave":
            await index.leave(lives.pop(name))
            del held[name]
        else:
            chain = chance.choice(chains)
            start = chance.randrange(len(chain))
            part = range(start, chance.randrange(start, len(chain)) + 1)
            change = index.publish if action == "publish" else index.withdraw
            await change(lives[name], segments(chain, *part))
            blocks = {chain[i] for i in part}
            held[name] = held[name] | blocks if action == "publish" else held[name] - blocks
        chain = chance.choice(chains)
        assert await index.match(chain) == expected_match(chain, held)


def expected_match(chain, held):
    lengths = {}
    for name, blocks in held.items():
        missing = [i for i, block in enumerate(chain) if block not in blocks]
        lengths[name] = min(missing, default=len(chain))
    return {name: length for name, length in lengths.items() if length}
