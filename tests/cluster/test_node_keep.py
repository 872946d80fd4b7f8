"""Wishes at a node: a kept prefix outlives pressure, within a quota, for its time."""

import aiohttp
import pytest
from eventually import until
from node_rig import NAMESPACE, SECRET, PlainEngine, fresh_chain, running_node, settings_of

from prefixfleet.store.keep import Keep, encode_keep, keep_key
from prefixfleet.store.memory_index import MemoryIndex
from prefixfleet.store.prefetch import SIGNATURE_HEADER, sign

SLOTS = 128


@pytest.fixture(params=["lru", "s3-fifo", "value"])
async def daemon(request, tmp_path_factory):
    settings = settings_of(
        tmp_path_factory.mktemp("n"), pool_bytes=SLOTS * 8192, eviction=request.param
    )
    async with running_node(MemoryIndex(lease_s=60), settings) as daemon:
        yield daemon


@pytest.fixture
async def engine(daemon):
    async with PlainEngine.connected(daemon.settings.socket_path) as engine:
        yield engine


async def keep(daemon, chain, ttl_s, secret=SECRET, namespace=None, priority=0):
    wish = Keep(
        namespace=namespace or NAMESPACE.digest(SECRET),
        chain=tuple(chain),
        ttl_s=ttl_s,
        priority=priority,
    )
    body = encode_keep(wish)
    headers = {SIGNATURE_HEADER: sign(body, keep_key(secret))}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{daemon.url}/keep", data=body, headers=headers) as response,
    ):
        return response.status, await response.json()


async def still_here(engine, chain):
    answer = await engine.prepare(chain)
    await engine.ask("release", request="r")
    return answer["blocks"]


async def press(daemon, engine):
    """More than the pool holds, twice over."""
    for _ in range(10):
        await engine.put(fresh_chain(30))
        await until(lambda: settled(daemon))


async def settled(daemon):
    return daemon.snapshot()["tiers"]["dram"]["leaving"] == 0


async def test_a_kept_prefix_outlives_pressure_and_its_end_frees_it(daemon, engine):
    prompt = fresh_chain(10)
    await engine.put(prompt)

    status, answer = await keep(daemon, prompt, 3600)
    await press(daemon, engine)

    assert (status, answer["covered"], answer["kept"]) == (200, 10, 10)
    assert await still_here(engine, prompt) == 10
    await keep(daemon, prompt, 0)
    await press(daemon, engine)
    assert daemon.snapshot()["tiers"]["dram"]["kept"] == 0


async def test_a_wish_covers_what_comes_later(daemon, engine):
    prompt = fresh_chain(6)
    await keep(daemon, prompt, 3600)

    await engine.put(prompt)
    await press(daemon, engine)

    assert await still_here(engine, prompt) == 6


async def test_the_quota_ends_what_is_covered(daemon, engine):
    _, answer = await keep(daemon, fresh_chain(60), 3600)

    assert answer["covered"] == answer["quota"] == SLOTS // 4


async def test_a_higher_priority_is_kept_where_the_quota_is_full(daemon, engine):
    common, system = fresh_chain(60), fresh_chain(10)
    await engine.put(system)
    await keep(daemon, common, 3600)

    _, answer = await keep(daemon, system, 3600, priority=5)
    await press(daemon, engine)

    assert (answer["covered"], answer["displaced_blocks"]) == (10, 10)
    assert await still_here(engine, system) == 10


async def test_a_wish_ends_by_itself(daemon, engine):
    prompt = fresh_chain(4)
    await engine.put(prompt)
    await keep(daemon, prompt, 0.01)

    await until(lambda: nothing_kept(daemon))


async def nothing_kept(daemon):
    return daemon.snapshot()["tiers"]["dram"]["wished"] == 0


async def test_who_does_not_know_the_secret_keeps_nothing(daemon, engine):
    status, answer = await keep(daemon, fresh_chain(4), 60, secret=b"another secret altogether")

    assert (status, "cluster secret" in answer["error"]) == (403, True)
    assert daemon.snapshot()["tiers"]["dram"]["wished"] == 0


async def test_a_wish_for_another_namespace_is_refused(daemon, engine):
    status, answer = await keep(daemon, fresh_chain(4), 60, namespace=b"x" * 16)

    assert (status, "namespace" in answer["error"]) == (400, True)


async def test_the_mark_of_free_slots_is_in_status(daemon, engine):
    await press(daemon, engine)

    dram = daemon.snapshot()["tiers"]["dram"]
    assert 1 <= dram["keep_free"] <= SLOTS // 4
    assert dram["taken_per_s"] > 0
