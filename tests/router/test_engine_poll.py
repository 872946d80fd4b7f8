"""Two routers and one engine whose events are told once: one polls, and the other one says so."""

import asyncio
import json
from contextlib import aclosing, asynccontextmanager

import pytest
from aiohttp import web
from eventually import until
from trtllm_server import TrtllmServer

from prefixfleet.router import engine_poll
from prefixfleet.router.engine_poll import EnginePoller
from prefixfleet.store import event_slices
from prefixfleet.store.engine_mirror import EngineMirror
from prefixfleet.store.errors import IndexUnavailable
from prefixfleet.store.poll_rights import PollRights
from prefixfleet.store.trtllm_events import MAX_POLL_ITEMS


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name in ("BUSY_S", "IDLE_S", "FAILED_S", "CLAIM_S"):
        monkeypatch.setattr(engine_poll, name, 0.02)


@pytest.fixture
async def server():
    async with TrtllmServer() as server:
        yield server


class Answers:
    """A server of given answers, by path."""

    def __init__(self, answers):
        self._answers = answers

    async def __aenter__(self):
        app = web.Application()
        for path, answer in self._answers.items():
            app.router.add_route("*", path, answer)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.events = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_):
        await self._runner.cleanup()


@asynccontextmanager
async def polling(server, claim=None, heard=lambda change: None):
    mirror = EngineMirror(lambda salt: b"r" * 16, 16, b"k" * 32)
    poller = EnginePoller(mirror, server.events, 16, claim)

    async def follow():
        async with aclosing(poller.changes()) as changes:
            async for change in changes:
                heard(change)

    task = asyncio.create_task(follow())
    try:
        yield poller, mirror
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_of_two_routers_one_polls_and_the_other_takes_over(server, redis_url, fleet):
    rights = [PollRights(redis_url, fleet, name, timeout_s=20) for name in "ab"]

    def claim(right):
        return lambda engine: right.claim(engine, ttl_s=60)

    async with polling(server, claim(rights[1])) as (second, late):
        await until(lambda: second.connected)
        async with polling(server, claim(rights[0])) as (first, early):
            await until(lambda: first.elsewhere)
            assert first.fault == ""
            server.tell(server.stored(range(64)))
            await until(lambda: len(late) == 4)
            assert (len(early), first.batches) == (0, 0)
            assert (second.losses.gaps, second.fault) == (0, "")
    await rights[1].claim(server.events, ttl_s=0.01)  # its last: nobody renews it
    async with polling(server, claim(rights[0])) as (first, early):
        await until(lambda: first.connected)
        assert not first.elsewhere
        server.tell(server.stored(range(32)))
        await until(lambda: len(early) == 2)
        assert not first.whole
    for right in rights:
        await right.close()


async def test_who_loses_the_right_drops_what_it_knew(server):
    mine = [True]

    async def claim(engine):
        return mine[0]

    async with polling(server, claim) as (poller, mirror):
        server.tell(server.stored(range(32)))
        await until(lambda: len(mirror) == 2)

        mine[0] = False

        await until(lambda: len(mirror) == 0)
        assert (poller.elsewhere, poller.fault) == (True, "")


async def test_where_nobody_can_say_it_stays_whose_it_was(server):
    answers = iter([True])

    async def claim(engine):
        for answer in answers:
            return answer
        raise IndexUnavailable("no Redis")

    async with polling(server, claim) as (_, mirror):
        server.tell(server.stored(range(16)))
        await until(lambda: len(mirror) == 1)
        server.tell(server.stored(range(32)))

        await until(lambda: len(mirror) == 2)


async def test_a_right_that_cannot_be_renewed_ends(server, monkeypatch):
    monkeypatch.setattr(engine_poll, "RIGHT_S", 0.5)
    redis_is_there = True

    async def claim(engine):
        if not redis_is_there:
            raise IndexUnavailable("no Redis")
        return True

    async with polling(server, claim) as (poller, mirror):
        server.tell(server.stored(range(16)))
        await until(lambda: len(mirror) == 1)

        redis_is_there = False

        await until(lambda: len(mirror) == 0)
        assert "nobody can say" in poller.fault
        assert "no Redis" in poller.fault
        redis_is_there = True
        await until(lambda: not poller.fault)


def too_many():
    hashes = [1] * MAX_POLL_ITEMS
    event = {"event_id": 1, "window_size": 8_192}
    return json.dumps([event | {"data": {"type": "removed", "block_hashes": hashes}}]).encode()


async def test_an_answer_of_too_many_hashes_is_a_loss(server):
    async with polling(server) as (poller, mirror):
        server.tell(server.stored(range(32)))
        await until(lambda: len(mirror) == 2)

        server.body = too_many()

        await until(lambda: poller.losses.malformed == 1)
        assert len(mirror) == 0
        assert "too many" in poller.fault


async def test_while_a_long_answer_is_taken_others_get_a_turn(server, monkeypatch):
    monkeypatch.setattr(event_slices, "TURN", 8)
    turns, seen = 0, []

    async def other():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def heard(change):
        if change.added:
            seen.append(turns)

    task = asyncio.create_task(other())
    async with polling(server, heard=heard) as (_, mirror):
        server.tell(server.stored(range(16 * 100)))
        await until(lambda: len(mirror) == 100)
    task.cancel()

    assert len(seen) > 100 // 8
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_not_followed(server, status):
    asked = []

    async def inside(request):
        asked.append(request)
        return web.json_response([])

    async def elsewhere(request):
        return web.Response(status=status, headers={"Location": f"{target.events}/inside"})

    async with (
        Answers({"/inside": inside, "/kv_cache_events": inside}) as target,
        Answers({"/kv_cache_events": elsewhere}) as first,
        polling(first) as (poller, _),
    ):
        await until(lambda: f"status {status}" in poller.fault)

        assert not poller.connected
    assert asked == []
