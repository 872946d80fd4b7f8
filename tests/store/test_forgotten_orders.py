"""A real server is killed and comes back empty, or with what it had earlier: what operators ordered
is put back by whoever saw it, and what they took back does not return."""

from contextlib import asynccontextmanager

import pytest
import redis.asyncio
from redis_servers import forgetful_server

from prefixfleet.store.errors import IndexUnavailable
from prefixfleet.store.records import FleetWish
from prefixfleet.store.registry import WorkerRegistry
from prefixfleet.store.signed import Seals
from prefixfleet.store.worker_orders import WorkerOrders

SECRET = b"the same on all hosts"


@pytest.fixture
def server(tmp_path):
    with forgetful_server(tmp_path) as made:
        yield made


@pytest.fixture
async def router(server, fleet):
    """Makes what a router has of its own; each call is another router."""
    made = []

    def make():
        made.append(WorkerOrders(server.url, fleet, SECRET, timeout_s=20))
        server.clients.append(made[-1]._redis)
        return made[-1]

    yield make
    for orders in made:
        await orders.close()


@pytest.fixture
async def worker(server, fleet):
    """Makes what a worker has of its own."""
    made = []

    def make():
        made.append(WorkerRegistry(server.url, fleet, secret=SECRET, timeout_s=20))
        server.clients.append(made[-1]._functions)
        return made[-1]

    yield make
    for registry in made:
        await registry.close()


async def test_a_router_puts_back_the_orders_that_it_saw(server, router):
    giver, reader = router(), router()
    await giver.give("a", b"drain")
    await giver.give("b", b"remove")
    await reader.all()
    await giver.close()
    await server.lose_its_memory()

    assert await reader.all() == {"a": b"drain", "b": b"remove"}
    assert await router().all() == {"a": b"drain", "b": b"remove"}


async def test_who_gave_an_order_and_never_read_it_puts_it_back(server, router):
    giver = router()
    await giver.give("a", b"drain")
    await server.lose_its_memory()

    assert await giver.all() == await router().all() == {"a": b"drain"}


@pytest.mark.parametrize("first", ["who knows", "who does not"])
async def test_an_order_that_was_taken_back_does_not_return(server, router, first):
    """One router had not heard of it yet when the server died; whoever reads first."""
    one, late = router(), router()
    await one.give("a", b"drain")
    await one.give("b", b"drain")
    await late.all()
    await one.withdraw("a")
    await server.lose_its_memory()

    for reader in (one, late) if first == "who knows" else (late, one):
        await reader.all()

    for reader in (one, late, router()):
        assert await reader.all() == {"b": b"drain"}
        assert reader.refused == {}


async def test_an_order_that_was_replaced_does_not_return(server, router):
    one, late = router(), router()
    await one.give("a", b"drain")
    await late.all()
    await one.give("a", b"remove")
    await server.lose_its_memory()

    await late.all()

    assert await one.all() == await late.all() == await router().all() == {"a": b"remove"}


async def test_an_order_given_to_a_server_that_has_forgotten_stands_beside_the_others(
    server, router
):
    knows, newcomer = router(), router()
    await knows.give("a", b"drain")
    await knows.give("b", b"drain")
    await server.lose_its_memory()

    await newcomer.give("b", b"remove")

    assert await knows.all() == await newcomer.all() == {"a": b"drain", "b": b"remove"}


async def test_an_order_taken_back_right_after_the_loss_stays_so(server, router):
    one, other = router(), router()
    await one.give("a", b"drain")
    await other.all()
    await server.lose_its_memory()

    await one.withdraw("a")

    assert await other.all() == await one.all() == {}


@asynccontextmanager
async def raw(server):
    async with redis.asyncio.Redis.from_url(server.url) as client:
        yield client


async def test_a_server_that_comes_back_with_an_older_state_is_brought_up_to_date(
    server, router, fleet
):
    one, late = router(), router()
    await one.give("a", b"drain")
    await one.give("gone", b"drain")
    await late.all()
    keys = [f"pf1:{{{fleet}}}:{name}" for name in ("worker_orders", "orders_changed")]
    async with raw(server) as client:
        saved = [await client.hgetall(key) for key in keys]
    await one.give("a", b"remove")
    await one.give("b", b"drain")
    await one.withdraw("gone")
    await server.lose_its_memory()
    async with raw(server) as client:
        for key, fields in zip(keys, saved, strict=True):
            await client.hset(key, mapping=fields)

    for reader in (late, one, late):
        await reader.all()

    assert await one.all() == await late.all() == {"a": b"remove", "b": b"drain"}


async def test_a_forged_order_is_no_reason_to_put_anything_back(server, router, fleet):
    one = router()
    await one.give("a", b"drain")
    async with raw(server) as client:
        forged = Seals(b"another secret", fleet, "order about worker").seal("a", b"ready")
        await client.hset(f"pf1:{{{fleet}}}:worker_orders", "a", forged)

        assert await one.all() == {}
        assert set(one.refused) == {"a"}
        assert await client.hget(f"pf1:{{{fleet}}}:worker_orders", "a") == forged


@pytest.mark.parametrize("junk", [b"", b"-1", b"many"])
async def test_a_count_that_is_none_is_an_error(server, router, fleet, junk):
    one = router()
    await one.give("a", b"drain")
    async with raw(server) as client:
        await client.hset(f"pf1:{{{fleet}}}:orders_changed", "generation", junk)

    with pytest.raises(IndexUnavailable, match="worker orders"):
        await one.all()


async def test_a_worker_puts_back_the_wish_that_it_saw(server, worker):
    operator, drained = worker(), worker()
    await operator.change_wish(lambda _: FleetWish(draining=("a",), rollout=3))
    await drained.wish()
    await operator.close()
    await server.lose_its_memory()

    assert (await drained.wish()).draining == ("a",)
    assert (await worker().wish()).rollout == 3


@pytest.mark.parametrize("first", ["who knows", "who does not"])
async def test_a_drain_that_was_taken_back_does_not_return(server, worker, first):
    one, late = worker(), worker()
    await one.change_wish(lambda _: FleetWish(draining=("a",)))
    await late.wish()
    await one.change_wish(lambda _: FleetWish())
    await server.lose_its_memory()

    for reader in (one, late) if first == "who knows" else (late, one):
        await reader.wish()

    for reader in (one, late, worker()):
        assert await reader.wish() == FleetWish()


async def test_a_change_after_the_loss_builds_on_what_was_wished(server, worker):
    one = worker()
    await one.change_wish(lambda _: FleetWish(draining=("a",), nodes=2))
    await server.lose_its_memory()

    wish = await one.change_wish(lambda before: FleetWish(draining=before.draining, nodes=3))

    assert (wish.draining, wish.nodes) == (("a",), 3)
    assert await worker().wish() == wish
