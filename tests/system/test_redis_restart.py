"""Redis comes back empty: nodes join and publish again, and pulls go on meanwhile."""

import asyncio
import secrets
import time

import pytest
from eventually import until
from node_rig import PlainEngine, fresh_chain, payload_of, running_node, settings_of

from prefixfleet.cluster.ports import hold_port
from prefixfleet.router.degraded import Degraded
from prefixfleet.router.feed import Feed
from prefixfleet.router.view import View
from prefixfleet.store.errors import IndexUnavailable
from prefixfleet.store.records import PullPlan
from prefixfleet.store.redis_index import RedisIndex
from prefixfleet.store.redis_server import RedisServer


@pytest.fixture
def port():
    """Redis's; nobody else's while that is away."""
    with hold_port("127.0.0.1") as held:
        yield held.getsockname()[1]


@pytest.fixture
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("n")


async def is_true(condition):
    return condition()


async def matched(index, chain, expected):
    try:
        return await index.match(chain) == expected
    except IndexUnavailable:  # it is away at the moment
        return False


async def has_contacts(index, node):
    return any(m.node == node and r.contacts for m, r in await index.members())


def start_redis(folder, password, port):
    return RedisServer.start(folder, password=password, port=port)


@pytest.mark.timeout(180)
async def test_nodes_publish_again_and_the_router_sees_them_again(folder, tmp_path, port):
    password = secrets.token_hex(8)
    server = start_redis(tmp_path, password, port)
    index, router_index = (
        RedisIndex(server.url, "f", lease_s=60, timeout_s=20),
        RedisIndex(server.url, "f", lease_s=60, timeout_s=20),
    )
    view = View(time.monotonic)
    feed = asyncio.create_task(Feed(router_index, view, Degraded(time.monotonic)).run())
    chain = fresh_chain(20)
    try:
        async with (
            running_node(index, settings_of(folder, "a")) as a,
            running_node(index, settings_of(folder, "b")) as b,
            PlainEngine.connected(a.settings.socket_path) as at_a,
            PlainEngine.connected(b.settings.socket_path) as at_b,
        ):
            await at_a.put(chain, fill=9)
            await until(lambda: matched(index, chain, {"a": 20}))
            await until(lambda: is_true(lambda: view.leading(chain) == {"a": 20}))
            before = a.epoch

            server.stop()
            server = start_redis(tmp_path, password, port)

            await until(lambda: matched(index, chain, {"a": 20}))
            await until(lambda: is_true(lambda: view.leading(chain) == {"a": 20}))
            assert a.epoch > before
            await until(lambda: has_contacts(index, "a"))
            plan = PullPlan(request="r", source="a", source_epoch=a.epoch, blocks=20, budget_s=20.0)
            answer = await at_b.prepare(chain, plan)
            assert answer["pulled"] == 20
            for block, slot in zip(chain, answer["slots"], strict=True):
                assert at_b.payload(slot, block) == payload_of(block, 9)
    finally:
        feed.cancel()
        await asyncio.gather(feed, return_exceptions=True)
        await index.close()
        await router_index.close()
        server.stop()
