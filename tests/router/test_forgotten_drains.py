"""Redis is killed and comes back empty under routers: who was drained by order stays drained."""

import contextlib
from contextlib import AsyncExitStack

import pytest
from eventually import until
from redis_servers import forgetful_server
from router_rig import Rig
from upstreams import SECRET

from prefixfleet.router.orders import Order
from prefixfleet.store.errors import IndexUnavailable
from prefixfleet.store.worker_orders import WorkerOrders


@pytest.fixture
def server(tmp_path):
    with forgetful_server(tmp_path) as made:
        yield made


@pytest.fixture
async def rig(model_folder, server):
    async with AsyncExitStack() as stack:
        yield Rig(model_folder, stack, server.url)


async def in_redis(server, fleet):
    """Workers that a newcomer finds orders about; None while Redis cannot be asked."""
    orders = WorkerOrders(server.url, fleet, SECRET, timeout_s=20)
    try:
        return set(await orders.all())
    except IndexUnavailable:
        return None
    finally:
        await orders.close()


async def after_a_loss(rig, server, engines):
    """Redis is empty, and the workers have announced themselves again."""
    await server.lose_its_memory()

    async def announced():
        with contextlib.suppress(IndexUnavailable):
            await rig.announce(*(engine.record() for engine in engines))
            return True

    await until(announced)


async def test_a_drained_worker_gets_no_request_after_redis_lost_its_memory(rig, server):
    engines = [await rig.engine(name) for name in "ab"]
    router = await rig.start(*engines)
    await router.orders.give("a", Order(state="draining"))
    router.roster.look_again()
    used_before = len(engines[0].seen)
    await after_a_loss(rig, server, engines)

    async def put_back():
        return await in_redis(server, rig.fleet) == {"a"}

    await until(put_back)
    assert {(await rig.post())[1]["x-prefixfleet-node"] for _ in range(6)} == {"node-b"}
    assert len(engines[0].seen) == used_before

    await router.orders.give("a", Order())
    await after_a_loss(rig, server, engines)
    await until(lambda: not router.degraded.modes())
    await rig.until_ready(2)
    assert await in_redis(server, rig.fleet) == set()
