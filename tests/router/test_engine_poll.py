"""Two routers and one engine whose events are told once: one polls, and the other one says so."""

import asyncio
from contextlib import aclosing, asynccontextmanager

import pytest
from eventually import until
from trtllm_server import TrtllmServer

from prefixfleet.router import engine_poll
from prefixfleet.router.engine_poll import EnginePoller
from prefixfleet.store.engine_mirror import EngineMirror
from prefixfleet.store.errors import IndexUnavailable
from prefixfleet.store.poll_rights import PollRights


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name in ("BUSY_S", "IDLE_S", "FAILED_S", "CLAIM_S"):
        monkeypatch.setattr(engine_poll, name, 0.02)


@pytest.fixture
async def server():
    async with TrtllmServer() as server:
        yield server


@asynccontextmanager
async def polling(server, claim):
    mirror = EngineMirror(lambda salt: b"r" * 16, 16, b"k" * 32)
    poller = EnginePoller(mirror, server.events, 16, claim)

    async def follow():
        async with aclosing(poller.changes()) as changes:
            async for _ in changes:
                pass

    task = asyncio.create_task(follow())
    try:
        yield poller, mirror
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_of_two_routers_one_polls_and_the_other_takes_over(server, redis_url, fleet):
    rights = [PollRights(redis_url, fleet, name, timeout_s=20) for name in "ab"]

    def claim(right):
        return lambda engine: right.claim(engine, ttl_s=0.5)

    async with polling(server, claim(rights[1])) as (second, late):
        await until(lambda: second.connected)
        async with polling(server, claim(rights[0])) as (first, early):
            await until(lambda: "another router" in first.fault)
            server.tell(server.stored(range(64)))
            await until(lambda: len(late) == 4)
            assert (len(early), first.batches) == (0, 0)
            assert (second.losses.gaps, second.fault) == (0, "")
    async with polling(server, claim(rights[0])) as (first, early):
        await until(lambda: not first.fault)
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
        assert "another router" in poller.fault


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
