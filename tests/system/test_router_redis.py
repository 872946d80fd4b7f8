"""Redis goes away and comes back empty: the router serves throughout, and goes on to match."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from chats import write_model
from eventually import until
from router_rig import Rig

from prefixfleet.cluster.ports import hold_port
from prefixfleet.store.errors import IndexUnavailable
from prefixfleet.store.redis_server import RedisServer

PASSWORD = "only for this test"
LONG = "The prefix cache keeps what a node computed before. " * 20


@pytest.fixture
async def rig(tmp_path):
    """A router with a Redis of its own, which the test stops and starts."""
    async with AsyncExitStack() as stack:
        held = stack.enter_context(hold_port("127.0.0.1"))  # also while it is away
        port = held.getsockname()[1]
        server = RedisServer.start(tmp_path / "first", password=PASSWORD, port=port)
        rig = Rig(write_model(tmp_path / "model"), stack, server.url)
        rig.server = server
        stack.callback(lambda: rig.server.stop())
        yield rig


def restart(rig, folder):
    port = int(rig.redis_url.rsplit(":", 1)[1].split("/")[0])
    rig.server.stop()
    rig.server = RedisServer.start(folder, password=PASSWORD, port=port)


async def once_it_answers(do):
    """What workers and nodes say when Redis is back, as they do: again until it answers."""

    async def done():
        try:
            await do()
        except IndexUnavailable:
            return False
        return True

    await until(done, 60)


async def test_without_redis_requests_are_served_and_matched_by_what_was_known(rig):
    engines = [await rig.engine(name) for name in "ab"]
    router = await rig.start(*engines)
    await rig.holds(engines[0], [])
    await rig.holds(engines[1], engines[1].tokens.of_text(LONG))

    rig.server.stop()
    await until(lambda: {m.name for m in router.degraded.modes()} == {"index", "registry", "loads"})
    answers = [await rig.post(prompt=LONG) for _ in range(5)]

    assert [status for status, _, _ in answers] == [200] * 5
    assert {headers["x-prefixfleet-node"] for _, headers, _ in answers} == {"node-b"}


async def test_a_redis_that_restarts_empty_blinds_nobody(rig, tmp_path, monkeypatch):
    monkeypatch.setattr("prefixfleet.router.view.INHERIT_S", 60.0)  # nodes come back in time
    engines = [await rig.engine(name) for name in "ab"]
    router = await rig.start(*engines)
    ids = engines[1].tokens.of_text(LONG)
    await rig.holds(engines[0], [])
    await rig.holds(engines[1], ids)
    stop, answers = asyncio.Event(), []

    async def ask_on():
        while not stop.is_set():
            answers.append(await rig.post(prompt=LONG))
            await asyncio.sleep(0)

    asking = asyncio.create_task(ask_on())
    restart(rig, tmp_path / "second")
    await once_it_answers(lambda: rig.announce(*(engine.record() for engine in engines)))
    await once_it_answers(lambda: rig.holds(engines[1], ids))  # it joined again and published
    await until(lambda: router.degraded.modes() == [])
    counted = len(answers)
    await until(lambda: len(answers) >= counted + 20)
    stop.set()
    await asking

    assert {status for status, _, _ in answers} == {200}
    blind = [h for _, h, _ in answers if h["x-prefixfleet-hit-tokens"] == "0"]
    assert blind == []
    assert router.view.members["node-b"] == rig.members["node-b"]
