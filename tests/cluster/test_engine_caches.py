"""What an engine holds itself, from its KV events on real sockets to the fleet's second index."""

from contextlib import AsyncExitStack

import pytest
from engine_publisher import EnginePublisher, removed
from eventually import until
from node_rig import NAMESPACE, SECRET, PlainEngine, running_node, settings_of

from prefixfleet.store import engine_mirror
from prefixfleet.store.chain import extend_chain
from prefixfleet.store.memory_index import MemoryIndex
from prefixfleet.store.namespace import Scope, chain_root, hash_key
from prefixfleet.store.redis_index import RedisIndex

BLOCKS = 200  # more than a segment of the index
TOKENS = list(range(BLOCKS * NAMESPACE.block_tokens))


def chain_of(tokens, salt=""):
    """What a router makes of a prompt."""
    key = hash_key(SECRET)
    root = chain_root(NAMESPACE.digest(SECRET), Scope(salt=salt), key)
    return extend_chain(root, tokens, NAMESPACE.block_tokens, key)


@pytest.fixture(params=["memory", "redis"])
async def caches(request):
    """The index of engines' caches."""
    if request.param == "memory":
        yield MemoryIndex(lease_s=60)
        return
    index = RedisIndex(
        *map(request.getfixturevalue, ("redis_url", "fleet")),
        area="engines",
        lease_s=60,
        timeout_s=20,
    )
    yield index
    await index.close()


@pytest.fixture
async def daemon(tmp_path_factory, caches):
    settings = settings_of(tmp_path_factory.mktemp("n"))
    async with running_node(MemoryIndex(lease_s=60), settings, engine_index=caches) as daemon:
        yield daemon


@pytest.fixture
async def publisher():
    async with EnginePublisher(NAMESPACE.block_tokens) as publisher:
        yield publisher


def engine_of(daemon, publisher, **hello):
    return PlainEngine.connected(
        daemon.settings.socket_path, events=publisher.events, replay=publisher.replay, **hello
    )


async def found(caches, chain, expected):
    return await caches.match(chain) == expected


async def test_what_an_engine_holds_is_told_and_taken_back(daemon, publisher, caches):
    chain = chain_of(TOKENS)
    async with engine_of(daemon, publisher):
        await publisher.heard()
        await publisher.publish(publisher.stored(TOKENS))
        await until(lambda: found(caches, chain, {"test": BLOCKS}))

        await publisher.publish(removed(*range(150, BLOCKS)))
        await until(lambda: found(caches, chain, {"test": 150}))

        snapshot = daemon.snapshot()
        assert snapshot["tiers"]["gpu"]["resident"] == 150
        assert snapshot["engine_caches"]["test"]["whole"]


async def test_it_is_in_the_chains_that_a_router_asks_for(daemon, publisher, caches):
    """Also those of a tenant's salt; and no other's."""
    tokens = TOKENS[:96]
    async with engine_of(daemon, publisher):
        await publisher.publish(publisher.stored(tokens, extra_keys=[["tenant"], None, None]))

        await until(lambda: found(caches, chain_of(tokens, "tenant"), {"test": 3}))
        assert await caches.match(chain_of(tokens)) == {}


async def test_an_engine_that_goes_holds_nothing(daemon, publisher, caches):
    await publisher.publish(publisher.stored(TOKENS))
    async with engine_of(daemon, publisher):
        await until(lambda: found(caches, chain_of(TOKENS), {"test": BLOCKS}))

    await until(lambda: found(caches, chain_of(TOKENS), {}))
    assert await caches.members() == []
    assert "gpu" not in daemon.snapshot()["tiers"]


async def test_more_blocks_than_are_followed_are_said_and_not_told(
    daemon, publisher, caches, monkeypatch, caplog
):
    monkeypatch.setattr(engine_mirror, "MAX_COPIES", 4)
    async with engine_of(daemon, publisher):
        await publisher.publish(publisher.stored(TOKENS))
        await until(lambda: found(caches, chain_of(TOKENS), {"test": 4}))
        await publisher.publish(publisher.stored(TOKENS[:96], medium="CPU"))
        await until(lambda: daemon.snapshot()["engine_caches"]["test"]["batches"] == 2)

        snapshot = daemon.snapshot()
        assert snapshot["engine_caches"]["test"]["refused_blocks"] == BLOCKS - 4 + 3
        assert any("were left out" in reason for reason in snapshot["degraded"])

        await publisher.publish({"type": "AllBlocksCleared"})
        await until(lambda: not daemon.snapshot()["degraded"])

    assert caplog.text.count("were left out") == 1


async def test_it_comes_back_with_all_it_held(daemon, publisher, caches):
    await publisher.publish(publisher.stored(TOKENS))
    for _ in range(3):
        async with engine_of(daemon, publisher):
            await until(lambda: found(caches, chain_of(TOKENS), {"test": BLOCKS}))
        await until(lambda: found(caches, chain_of(TOKENS), {}))


async def test_an_engine_that_came_again_is_followed_when_its_old_connection_ends(
    daemon, publisher, caches
):
    """A daemon that was busy hears the new hello first."""
    async with AsyncExitStack() as old:
        await old.enter_async_context(engine_of(daemon, publisher))
        async with engine_of(daemon, publisher):
            await old.aclose()
            await until(lambda: daemon.snapshot()["engines"] == 1)
            await publisher.publish(publisher.stored(TOKENS))
            await until(lambda: found(caches, chain_of(TOKENS), {"test": BLOCKS}))


async def test_engines_of_a_node_are_told_apart(daemon, publisher, caches):
    async with (
        EnginePublisher(NAMESPACE.block_tokens) as second,
        engine_of(daemon, publisher, engine="one"),
        engine_of(daemon, second, engine="two"),
    ):
        await publisher.publish(publisher.stored(TOKENS))
        await second.publish(second.stored(TOKENS[:96]))

        await until(lambda: found(caches, chain_of(TOKENS), {"one": BLOCKS, "two": 3}))
        assert daemon.snapshot()["tiers"]["gpu"]["resident"] == BLOCKS + 3


async def test_a_rank_is_no_second_engine_and_silence_is_no_tier(daemon, publisher, caches):
    async with (
        engine_of(daemon, publisher, role="worker"),
        PlainEngine.connected(daemon.settings.socket_path),
    ):
        assert daemon.snapshot()["engine_caches"] == {}
        assert "gpu" not in daemon.snapshot()["tiers"]


@pytest.mark.parametrize(
    "endpoint", ["http://x:1", "tcp://", "tcp://a b:1", 7, "tcp://" + "x" * 300]
)
async def test_an_endpoint_that_is_none_is_refused(daemon, endpoint):
    with pytest.raises((ConnectionError, AssertionError)):
        async with PlainEngine.connected(daemon.settings.socket_path, events=endpoint) as engine:
            assert "pool_path" in engine.welcome
    await until(lambda: refused(daemon))


async def refused(daemon):
    return daemon.snapshot()["refused_engines"] == 1


async def test_an_endpoint_that_nobody_can_connect_to_is_shown_and_harms_nobody(daemon):
    path = daemon.settings.socket_path
    async with PlainEngine.connected(path, events="tcp://127.0.0.1:notaport") as engine:
        await until(lambda: degraded(daemon))
        assert "pool_path" in engine.welcome

    async def well():
        return not await degraded(daemon)

    await until(well)


async def degraded(daemon):
    return any("followed no more" in why for why in daemon.snapshot()["degraded"])
