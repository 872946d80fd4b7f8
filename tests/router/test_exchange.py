"""Routers on one Redis see each other's load, and stop counting one that is gone."""

import asyncio

import pytest
from aiohttp import web
from eventually import until
from redis_servers import new_fleet
from router_rig import Rig

from prefixfleet.router.book import Book
from prefixfleet.router.charge import Load
from prefixfleet.router.degraded import Degraded
from prefixfleet.router.exchange import Exchange
from prefixfleet.router.kept_running import kept_running
from prefixfleet.store import load_board
from prefixfleet.store.load_board import EXPIRY_S, SWEEP_S, WAITING, LoadBoard, SharedLoad

ONE = {"w": SharedLoad(100, 2, 3, 0.5)}


@pytest.fixture
async def boards(redis_url, clock):
    fleet = new_fleet()
    boards = [LoadBoard(redis_url, fleet, name, clock, timeout_s=20) for name in "ab"]
    yield boards
    for board in boards:
        await board.close()


async def test_each_sees_the_others_and_not_itself(boards):
    a, b = boards
    assert await a.exchange(ONE) == []
    assert await b.exchange({}) == [ONE]
    assert await a.exchange({}) == []

    await a.exchange(ONE)
    await a.leave()

    assert await b.exchange({}) == []


async def test_what_a_dead_router_reserved_expires_and_is_swept(boards, clock):
    a, b = boards
    await a.exchange(ONE)
    assert await b.exchange({}) == [ONE]

    clock.advance(EXPIRY_S / 2)
    assert await b.exchange({}) == [ONE]
    clock.advance(EXPIRY_S / 2)
    assert await b.exchange({}) == []
    clock.advance(SWEEP_S)
    await b.exchange({})

    names = (await b._redis.command("HGETALL", b._key))[::2]
    assert names == [b"b"]


async def test_junk_on_the_board_counts_nothing(boards):
    a, b = boards
    await a._redis.command("HSET", a._key, "a", b"\xff")
    await a._redis.command("HSET", a._key, "c", b"\x92\x01\x81\xa1w\x94\xff\x00\x00\x00")

    assert await b.exchange({}) == []


def test_others_load_is_added_and_their_prefills_go_on(clock):
    book = Book(clock)
    book.hear({"w": Load(100, 1, 2, 1.0)})

    with book.charged("w", tokens=10, sequences=1, expected_s=0.2):
        assert book.load("w") == Load(110, 2, 2, 1.2)
        assert book.own() == {"w": Load(10, 1, 0, 0.2)}
        clock.advance(0.5)
        assert book.load("w").busy_s == 0.5
    book.hear({})
    assert book.load("w") == Load()


async def test_what_waits_for_a_worker_is_told_to_whoever_scales_the_fleet(boards, clock):
    a, b = boards
    waiting = Load(queued_tokens=700, queued_requests=2, busy_s=1.5)
    telling = asyncio.create_task(Exchange(a, Book(clock), lambda: waiting, Degraded(clock)).run())

    async def told():
        return [loads.get(WAITING) for loads in await b.exchange({})]

    assert await until_equal(told, [SharedLoad(700, 2, 0, 1.5)])
    telling.cancel()
    await asyncio.gather(telling, return_exceptions=True)
    assert await told() == []


async def test_a_loop_that_fails_begins_anew_and_says_so(boards, clock, caplog):
    """A load that cannot be written is no more than one round lost."""
    a, b = boards
    load = Load(queued_tokens=1 << 70)
    degraded = Degraded(clock)
    exchange = Exchange(a, Book(clock), lambda: load, degraded)
    task = asyncio.create_task(kept_running("loads", exchange.run, degraded, again_s=0.01))
    await until(lambda: degraded.modes())
    load = Load(queued_tokens=7)

    async def told():
        return [loads.get(WAITING) for loads in await b.exchange({})]

    assert await until_equal(told, [SharedLoad(7, 0, 0, 0.0)])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert [mode.name for mode in degraded.modes()] == ["loop loads"]
    assert "the loop 'loads' failed" in caplog.text
    assert "OverflowError" in caplog.text


async def until_equal(ask, wanted):
    async def equal():
        return await ask() == wanted

    await until(equal)
    return True


async def test_two_routers_agree_on_the_load_and_avoid_each_others_workers(
    rig, model_folder, redis_url, monkeypatch
):
    """A burst through several routers must not pile up on one worker."""
    monkeypatch.setattr(load_board, "EXPIRY_S", 60.0)  # however long the machine stands still
    go = asyncio.Event()

    async def slow(engine, request, asked):
        await go.wait()
        return web.json_response({"choices": []})

    # so slow that the first prefill is not over by its estimate when the second request comes
    engines = [await rig.engine(name, behave=slow, prefill_tokens_per_s=1.0) for name in "ab"]
    await rig.start(*engines)
    other = Rig(model_folder, rig.stack, redis_url, fleet=rig.fleet)
    await other.start(*engines)
    first = asyncio.create_task(rig.post(prompt="x " * 500))
    busy = await until(lambda: next(iter(rig.router.book.own()), None))
    await until(lambda: other.router.book.load(busy).queued_requests == 1)

    second = asyncio.create_task(other.post(prompt="y " * 500))
    await until(lambda: other.router.book.own())

    assert list(other.router.book.own()) != [busy]
    loads = [{w: r.book.load(w).queued_requests for w in "ab"} for r in (rig.router, other.router)]
    await until(lambda: rig.router.book.load("a").queued_requests == 1)
    await until(lambda: rig.router.book.load("b").queued_requests == 1)
    assert loads[1] == {"a": 1, "b": 1}
    go.set()
    assert [(await asked)[0] for asked in (first, second)] == [200, 200]
