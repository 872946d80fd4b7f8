"""What only the Redis backend can suffer: a flushed, restarted, silent or wrong server."""

import asyncio
import os
import signal
from contextlib import asynccontextmanager

import pytest
import redis.asyncio
from eventually import until
from indexes import chain_of, node_record, segments
from redis_servers import running_server

from prefixfleet.store.errors import ConfigError, Fenced, IndexUnavailable
from prefixfleet.store.index import FIELD_BYTES, StreamGap
from prefixfleet.store.redis_index import RedisIndex

CHAIN = chain_of("a", 4)
LONG = chain_of("long", 2000)


@pytest.fixture
async def index(redis_url, fleet):
    made = RedisIndex(redis_url, fleet, lease_s=60, timeout_s=20)
    yield made
    await made.close()


@pytest.fixture
async def raw(redis_url):
    """The server, past all of our code."""
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def key(fleet):
    """Full name of one of the fleet's keys."""
    return lambda name: f"pf1:{{{fleet}}}:".encode() + name


@pytest.fixture
def own_server(tmp_path):
    """A server for this test alone, on a Unix socket, so that it can come back at its address."""
    with running_server(tmp_path, unix_socket=True) as server:
        yield server


@asynccontextmanager
async def index_at(url, **options):
    index = RedisIndex(url, "f", **{"lease_s": 60, "timeout_s": 20} | options)
    try:
        yield index
    finally:
        await index.close()


async def first(stream):
    async with asyncio.timeout(20):
        return await anext(stream)


# --- a server that lost its memory


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


# --- a server that does not answer, or not well


def calls(index, member):
    return {
        "join": lambda: index.join(node_record("b")),
        "renew": lambda: index.renew(member, node_record("a")),
        "leave": lambda: index.leave(member),
        "publish": lambda: index.publish(member, segments(CHAIN)),
        "withdraw": lambda: index.withdraw(member, segments(CHAIN)),
        "match": lambda: index.match(CHAIN),
        "copies": lambda: index.copies(segments(CHAIN)),
        "members": index.members,
        "snapshot": index.snapshot,
        "follow": lambda: first(index.follow("1-1")),
        "prepare": index.prepare,
    }


async def test_a_silent_server_makes_every_call_unavailable_within_its_limit(own_server):
    async with index_at(own_server.url, timeout_s=0.1) as index:
        member = await index.join(node_record("a"))
        os.kill(own_server.pid, signal.SIGSTOP)
        try:
            for call in calls(index, member).values():
                async with asyncio.timeout(20):
                    with pytest.raises(IndexUnavailable, match="no answer within"):
                        await call()
        finally:
            os.kill(own_server.pid, signal.SIGCONT)

        await until(lambda: answers(index))


async def answers(index):
    try:
        await index.members()
    except IndexUnavailable:
        return False
    return True


async def test_an_address_where_nobody_listens_is_unavailable(tmp_path):
    async with index_at(f"unix://{tmp_path}/nobody.sock") as index:
        for call in calls(index, None).items():
            if call[0] in ("join", "match", "members", "snapshot", "follow", "prepare"):
                with pytest.raises(IndexUnavailable, match=r"nobody\.sock"):
                    await call[1]()


ANSWERS = {
    "junk": b"\x00\xff\xfenonsense\r\n",
    "http": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "text": b"$5\r\nhello\r\n",
    "status": b"+OK\r\n",
    "number": b":-7\r\n",
    "nothing": b"$-1\r\n",
    "no list": b"*-1\r\n",
    "empty list": b"*0\r\n",
    "one": b"*1\r\n$1\r\nx\r\n",
    "numbers": b"*3\r\n:1\r\n:2\r\n:3\r\n",
    "texts": b"*3\r\n$1\r\nx\r\n$1\r\ny\r\n$1\r\nz\r\n",
    "nested": b"*2\r\n*1\r\n*0\r\n$1\r\nx\r\n",
    "lists": b"*5\r\n*0\r\n*0\r\n*0\r\n*0\r\n*0\r\n",
    "too far": b"*2\r\n$3\r\n1 x\r\n:9999\r\n",
    "below zero": b"*2\r\n$3\r\n1 x\r\n:-1\r\n",
    "no node": b"*2\r\n$2\r\n\xff\xfe\r\n:1\r\n",
    "error": b"-ERR whatever\r\n",
    "bad error": b"-\xff\xfe\r\n",
    "half": b"*3\r\n$1\r\nx",
    "closed": b"",
}


@asynccontextmanager
async def server_that_says(answer):
    """A server that takes any command and answers always the same."""

    async def serve(reader, writer):
        while answer and await reader.read(65536):
            writer.write(answer)
            if answer == ANSWERS["half"]:
                break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("question", ["join", "match", "copies", "members", "snapshot", "follow"])
async def test_an_unsound_answer_is_unavailable_or_nothing_never_a_match(answer, question):
    async with server_that_says(ANSWERS[answer]) as url, index_at(url, timeout_s=0.5) as index:
        try:
            found = await calls(index, None)[question]()
        except (IndexUnavailable, StreamGap):
            return
        assert answer in ("empty list", "numbers")  # the two that look like a right answer
        assert (question, found) in [("match", {})] or question == "join"


async def test_a_server_without_functions_is_refused_at_start():
    info = b"# Server\r\nredis_version:6.2.14\r\n"
    async with (
        server_that_says(b"$%d\r\n%b\r\n" % (len(info), info)) as url,
        index_at(url) as index,
    ):
        with pytest.raises(ConfigError, match="got version 6, expected Redis 7"):
            await index.prepare()


async def test_a_sound_server_passes_the_check_at_start(index):
    await index.prepare()
    await index.prepare()


# --- secrets


async def test_a_wrong_password_is_refused_at_start_and_told_to_nobody(redis_url, caplog):
    wrong = redis_url.replace("://:", "://:wrong-")
    async with index_at(wrong) as index:
        with pytest.raises(ConfigError) as refused:
            await index.prepare()
        with pytest.raises(IndexUnavailable) as unavailable:
            await index.match(CHAIN)

    password = wrong.split(":")[2].split("@")[0]
    for text in (str(refused.value), str(unavailable.value), caplog.text, repr(index)):
        assert password not in text
        assert password.removeprefix("wrong-") not in text


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://:s3cret@localhost",
        "redis://:pass/s3cret@localhost:1",
        "redis://:s3cret@localhost:s3cret",
        "redis://:s3cret@localhost/0?socket_timeout=s3cret",
        "redis://localhost?s3cret=1",
        "s3cret",
    ],
)
def test_a_url_that_is_none_of_ours_is_refused_without_repeating_it(url):
    with pytest.raises(ConfigError, match="PREFIXFLEET_REDIS_URL") as refused:
        RedisIndex(url, "f")

    assert "s3cret" not in str(refused.value)
    assert refused.value.__cause__ is None


@pytest.mark.parametrize(
    "url", ["redis://h", "redis://u:p@h:1/2", "rediss://h:1", "unix://:p@/tmp/s", "redis://[::1]:1"]
)
def test_every_kind_of_redis_url_is_taken(url):
    RedisIndex(url, "f")


# --- foreign and damaged keys


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
            assert 0 < len(left) < 80 * 2000
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


@pytest.mark.parametrize("bitmap", [b"", b"\0", b"\xff" * 600, b"\xfe", os.urandom(100)])
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


async def test_an_event_without_our_fields_is_a_gap(index, raw, key):
    await index.join(node_record("a"))
    cursor = (await index.snapshot()).cursor
    generation, number = cursor.split("-")
    await raw.xadd(key(b"events"), {"x": "y"}, id=f"{generation}-{int(number) + 1}")

    with pytest.raises(StreamGap, match="none of ours"):
        await first(index.follow(cursor))


# --- slots


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
