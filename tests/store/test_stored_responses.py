"""Which worker keeps a response, on a real server: found by all, ends, never too many."""

from contextlib import AsyncExitStack

import pytest
from eventually import until
from redis_servers import new_fleet

from prefixfleet.store.errors import IndexUnavailable
from prefixfleet.store.stored_responses import StoredResponses


@pytest.fixture
async def opened(redis_url):
    fleet = new_fleet()
    async with AsyncExitStack() as stack:

        def of(name=fleet, **options):
            board = StoredResponses(redis_url, name, **{"timeout_s": 20} | options)
            stack.push_async_callback(board.close)
            return board

        yield of


async def test_what_one_notes_another_finds(opened):
    one, other = opened(), opened()

    await one.note({b"r1": "worker-a", b"\0\xff": "Straße"})
    await one.note({b"r1": "worker-b"})
    await one.note({})

    assert await other.worker_of(b"r1") == "worker-b"
    assert await other.worker_of(b"\0\xff") == "Straße"
    assert await other.worker_of(b"r2") == ""
    assert await opened(new_fleet()).worker_of(b"r1") == ""


async def test_it_ends(opened):
    brief, long = opened(ttl_s=0.01), opened()
    await long.note({b"long": "w"})
    await brief.note({b"brief": "w"})

    async def ended():
        return await long.worker_of(b"brief") == ""

    await until(ended)
    assert await long.worker_of(b"long") == "w"
    await long.note({b"next": "w"})
    assert await long._redis.command("HLEN", long._redis.prefix + b"responses") == 2


async def test_the_oldest_of_too_many_go(opened):
    few = opened(most=3)

    await few.note({b"%d" % number: "w" for number in range(3)})
    await few.note({b"0": "again"})
    await few.note({b"new": "w"})

    found = [await few.worker_of(name) for name in (b"0", b"1", b"2", b"new")]
    assert found == ["again", "", "w", "w"]


@pytest.mark.parametrize("reply", [None, 7, [b"w"], b"\xff"])
async def test_a_reply_that_no_sound_server_gives(opened, reply, monkeypatch):
    board = opened()

    async def answer(function, *args):
        return reply

    monkeypatch.setattr(board._redis, "ask", answer)

    with pytest.raises(IndexUnavailable, match="expected a worker"):
        await board.worker_of(b"r")


async def test_a_server_that_is_not_there():
    board = StoredResponses("redis://127.0.0.1:1/0", "f")

    with pytest.raises(IndexUnavailable):
        await board.note({b"r": "w"})
    with pytest.raises(IndexUnavailable):
        await board.worker_of(b"r")
    await board.close()
