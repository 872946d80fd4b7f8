"""Which worker keeps a response, on a real server: found by all, ends, never too many."""

from contextlib import AsyncExitStack

import pytest
from eventually import until
from redis_servers import new_fleet

from prefixfleet.store.errors import IndexUnavailable
from prefixfleet.store.stored_responses import ResponseName, StoredResponses


def of(response, tenant=b"t"):
    return ResponseName(tenant, response)


async def count(board):
    told = await board._redis.command("HGET", board._redis.prefix + b"response_count", "all")
    return int(told or 0)


@pytest.fixture
async def opened(redis_url):
    fleet = new_fleet()
    async with AsyncExitStack() as stack:

        def open_one(name=fleet, **options):
            board = StoredResponses(redis_url, name, **{"timeout_s": 20} | options)
            stack.push_async_callback(board.close)
            return board

        yield open_one


async def test_what_one_notes_another_finds(opened):
    one, other = opened(), opened()

    await one.note({of(b"r1"): "worker-a", of(b"\0\xff", b"\0{:"): "Straße"})
    await one.note({of(b"r1"): "worker-b"})
    await one.note({})
    assert await count(one) == 2

    assert await other.worker_of(of(b"r1")) == "worker-b"
    assert await other.worker_of(of(b"\0\xff", b"\0{:")) == "Straße"
    assert await other.worker_of(of(b"r1", b"\0{:")) == ""
    assert await other.worker_of(of(b"r2")) == ""
    assert await opened(new_fleet()).worker_of(of(b"r1")) == ""


async def test_it_ends(opened):
    brief, long = opened(ttl_s=0.01), opened()
    await long.note({of(b"long"): "w"})
    await brief.note({of(b"brief"): "w", of(b"brief", b"gone"): "w"})

    async def ended():
        return await long.worker_of(of(b"brief", b"gone")) == ""

    await until(ended)
    assert await long.worker_of(of(b"long")) == "w"
    await long.note({of(b"next"): "w"})
    assert await count(long) == 2  # also of a tenant that comes no more


async def test_the_oldest_of_too_many_go(opened):
    few = opened(most=3)

    await few.note({of(b"%d" % number): "w" for number in range(3)})
    await few.note({of(b"0"): "again"})
    await few.note({of(b"new"): "w"})

    found = [await few.worker_of(of(name)) for name in (b"0", b"1", b"2", b"new")]
    assert found == ["again", "", "w", "w"]


async def test_a_tenant_with_many_pushes_out_its_own(opened):
    """However many at once; until all have as many, then whoever has more loses."""
    few = opened(most=10)
    await few.note({of(b"%d" % number, b"small"): "w" for number in range(3)})
    for start in range(0, 300, 100):
        await few.note({of(b"%d" % number, b"big"): "w" for number in range(start, start + 100)})

    async def kept(tenant):
        names = [b"%d" % number for number in range(300)]
        return [name for name in names if await few.worker_of(of(name, tenant))]

    assert await kept(b"small") == [b"0", b"1", b"2"]
    assert len(await kept(b"big")) == 7
    await few.note({of(b"%d" % number, b"other"): "w" for number in range(5)})
    assert [len(await kept(tenant)) for tenant in (b"small", b"big", b"other")] == [3, 3, 4]
    assert await count(few) == 10


async def test_a_server_that_lost_some_of_it_goes_on(opened):
    """One that evicts keys, against what our start checks."""
    few = opened(most=2)
    await few.note({of(b"%d" % number, b"lost"): "w" for number in range(2)})
    prefix, lost = few._redis.prefix, b"lost".hex().encode()
    await few._redis.command("DEL", prefix + b"response_ends:" + lost)

    await few.note({of(b"there"): "w"})
    assert await few.worker_of(of(b"there")) == "w"
    assert await count(few) == 1

    for key in (b"response_tenants", b"response_ends:" + b"t".hex().encode()):
        await few._redis.command("DEL", prefix + key)
    await few._redis.command("HSET", prefix + b"response_count", "all", "50")
    for number in range(9):
        await few.note({of(b"%d" % number): "w"})
    assert await count(few) <= 2
    assert await few.worker_of(of(b"8")) == "w"


@pytest.mark.parametrize("reply", [None, 7, [b"w"], b"\xff"])
async def test_a_reply_that_no_sound_server_gives(opened, reply, monkeypatch):
    board = opened()

    async def answer(function, *args):
        return reply

    monkeypatch.setattr(board._redis, "ask", answer)

    with pytest.raises(IndexUnavailable, match="expected a worker"):
        await board.worker_of(of(b"r"))


async def test_a_server_that_is_not_there():
    board = StoredResponses("redis://127.0.0.1:1/0", "f")

    with pytest.raises(IndexUnavailable):
        await board.note({of(b"r"): "w"})
    with pytest.raises(IndexUnavailable):
        await board.worker_of(of(b"r"))
    await board.close()
