"""Contract of the prefix index: events, gaps, snapshots. Every backend passes it unchanged."""

import asyncio
import random

import pytest
from indexes import MAX_EVENTS, chain_of, node_record, segments

from prefixfleet.store.index import FIELD_BYTES, StreamGap

CHAIN = chain_of("a", 4)
LONG = chain_of("long", 3000)


async def take(stream, count):
    """The next ``count`` events."""
    async with asyncio.timeout(20):
        return [await anext(stream) for _ in range(count)]


def told(events):
    return [(event.kind, event.member.node, event.hashes) for event in events]


def fields(chain):
    return tuple(block[:FIELD_BYTES] for block in chain)


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
