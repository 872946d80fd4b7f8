"""Keys of the index that are foreign, damaged or lost."""

import asyncio

import pytest
import redis.asyncio
from indexes import chain_of, node_record, segments
from redis_servers import index_at, running_server

from prefixfleet.store.errors import IndexUnavailable
from prefixfleet.store.index import FIELD_BYTES, StreamGap
from prefixfleet.store.redis_index import RedisIndex

CHAIN = chain_of("a", 4)
LONG = chain_of("long", 2000)


async def first(stream):
    async with asyncio.timeout(20):
        return await anext(stream)


async def test_two_fleets_on_one_server_do_not_meet(redis_url, fleet):
    ours = RedisIndex(redis_url, fleet, timeout_s=20)
    theirs = RedisIndex(redis_url, f"{fleet}-2", timeout_s=20)
    await ours.publish(await ours.join(node_record("a")), segments(CHAIN))
    b = await theirs.join(node_record("a"))

    assert await theirs.match(CHAIN) == {}
    assert (await theirs.snapshot()).holders == {}
    assert [member for member, _ in await theirs.members()] == [b]
    await ours.close()
    await theirs.close()


async def test_every_key_is_under_the_fleets_name_and_only_segments_can_be_evicted(own_server):
    async with index_at(own_server.url) as index:
        a = await index.join(node_record("a"))
        await index.publish(a, segments(LONG))
        b = await index.join(node_record("b"))
        await index.publish(b, segments(LONG))
        await index.leave(a)
        await index.renew(b, node_record("b"))

        async with redis.asyncio.Redis.from_url(own_server.url) as raw:
            names: list[bytes] = await raw.keys("*")  # type: ignore[assignment]
            mortal = [name for name in names if await raw.ttl(name) >= 0]

    assert all(name.startswith(b"pf1:{f}:") for name in names)
    assert len(mortal) == len(segments(LONG))
    assert all(name.startswith(b"pf1:{f}:s:") for name in mortal)


async def test_a_full_server_forgets_blocks_and_no_node(tmp_path):
    """An index that may evict: publishing goes on, members and leases stay."""
    with running_server(tmp_path, unix_socket=True, max_memory_bytes=3 << 20) as server:
        async with index_at(server.url) as index:
            a = await index.join(node_record("a"))
            for number in range(80):
                chain = chain_of(f"c{number}", 2000)
                await index.publish(a, segments(chain))
                await index.renew(a, node_record("a"))

            assert [member for member, _ in await index.members()] == [a]
            left = (await index.snapshot()).holders
            assert len(left) < 80 * 2000
            await index.withdraw(a, segments(chain))
            await index.publish(a, segments(CHAIN))
            assert await index.match(CHAIN) == {"a": 4}


async def test_a_lost_segment_ends_the_match_there_and_comes_back_when_published(index, raw, key):
    a = await index.join(node_record("a"))
    await index.publish(a, segments(LONG))

    await raw.delete(key(b"s:" + LONG[256]))

    assert await index.match(LONG) == {"a": 256}
    await index.publish(a, segments(LONG))
    assert await index.match(LONG) == {"a": len(LONG)}


async def test_a_segment_of_another_type_makes_only_its_chains_unavailable(index, raw, key):
    a = await index.join(node_record("a"))
    await index.publish(a, segments(CHAIN))
    await raw.set(key(b"s:" + LONG[0]), b"junk")

    with pytest.raises(IndexUnavailable):
        await index.match(LONG)
    with pytest.raises(IndexUnavailable):
        await index.publish(a, segments(LONG))

    assert await index.match(CHAIN) == {"a": 4}


@pytest.mark.parametrize("bitmap", [b"", b"\0", b"\xff" * 600, b"\xfe", bytes(range(156, 256))])
async def test_junk_in_a_segment_matches_no_node_that_is_not_there(index, raw, key, bitmap):
    a = await index.join(node_record("a"))
    await index.publish(a, segments(CHAIN, 0))
    await raw.hset(key(b"s:" + CHAIN[0]), CHAIN[1][:FIELD_BYTES], bitmap)
    await raw.hset(key(b"s:" + CHAIN[0]), b"odd field", bitmap)

    found = await index.match(CHAIN)
    snapshot = await index.snapshot()

    assert found.keys() == {"a"}
    assert set(snapshot.holders.values()) <= {1 << a.slot}
    assert snapshot.holders.keys() <= {block[:FIELD_BYTES] for block in CHAIN}
    await index.publish(a, segments(CHAIN))
    assert await index.match(CHAIN) == {"a": 4}


async def test_a_record_that_cannot_be_read_is_left_out_and_counted(index, raw, key, caplog):
    await index.join(node_record("a"))
    b = await index.join(node_record("b"))
    await raw.hset(key(b"records"), "a", b"\xc1 junk")

    assert [member for member, _ in await index.members()] == [b]
    assert index.corrupt_records == 1
    assert "record of node 'a'" in caplog.text


@pytest.mark.parametrize(
    ("slot", "identity"), [("7", b"junk"), ("x", b"1 b"), ("9" * 12, b"1 b"), ("7", b"1 \xff")]
)
async def test_an_owner_that_cannot_be_read_is_no_member(index, raw, key, slot, identity):
    a = await index.join(node_record("a"))
    await index.publish(a, segments(CHAIN))
    await raw.hset(key(b"owners"), slot, identity)
    await raw.hset(key(b"records"), identity.partition(b" ")[2], b"junk")
    await raw.zadd(key(b"leases"), {slot: 1e12})

    assert [member for member, _ in await index.members()] == [a]
    assert (await index.snapshot()).members == (a,)
    assert await index.match(CHAIN) == {"a": 4}
    assert set((await index.copies(segments(CHAIN))).values()) == {1}


@pytest.mark.parametrize("damage", ["foreign entry", "deleted", "other type"])
async def test_a_damaged_event_stream_is_a_gap_and_heals(index, raw, key, damage):
    a = await index.join(node_record("a"))
    cursor = (await index.snapshot()).cursor
    if damage == "foreign entry":
        await raw.xadd(key(b"events"), {"x": "y"}, id="99999999999999-0")
    else:
        await index.publish(a, segments(CHAIN, 0))
        await raw.delete(key(b"events"))
        if damage == "other type":
            await raw.set(key(b"events"), b"junk")

    await index.publish(a, segments(CHAIN))
    with pytest.raises(StreamGap):
        await first(index.follow(cursor))

    stream = index.follow((await index.snapshot()).cursor)
    b = await index.join(node_record("b"))
    event = await first(stream)
    assert (event.kind, event.member) == ("join", b)
    assert await index.match(CHAIN) == {"a": 4}


async def test_a_follower_of_a_deleted_stream_sees_a_gap_without_any_new_event(index, raw, key):
    a = await index.join(node_record("a"))
    cursor = (await index.snapshot()).cursor
    await index.publish(a, segments(CHAIN))
    await raw.delete(key(b"events"))

    with pytest.raises(StreamGap, match="are gone"):
        await first(index.follow(cursor))


async def test_an_event_without_our_fields_is_a_gap(index, raw, key):
    await index.join(node_record("a"))
    cursor = (await index.snapshot()).cursor
    generation, number = cursor.split("-")
    await raw.xadd(key(b"events"), {"x": "y"}, id=f"{generation}-{int(number) + 1}")

    with pytest.raises(StreamGap, match="none of ours"):
        await first(index.follow(cursor))
