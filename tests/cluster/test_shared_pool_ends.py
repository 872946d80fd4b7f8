"""Models that come and go on a shared node, and what must not keep memory from the others."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, replace

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from eventually import until
from node_rig import NAMESPACE, SECRET, PlainEngine, fresh_chain, running_node, settings_of
from two_models import LARGE, POOL_BYTES, SMALL, both_at, found, kind, stored

from prefixfleet.cluster import pool_opener, sharing, slab_mover, writes
from prefixfleet.cluster.engine_channel import join_hashes
from prefixfleet.cluster.handover import HandedOver, ask_handover
from prefixfleet.cluster.links import open_links
from prefixfleet.cluster.node import NodeDaemon
from prefixfleet.cluster.sharing import MAX_KINDS
from prefixfleet.store import slab_shares, watermark
from prefixfleet.store.errors import ProtocolError
from prefixfleet.store.keep import Keep
from prefixfleet.store.memory_index import MemoryIndex
from prefixfleet.store.namespace import in_era
from prefixfleet.store.prefetch import Prefetch, prefetch_key
from prefixfleet.store.records import NodeRecord, PullPlan


@pytest.fixture
def index():
    return MemoryIndex(lease_s=60)


@pytest.fixture
async def node(index, tmp_path_factory):
    folder = tmp_path_factory.mktemp("n")
    async with running_node(index, settings_of(folder, pool_bytes=POOL_BYTES)) as daemon:
        yield daemon
        for pool in daemon._opener.pools.values():
            pool.host.pool.check()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(slab_shares, "LEAST_AGE_S", 0.0)
    monkeypatch.setattr(pool_opener, "BACK_S", 0.0)
    monkeypatch.setattr(slab_mover, "LOOK_S", 0.02)
    monkeypatch.setattr(slab_mover, "PAUSE_S", 0.0)
    monkeypatch.setattr(slab_mover, "EMPTY_S", 0.2)
    monkeypatch.setattr(slab_mover, "RETRY_S", 60.0)


def of_era(number):
    return SMALL | {"namespace": asdict(in_era(NAMESPACE, f"era{number}"))}


def model(number):
    return SMALL | {"namespace": asdict(replace(NAMESPACE, weights=f"of model {number}"))}


def of_update(number, update):
    namespace = replace(NAMESPACE, weights=f"of model {number}", block_tokens=32 * update)
    return SMALL | {"namespace": asdict(namespace)}


async def held(index, chains, **expected):
    return {
        name: (await index.match(chain)).get("a", 0) for name, chain in chains.items()
    } == expected


async def test_an_engine_that_is_reset_for_ever_takes_one_place_and_strands_no_memory(
    node, monkeypatch
):
    monkeypatch.setattr(slab_mover, "ERA_S", 0.0)
    socket, told = node.settings.socket_path, 0
    for number in range(3 * MAX_KINDS):
        async with PlainEngine.connected(socket, engine="e", **of_era(number)) as engine:
            assert "error" not in engine.welcome
            await until(lambda engine=engine: kind(node, engine)["slabs"] >= 8)
            assert await stored(engine, fresh_chain(20), number) == 20
            told += 20
        await until(lambda: len(node.snapshot()["kinds"]) == 1)
        assert node.snapshot()["cache"]["committed_blocks"] == told
        assert next(iter(node.snapshot()["kinds"].values()))["slabs"] == 32
    assert len(node._opener.mover._own) == 1


async def test_an_era_comes_again_after_it_ended(node, monkeypatch):
    monkeypatch.setattr(slab_mover, "ERA_S", 0.0)
    socket, chain = node.settings.socket_path, fresh_chain(20)
    async with PlainEngine.connected(socket, **SMALL):
        for _ in range(3):
            async with PlainEngine.connected(socket, **of_era(1)) as engine:
                await until(lambda engine=engine: kind(node, engine)["slabs"] == 4)
                assert await found(engine, chain) == 0
                assert await stored(engine, chain) == 20
            await until(lambda: len(node.snapshot()["kinds"]) == 1)


async def test_an_update_of_all_models_of_a_node_refuses_no_engine(node, monkeypatch):
    """Twice, each time to namespaces of their own, and then back to the first ones."""
    monkeypatch.setattr(slab_mover, "EMPTY_S", 30.0)
    socket, first = node.settings.socket_path, set()
    for update in (1, 2, 1):
        async with AsyncExitStack() as stack:
            engines = []
            for number in range(MAX_KINDS):
                connected = PlainEngine.connected(socket, **of_update(number, update))
                engines.append(await stack.enter_async_context(connected))
                assert "error" not in engines[-1].welcome
            first = first or {engines[0].welcome["namespace_digest"]}
            await until(lambda engines=engines: all(kind(node, e)["slabs"] for e in engines))
            for engine in engines:
                assert await stored(engine, fresh_chain(3)) == 3

            # only the first one never goes
            stay = {engine.welcome["namespace_digest"] for engine in engines} | first
            await until(lambda stay=stay: node._opener.pools.keys() == stay)
        await until(lambda: node.snapshot()["connections"] == 0)
    assert node.snapshot()["counters"]["ended_kinds"] == 2 * MAX_KINDS - 1


async def test_who_has_no_engine_for_longest_gives_its_place_and_wishes_go_last(
    node, index, monkeypatch
):
    monkeypatch.setattr(slab_mover, "EMPTY_S", 30.0)
    socket, chains = node.settings.socket_path, {}
    async with AsyncExitStack() as stack:
        for number in range(MAX_KINDS - 2):
            await stack.enter_async_context(PlainEngine.connected(socket, **model(number)))
        async with PlainEngine.connected(socket, **model("away")) as away:
            async with PlainEngine.connected(socket, **model("wished")) as wished:
                for name, engine in (("away", away), ("wished", wished)):
                    await until(lambda engine=engine: kind(node, engine)["slabs"])
                    chains[name] = fresh_chain(3)
                    assert await stored(engine, chains[name]) == 3
                digest = wished.welcome["namespace_digest"]
                node._keep(Keep(namespace=digest, chain=chains["wished"], ttl_s=3600.0))
            await until(lambda: not kind(node, wished)["engines"])
        await until(lambda: not kind(node, away)["engines"])
        await until(lambda: held(index, chains, wished=3, away=3))

        newer = await stack.enter_async_context(PlainEngine.connected(socket, **model("newer")))
        await until(lambda: len(node.snapshot()["kinds"]) == MAX_KINDS)
        assert await held(index, chains, wished=3, away=0)
        assert await stored(newer, fresh_chain(3)) == 3

        await stack.enter_async_context(PlainEngine.connected(socket, **model("newest")))
        await until(lambda: len(node.snapshot()["kinds"]) == MAX_KINDS)
        assert await held(index, chains, wished=0, away=0)
        assert node.snapshot()["counters"]["ended_kinds"] == 2
        assert node.snapshot()["counters"]["ended_wished_blocks"] == 3


async def test_what_a_peer_reads_holds_up_the_end_of_a_namespace_but_not_the_newcomer(node):
    socket = node.settings.socket_path
    async with AsyncExitStack() as stack:
        for number in range(MAX_KINDS - 1):
            await stack.enter_async_context(PlainEngine.connected(socket, **model(number)))
        async with PlainEngine.connected(socket, **model("away")) as away:
            await until(lambda: kind(node, away)["slabs"])
            chain = fresh_chain(3)
            assert await stored(away, chain) == 3
        await until(lambda: not kind(node, away)["engines"])
        pool = node._opener.pools[away.welcome["namespace_digest"]].host.pool

        with pool.pin(chain):
            newer = await stack.enter_async_context(PlainEngine.connected(socket, **model("newer")))
            await until(lambda: node._opener.mover.stuck)
            assert kind(node, away)["ends"]
            refuses_hints_and_wishes(node, away.welcome["namespace_digest"])
            await until(lambda: kind(node, newer)["slabs"])
            assert await stored(newer, fresh_chain(3)) == 3
            assert pool.match(chain) == 3
            async with PlainEngine.connected(socket, **model("away")) as back:
                assert f"engines of {MAX_KINDS} models" in back.welcome["error"]


async def test_a_model_that_was_cut_off_for_a_moment_keeps_its_place(node, monkeypatch):
    """A ninth asks again and again. Who runs the same model otherwise comes in place of it."""
    monkeypatch.setattr(pool_opener, "BACK_S", 600.0)
    socket, chain = node.settings.socket_path, fresh_chain(3)
    async with AsyncExitStack() as stack:
        for number in range(MAX_KINDS - 1):
            await stack.enter_async_context(PlainEngine.connected(socket, **model(number)))
        async with PlainEngine.connected(socket, **of_update("cut", 1)) as cut:
            await until(lambda: kind(node, cut)["slabs"])
            assert await stored(cut, chain) == 3
        await until(lambda: not kind(node, cut)["engines"])

        async with PlainEngine.connected(socket, **model("ninth")) as ninth:
            assert f"engines of {MAX_KINDS} models" in ninth.welcome["error"]
        async with PlainEngine.connected(socket, **of_update("cut", 1)) as back:
            assert await found(back, chain) == 3
        await until(lambda: not kind(node, cut)["engines"])
        async with PlainEngine.connected(socket, **of_update("cut", 2)) as otherwise:
            assert "error" not in otherwise.welcome


def refuses_hints_and_wishes(node, digest):
    """What it took would be lost with the namespace, and whoever asked would not hear of it."""
    plan = PullPlan(request="r", source="b", source_epoch=1, blocks=1)
    chain = tuple(fresh_chain(1))
    with pytest.raises(ProtocolError, match="no engine of this namespace"):
        node._prefetch(Prefetch(plan=plan, namespace=digest, chain=chain))
    with pytest.raises(ProtocolError, match="no engine of this namespace"):
        node._keep(Keep(namespace=digest, chain=chain, ttl_s=60.0))
    counters, pool = node.snapshot()["counters"], node._opener.pools[digest]
    assert (counters["refused_hints"], counters["refused_wishes"]) == (1, 1)
    assert pool.cache.claims.waiting_hints == len(pool.cache.retention) == 0


async def test_namespaces_that_cannot_go_are_bounded_in_number(node, monkeypatch):
    monkeypatch.setattr(sharing, "MOST_POOLS", 3)
    monkeypatch.setattr(slab_mover, "MAX_KINDS", 1)
    socket, reading = node.settings.socket_path, []
    async with AsyncExitStack() as stack:
        for number in range(3):
            async with PlainEngine.connected(socket, **model(number)) as engine:
                await until(lambda engine=engine: kind(node, engine)["slabs"])
                chain = fresh_chain(1)
                assert await stored(engine, chain) == 1
            pool = node._opener.pools[engine.welcome["namespace_digest"]].host.pool
            reading.append(stack.enter_context(pool.pin(chain)))
        async with PlainEngine.connected(socket, **model(3)) as engine:
            assert "not gone yet; start it again" in engine.welcome["error"]

        monkeypatch.setattr(slab_mover, "RETRY_S", 0.0)
        node._opener.mover._stuck_s.clear()
        for pin in reading:
            pin.release()
        await until(lambda: len(node.snapshot()["kinds"]) < 3)
        async with PlainEngine.connected(socket, **model(3)) as engine:
            assert "error" not in engine.welcome


async def test_a_model_may_be_run_otherwise_once_no_engine_runs_it_as_before(node):
    """As after an update of an engine's options; until then it is a mistake."""
    socket, exact, eight_bits = node.settings.socket_path, fresh_chain(20), fresh_chain(30)
    otherwise = SMALL | {
        "namespace": asdict(replace(NAMESPACE, encoding="int8")),
        "payload_bytes": 4_000,
    }
    async with PlainEngine.connected(socket, engine="before", **SMALL) as before:
        assert await stored(before, exact) == 20
        async with PlainEngine.connected(socket, engine="after", **otherwise) as after:
            assert "an engine here stores them as 'exact'" in after.welcome["error"]
    await until(lambda: node.snapshot()["connections"] == 0)

    async with PlainEngine.connected(socket, engine="after", **otherwise) as after:
        await until(lambda: kind(node, after)["slabs"] > 0)
        assert await stored(after, eight_bits) == 30
        assert await found(after, exact) == 0
        async with PlainEngine.connected(socket, engine="before", **SMALL) as before:
            assert "an engine here stores them as 'int8'" in before.welcome["error"]
    await until(lambda: node.snapshot()["connections"] == 0)

    async with PlainEngine.connected(socket, engine="before", **SMALL) as before:
        assert await found(before, exact) == 20


async def test_wishes_to_keep_do_not_leave_another_model_without_memory(node, monkeypatch):
    """Kept blocks all over the memory, so that there is no slab without one."""
    monkeypatch.setattr(watermark, "MOST_SHARE", watermark.LEAST_SHARE)  # fill all of it
    socket = node.settings.socket_path
    async with PlainEngine.connected(socket, engine="small", **SMALL) as small:
        digest = small.welcome["namespace_digest"]
        pool = node._opener.pools[digest]
        kept = {}  # by slab
        for block in fresh_chain(1_536):
            (slot,) = await small.put([block])
            if kept.setdefault(slot * 8_192 // (POOL_BYTES // 32), block) is block:
                node._keep(Keep(namespace=digest, chain=(block,), ttl_s=3600.0, priority=1))
        assert len(kept) == 32

        async with PlainEngine.connected(socket, engine="large", **LARGE) as large:
            await until(lambda: kind(node, large)["slabs"] == 4)
            assert await stored(large, fresh_chain(20), 2) == 20
            assert pool.cache.room()["kept"] == 28
            assert pool.cache.room()["wished"] == 32
            assert pool.cache.room()["displaced_blocks"] == 4

            lost = [block for block in kept.values() if not pool.host.pool.match([block])]
            assert len(lost) == 4
            await stored(small, lost[:1])
            await until(lambda: pool.cache.room()["kept"] == 29)


async def test_what_gave_way_is_kept_again_where_the_slab_stays(node):
    """An engine reads there: the slab does not go, nor does what was wished for."""
    socket = node.settings.socket_path
    async with PlainEngine.connected(socket, engine="small", **SMALL) as small:
        chain = fresh_chain(1_100)
        await small.put(chain)
        digest = small.welcome["namespace_digest"]
        cache = node._opener.pools[digest].cache
        node._keep(Keep(namespace=digest, chain=tuple(chain[-300:]), ttl_s=3600.0, priority=1))
        kept = cache.room()["kept"]
        assert kept == 300
        await small.prepare(chain)
        with cache.pool.reserve(b"", fresh_chain(cache.pool.free_slots)):  # the rest is written
            async with PlainEngine.connected(socket, engine="large", **LARGE):
                await until(lambda: node._opener.mover.stuck)
                assert cache.room()["displaced_blocks"] > 0
                assert cache.room()["kept"] == kept


async def test_what_is_read_of_one_model_keeps_no_other_from_giving_memory(node):
    """Who has no engine gives first, but a peer reads all that it has: then another one gives."""
    socket = node.settings.socket_path
    async with (
        PlainEngine.connected(socket, engine="small", **SMALL) as small,
        PlainEngine.connected(socket, engine="large", **LARGE) as large,
    ):
        async with PlainEngine.connected(socket, **model("away")) as away:
            await until(lambda: kind(node, away)["slabs"] == 2)
            chain = fresh_chain(80)
            here = await stored(away, chain)
        pool = node._opener.pools[away.welcome["namespace_digest"]].host.pool
        with pool.pin(chain[:here]):
            wanted = kind(node, large)["slabs"] + 4

            async def got_more():
                await stored(large, fresh_chain(50), 2)
                return kind(node, large)["slabs"] >= wanted

            await until(got_more)
            assert kind(node, away)["slabs"] > 0
            assert node._opener.mover.stuck <= 2
        assert kind(node, small)["slabs"] >= 2


async def test_blocks_that_a_rank_never_asked_for_do_not_keep_the_memory(node, monkeypatch):
    """The other rank wrote its half; this one's question was lost with its connection."""
    monkeypatch.setattr(writes, "AWAIT_S", 0.5)
    monkeypatch.setattr(slab_mover, "RETRY_S", 0.05)
    socket, chain = node.settings.socket_path, join_hashes(fresh_chain(1_490))
    two_ranks = {
        "namespace": asdict(replace(NAMESPACE, weights="of two", tensor_parallel=2)),
        "payload_bytes": 4_000,
        "shards": 2,
    }
    async with (
        PlainEngine.connected(socket, engine="two", role="worker", **two_ranks) as rank,
        PlainEngine.connected(socket, engine="large", **LARGE) as large,
    ):
        await until(lambda: kind(node, large)["slabs"] == 4)
        slots = (await rank.ask("reserve", parent=b"", hashes=chain, rank=0))["slots"]
        assert slots.count(-1) < 300
        await rank.ask("commit", hashes=chain, rank=0)

        async def has_more():
            await stored(large, fresh_chain(100), 2)
            return kind(node, large)["slabs"] > 8

        await until(has_more)


async def test_a_loop_that_began_with_an_engine_and_breaks_ends_the_daemon(tmp_path_factory):
    """As one that began with the daemon does: memory that moves no more would not be seen."""
    settings = settings_of(tmp_path_factory.mktemp("n"), pool_bytes=POOL_BYTES)
    async with AsyncExitStack() as stack:
        daemon = await stack.enter_async_context(lone_node(settings))
        waiting = asyncio.create_task(daemon.wait(asyncio.Event()))
        await stack.enter_async_context(PlainEngine.connected(settings.socket_path, **SMALL))
        daemon._opener.mover._holdings = lambda: 1 // 0
        await until(waiting.done)
        with pytest.raises(ZeroDivisionError):
            waiting.result()


def lone_node(settings):
    """Without `running_node`'s own watch on its loops."""
    return NodeDaemon(settings, SECRET, MemoryIndex(lease_s=60), open_links(settings, SECRET))


async def test_a_model_whose_peer_takes_no_block_keeps_no_other_from_handing_over(tmp_path_factory):
    """The peer accepts what is offered of the first model, and then nothing comes of it."""
    index, folder = MemoryIndex(lease_s=60), tmp_path_factory.mktemp("n")
    async with AsyncExitStack() as stack:
        a, b = [
            await stack.enter_async_context(
                running_node(index, settings_of(folder, name, pool_bytes=POOL_BYTES))
            )
            for name in "ab"
        ]
        small, large = await stack.enter_async_context(both_at(a))
        large_b = await stack.enter_async_context(
            PlainEngine.connected(b.settings.socket_path, **LARGE)
        )
        digest = small.welcome["namespace_digest"].hex()
        idle = NodeRecord(
            node="idle",
            host="127.0.0.1",
            http=await stack.enter_async_context(who_accepts_all()),
            stats={"kinds": {digest: {"slots": 1_000, "resident": 0}}},
        )
        await index.join(idle)
        mine, theirs = fresh_chain(5), fresh_chain(6)
        assert await stored(small, mine, 1) == 5
        assert await stored(large, theirs, 2) == 6

        async def known():
            told = {member.node: record.stats["kinds"] for member, record in await index.members()}
            held = await index.match(mine) == {"a": 5} and await index.match(theirs) == {"a": 6}
            return held and all(kind["slots"] for kind in told["b"].values()) and told["b"]

        await until(known)
        assert await ask_handover(a.url, prefetch_key(SECRET), 8.0) == HandedOver(11, 6)
        assert await found(large_b, theirs, 2) == 6


@asynccontextmanager
async def who_accepts_all():
    async def accept(_):
        return web.Response(status=202)

    app = web.Application()
    app.router.add_post("/{path:.*}", accept)
    async with TestServer(app) as server:
        yield f"http://127.0.0.1:{server.port}"
