"""What only the Redis backend can suffer: a flushed or restarted server, slots that come back."""

import asyncio

import pytest
from eventually import until
from indexes import chain_of, node_record, segments
from redis_servers import index_at

from prefixfleet.store.errors import Fenced, IndexUnavailable
from prefixfleet.store.index import StreamGap

CHAIN = chain_of("a", 4)
LONG = chain_of("long", 2000)


async def first(stream):
    async with asyncio.timeout(20):
        return await anext(stream)


async def forget(raw, key):
    """What a flush does to one fleet."""
    names = [name async for name in raw.scan_iter(key(b"*").replace(b"*", b"") + b"*")]
    await raw.delete(*names)


async def test_after_a_flush_a_node_is_fenced_and_joins_with_a_higher_epoch(index, raw, key):
    old = await index.join(node_record("a"))
    await index.publish(old, segments(CHAIN))
    await forget(raw, key)

    with pytest.raises(Fenced):
        await index.renew(old, node_record("a"))
    new = await index.join(node_record("a"))
    with pytest.raises(Fenced):
        await index.publish(old, segments(CHAIN))

    assert new.epoch > old.epoch
    assert await index.match(CHAIN) == {}
    await index.publish(new, segments(CHAIN))
    assert await index.match(CHAIN) == {"a": 4}


async def test_a_follower_of_a_flushed_server_sees_a_gap_without_any_new_event(index, raw, key):
    await index.join(node_record("a"))
    stream = index.follow((await index.snapshot()).cursor)
    waiting = asyncio.create_task(first(stream))
    await asyncio.sleep(0)

    await forget(raw, key)

    with pytest.raises(StreamGap):
        await waiting


async def test_a_follower_of_a_flushed_server_sees_a_gap_before_new_events(index, raw, key):
    await index.join(node_record("a"))
    cursor = (await index.snapshot()).cursor
    await forget(raw, key)
    await index.join(node_record("b"))
    await index.join(node_record("c"))

    with pytest.raises(StreamGap):
        await first(index.follow(cursor))


async def test_a_restarted_server_is_used_again_from_the_start(own_server, tmp_path):
    """Calls fail while it is away; then the library is loaded anew and the node joins again."""
    async with index_at(own_server.url) as index:
        old = await index.join(node_record("a"))
        await index.publish(old, segments(CHAIN))
        stream = index.follow((await index.snapshot()).cursor)
        waiting = asyncio.create_task(first(stream))
        own_server.stop()
        with pytest.raises(IndexUnavailable):
            await waiting
        with pytest.raises(IndexUnavailable):
            await index.match(CHAIN)

        password = own_server.url.split(":")[2].split("@")[0]
        with type(own_server).start(tmp_path, password=password, unix_socket=True):
            with pytest.raises(Fenced):
                await index.renew(old, node_record("a"))
            new = await index.join(node_record("a"))
            await index.publish(new, segments(CHAIN))

            assert new.epoch > old.epoch
            assert await index.match(CHAIN) == {"a": 4}


async def test_a_server_that_forgot_the_library_gets_it_again(index, raw):
    a = await index.join(node_record("a"))
    for name in [entry[1] for entry in await raw.function_list("prefixfleet_redis_index*")]:
        await raw.function_delete(name)

    await index.publish(a, segments(CHAIN))

    assert await index.match(CHAIN) == {"a": 4}


async def test_a_sweep_leaves_no_bit_of_an_ended_life_behind(index, raw, key):
    """Also in a segment with more fields than one step visits, and in many segments."""
    keeper = await index.join(node_record("keeper"))
    gone = await index.join(node_record("gone"))
    head = LONG[0]
    crowd = {head: [head, *chain_of("crowd", 3000)]}  # as many branches behind one first block
    for member in (keeper, gone):
        await index.publish(member, crowd)
    await index.publish(gone, segments(LONG[128:]))
    await index.leave(gone)

    async def swept():
        await index.renew(keeper, node_record("keeper"))
        return await raw.zscore(key(b"free"), str(gone.slot)) is not None

    await until(swept)

    names = [name async for name in raw.scan_iter(key(b"s:").replace(b"{", b"[{]") + b"*")]
    assert names == [key(b"s:" + head)]
    bitmaps = set((await raw.hgetall(names[0])).values())
    assert bitmaps == {bytes([1 << keeper.slot])}
    assert await raw.smembers(key(b"heads")) == {head}
    again = await index.join(node_record("again"))
    assert again.slot == gone.slot
    assert (await index.match(LONG)) == {"keeper": 1}


async def test_a_slot_is_not_given_out_before_it_was_swept(index):
    """Its bits are still there; the next node gets another one."""
    keeper = await index.join(node_record("keeper"))
    gone = await index.join(node_record("gone"))
    await index.publish(gone, segments(LONG))
    await index.leave(gone)

    early = await index._functions.call("join", "early", b"", 60, 100)

    assert int(early[0]) not in (gone.slot, keeper.slot)


async def test_without_a_slot_left_nobody_joins(index, raw, key):
    await index.join(node_record("a"))
    await raw.hset(key(b"meta"), "slots", 4096)

    with pytest.raises(IndexUnavailable, match="4096 slots"):
        await index.join(node_record("b"))


async def test_many_calls_at_once_share_a_bounded_number_of_connections(index, raw):
    a = await index.join(node_record("a"))
    await index.publish(a, segments(CHAIN))

    found = await asyncio.gather(*(index.match(CHAIN) for _ in range(200)))

    assert found == [{"a": 4}] * 200
    assert (await raw.info("clients"))["connected_clients"] <= 40
