"""Two models of different block sizes in one node's memory: real daemons, sockets and links."""

import asyncio
import itertools
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, replace

import pytest
from eventually import until
from node_rig import (
    NAMESPACE,
    SECRET,
    PlainEngine,
    fresh_chain,
    payload_of,
    running_node,
    settings_of,
)
from two_models import LARGE, POOL_BYTES, SMALL, both_at, found, kind, stored

from prefixfleet.cluster import slab_mover
from prefixfleet.cluster.handover import HandedOver, ask_handover
from prefixfleet.cluster.node_stats import render_metrics
from prefixfleet.cluster.sharing import MAX_KINDS
from prefixfleet.store import slab_shares, watermark
from prefixfleet.store.errors import PeerLost, PeerRefused
from prefixfleet.store.memory_index import MemoryIndex
from prefixfleet.store.prefetch import prefetch_key
from prefixfleet.store.records import PullPlan
from prefixfleet.store.slabs import MOST_WASTE
from prefixfleet.transfer import wire
from prefixfleet.transfer.link import Range
from prefixfleet.transfer.messages import Lease, decode_answer, join_hashes
from prefixfleet.transfer.tcp import TcpLink
from prefixfleet.transfer.ucx_binding import available


@pytest.fixture
def index():
    return MemoryIndex(lease_s=60)


@pytest.fixture
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("n")


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Memory moves at once when it may."""
    monkeypatch.setattr(slab_shares, "LEAST_AGE_S", 0.0)
    monkeypatch.setattr(slab_mover, "LOOK_S", 0.05)
    monkeypatch.setattr(slab_mover, "RETRY_S", 0.05)


@pytest.fixture
async def node(index, folder):
    async with running_node(index, settings_of(folder, pool_bytes=POOL_BYTES)) as daemon:
        yield daemon
        for pool in daemon._opener.pools.values():
            pool.host.pool.check()


async def within_bounds(daemon, *engines):
    """As soon as no slab is under way from one to the other."""
    await until(lambda: _all_of_it_used(daemon, *engines))


def _all_of_it_used(daemon, *engines):
    kinds = [kind(daemon, engine) for engine in engines]
    for k in kinds:
        assert k["waste_bytes"] == k["bytes"] - k["slots"] * k["slot_bytes"] >= 0
    return (
        sum(k["slabs"] for k in kinds) == 32
        and sum(k["bytes"] for k in kinds) == POOL_BYTES
        and all(k["waste_bytes"] <= MOST_WASTE * k["bytes"] for k in kinds)
    )


async def test_one_model_alone_has_every_slot_that_fits(node):
    async with PlainEngine.connected(node.settings.socket_path, **LARGE) as engine:
        assert kind(node, engine)["slots"] == POOL_BYTES // 12_288
        assert kind(node, engine)["waste_bytes"] == POOL_BYTES % 12_288


async def test_two_models_store_and_find_their_blocks_in_one_segment(node, index):
    async with both_at(node) as (small, large):
        mine, theirs = fresh_chain(40), fresh_chain(40)

        assert await stored(small, mine, 1) == 40
        assert await stored(large, theirs, 2) == 40

        assert small.welcome["pool_path"] == large.welcome["pool_path"]
        assert await found(small, mine, 1) == 40
        assert (await small.prepare(theirs))["blocks"] == 0
        assert (await large.prepare(mine, request="other"))["blocks"] == 0
        await within_bounds(node, small, large)

        async def published():
            return (await index.match(mine), await index.match(theirs)) == ({"a": 40}, {"a": 40})

        await until(published)


async def test_memory_goes_to_who_stores_and_comes_back(node):
    async with both_at(node) as (small, large):
        old = [fresh_chain(100) for _ in range(12)]
        for chain in old:
            assert await stored(small, chain, 1) == 100
        before = kind(node, large)["slots"]

        async def store_more(engine):
            await stored(engine, fresh_chain(50), 2)
            return kind(node, engine)["slabs"] > 20

        await until(lambda: store_more(large))
        await within_bounds(node, small, large)
        assert kind(node, large)["slots"] > before
        assert kind(node, small)["slabs"] >= 4
        for chain in old:  # what is left is right
            await found(small, chain, 1)

        await until(lambda: store_more(small))
        await within_bounds(node, small, large)
        assert kind(node, large)["slabs"] >= 4


async def test_what_left_with_a_slab_left_the_index_first(node, index):
    async with PlainEngine.connected(node.settings.socket_path, **SMALL) as small:
        chains = [fresh_chain(10) for _ in range(150)]
        for chain in chains:
            assert await stored(small, chain) == 10
        async with both_at(node) as (_, large):
            await stored(large, fresh_chain(100), 2)

        async def in_step():
            for chain in chains:
                here = await found(small, chain)
                if await index.match(chain) != ({"a": here} if here else {}):
                    return False
            return True

        await until(in_step)
        assert node.snapshot()["cache"]["evicted_blocks"] > 0


async def test_with_a_slab_go_few_blocks_besides_its_own(node, monkeypatch):
    """Chains that grew side by side: the slab with their first blocks would take all along."""
    monkeypatch.setattr(watermark, "MOST_SHARE", watermark.LEAST_SHARE)  # nothing else evicts
    socket = node.settings.socket_path
    async with PlainEngine.connected(socket, engine="small", **SMALL) as small:
        chains = [fresh_chain(30) for _ in range(48)]
        for length in range(1, 31):
            for chain in chains:
                await small.put(chain[:length])
        assert node.snapshot()["cache"]["evicted_blocks"] == 0
        slots = 4 * (POOL_BYTES // 32 // 8_192)
        async with both_at(node):
            assert node.snapshot()["cache"]["evicted_blocks"] <= slots
            here = [await found(small, chain) for chain in chains]
            assert sum(here) >= 48 * 30 - slots


async def test_a_model_without_an_engine_keeps_its_blocks_until_others_need_the_memory(node):
    socket, chain = node.settings.socket_path, fresh_chain(30)
    async with PlainEngine.connected(socket, **SMALL) as small:
        await stored(small, chain)
    async with PlainEngine.connected(socket, **LARGE) as large:
        await until(lambda: kind(node, large)["slabs"] == 8)
        async with PlainEngine.connected(socket, **SMALL) as again:
            assert await found(again, chain) == 30

        async def all_of_it():
            await stored(large, fresh_chain(50), 2)
            return kind(node, large)["slabs"] == 32

        await until(all_of_it)
        async with PlainEngine.connected(socket, **SMALL) as again:
            assert await found(again, chain) == 0
            await until(lambda: kind(node, again)["slabs"] == 4)
            assert await stored(again, chain) == 30


async def test_a_slab_in_use_is_not_given_away(node, monkeypatch):
    """Blocks that an engine reads, in every slab."""
    monkeypatch.setattr(slab_mover, "EMPTY_S", 0.2)
    monkeypatch.setattr(watermark, "MOST_SHARE", watermark.LEAST_SHARE)  # all of it stays
    socket = node.settings.socket_path
    async with PlainEngine.connected(socket, engine="small", **SMALL) as small:
        chain = fresh_chain(1_490)
        await small.put(chain)
        pinned = await small.prepare(chain)
        async with PlainEngine.connected(socket, engine="large", **LARGE) as large:
            mover = node._opener.mover
            await until(lambda: mover.stuck >= 2)

            assert kind(node, large)["slots"] == 0
            assert (await large.ask("reserve", parent=b"", hashes=b"x" * 16, rank=0))["slots"] == [
                -1
            ]
            for block, slot in zip(chain, pinned["slots"], strict=True):
                assert small.payload(slot, block) == payload_of(block)

            await small.ask("release", request="r")
            await until(lambda: kind(node, large)["slabs"] == 4)
            assert await stored(large, fresh_chain(20), 2) == 20


async def test_what_a_peer_reads_under_a_lease_stays_while_the_slab_is_wanted(node, monkeypatch):
    """And when the lease has ended, its range is granted to nobody, whoever the bytes are of."""
    monkeypatch.setattr(watermark, "MOST_SHARE", watermark.LEAST_SHARE)  # all of it is leased
    socket, chain = node.settings.socket_path, fresh_chain(1_490)
    async with (
        PlainEngine.connected(socket, engine="small", **SMALL) as small,
        peer_of(node) as peer,
    ):
        await small.put(chain)
        lease = Lease(
            namespace=small.welcome["namespace_digest"],
            epoch=node.epoch,
            payload_bytes=8_000,
            shards=1,
            hashes=join_hashes(chain),
            budget_s=60.0,
        )
        leased = decode_answer(await peer.ask(wire.pack(lease), deadline=in_s(20)), "a")
        assert len(leased.slots) == len(chain)
        async with PlainEngine.connected(socket, engine="large", **LARGE) as large:
            seen: list[int] = []

            async def read_on():
                for block, slot in itertools.cycle(zip(chain, leased.slots, strict=True)):
                    seen.append(kind(node, large)["slots"])
                    memory = await read(peer, slot, 8_192)
                    assert small.layout.payload(memory) == payload_of(block)

            reading = asyncio.create_task(read_on())
            await until(lambda: len(seen) > 10 and node._opener.mover.stuck)
            leases = node._opener.pools[small.welcome["namespace_digest"]].host.server.leases
            leases._clock = lambda: time.monotonic() + 100.0  # the lease has ended meanwhile
            with pytest.raises((PeerRefused, PeerLost)):
                await reading
            assert set(seen[:-1]) == {0}

            await until(lambda: kind(node, large)["slabs"] == 4)
            await stored(large, fresh_chain(60), 2)
            async with peer_of(node) as another:
                with pytest.raises((PeerRefused, PeerLost)):
                    await read(another, leased.slots[0], 8_192)


@asynccontextmanager
async def peer_of(node):
    link = TcpLink(node="peer", secret=SECRET)
    peer = await link.connect(node.record().contacts["tcp"], deadline=in_s(20))
    try:
        yield peer
    finally:
        await peer.close()
        await link.close()


def in_s(seconds):
    return asyncio.get_running_loop().time() + seconds


async def read(peer, slot, size):
    target = memoryview(bytearray(size))
    await peer.read([Range(slot * size, size)], [target], deadline=in_s(20))
    return target


@pytest.mark.parametrize("link", ["tcp", "shm", "ucx"])
async def test_a_peer_pulls_blocks_of_both_while_memory_moves(index, folder, link):
    if link == "ucx" and not available():
        pytest.skip("no UCX here")
    async with AsyncExitStack() as stack:
        a, b = [
            await stack.enter_async_context(
                running_node(index, settings_of(folder, name, pool_bytes=POOL_BYTES, link=link))
            )
            for name in "ab"
        ]
        small, large = await stack.enter_async_context(both_at(a))
        small_b, large_b = await stack.enter_async_context(both_at(b))
        mine, theirs = fresh_chain(60), fresh_chain(60)
        await stored(small, mine, 1)
        await stored(large, theirs, 2)
        await until(lambda: tells_contacts(index))

        plan = PullPlan(request="r", source="a", source_epoch=a.epoch, blocks=60, budget_s=20.0)
        assert await found(small_b, mine, 1, plan) == 60
        assert await found(large_b, theirs, 2, plan) == 60
        assert b.stats.pulls == 2

        wanted = [fresh_chain(60) for _ in range(30)]  # of the small one, with memory on the move

        async def churn():
            while True:
                await stored(large, fresh_chain(60), 3)

        churning = asyncio.create_task(churn())
        for chain in wanted:
            await stored(small, chain, 1)
            await found(small_b, chain, 1, plan)
        churning.cancel()
        await asyncio.gather(churning, return_exceptions=True)
        assert a._opener.mover.moved > 4
        assert "protocol" not in b.stats.failures
        assert "corrupt" not in b.stats.failures
        await within_bounds(a, small, large)
        await within_bounds(b, small_b, large_b)


async def tells_contacts(index):
    return all(record.contacts for _, record in await index.members())


async def test_blocks_too_large_to_share_the_memory_are_refused_with_what_to_set(node):
    socket = node.settings.socket_path
    async with (
        PlainEngine.connected(socket, **SMALL),
        PlainEngine.connected(socket, **LARGE | {"payload_bytes": 12_300}) as other,
    ):
        why = other.welcome["error"]
        assert "weights 'of the large one' beside 'w'" in why
        assert "blocks of at most 12288 bytes" in why
        assert f"PREFIXFLEET_NODE_POOL_BYTES to at least {16 << 20}" in why


async def test_a_node_takes_a_bounded_number_of_namespaces(node):
    socket = node.settings.socket_path
    async with AsyncExitStack() as stack:
        for number in range(MAX_KINDS + 1):
            changed = asdict(replace(NAMESPACE, weights=str(number)))
            engine = await stack.enter_async_context(
                PlainEngine.connected(socket, engine=str(number), namespace=changed)
            )
        assert f"engines of {MAX_KINDS} models" in engine.welcome["error"]
        kinds = node.snapshot()["kinds"]
        await until(lambda: all(k["slabs"] for k in node.snapshot()["kinds"].values()))
        assert len(kinds) == MAX_KINDS
        assert render_metrics(node.snapshot()).count(b"prefixfleet_node_kind_slots{") == MAX_KINDS


async def test_a_node_that_goes_hands_over_the_last_copies_of_both(index, folder):
    """As prefetches, each of which names its namespace; peers without it are passed over."""
    async with AsyncExitStack() as stack:
        a, b, other = [
            await stack.enter_async_context(
                running_node(index, settings_of(folder, name, pool_bytes=POOL_BYTES))
            )
            for name in ("a", "b", "other")
        ]
        small, large = await stack.enter_async_context(both_at(a))
        _, large_b = await stack.enter_async_context(both_at(b))
        await stack.enter_async_context(PlainEngine.connected(other.settings.socket_path, **SMALL))
        mine, theirs = fresh_chain(5), fresh_chain(6)
        await stored(small, mine, 1)
        await stored(large, theirs, 2)

        async def known():
            told = {member.node: record.stats["kinds"] for member, record in await index.members()}
            held = (await index.match(mine), await index.match(theirs)) == ({"a": 5}, {"a": 6})
            return (
                held and all(kind["slots"] for kind in told["b"].values()) and len(told["b"]) == 2
            )

        await until(known)

        assert await ask_handover(a.url, prefetch_key(SECRET), 20.0) == HandedOver(11, 11)

        assert await found(large_b, theirs, 2) == 6
        assert set(await index.match(mine)) > {"a"}
