"""A disk that stops to answer: no engine waits for it without a bound, no byte of it is lost."""

import asyncio
import mmap
import threading
from contextlib import asynccontextmanager

import pytest
from eventually import until
from node_rig import NAMESPACE, SECRET, PlainEngine, fresh_chain, running_node, settings_of
from two_models import LARGE, POOL_BYTES, SMALL, stored

from prefixfleet.cluster import disk_tiers, slab_mover
from prefixfleet.cluster.disk import Disk
from prefixfleet.cluster.disk_tiers import DiskTiers
from prefixfleet.cluster.node_stats import NAME_DIGITS
from prefixfleet.cluster.pool_host import Kind
from prefixfleet.store import disk_threads
from prefixfleet.store.errors import ProtocolError
from prefixfleet.store.keep import Keep
from prefixfleet.store.memory_index import MemoryIndex
from prefixfleet.store.slot import SlotLayout, seal
from prefixfleet.store.ssd import DiskWrite

CAP_BYTES = 40 << 20
LAYOUT = SlotLayout(payload_bytes=4_000)
DIGEST = NAMESPACE.digest(SECRET)
KIND = Kind(namespace=NAMESPACE, digest=DIGEST, layout=LAYOUT)
CHAIN = fresh_chain(10)
NAME = DIGEST.hex()[:NAME_DIGITS]


@asynccontextmanager
async def hung(disks, by):
    """The writing thread waits for a write, or who deletes a file has the turn of the disk."""
    shared, may_answer = disks._shared, threading.Event()
    try:
        if by == "write":
            writing = asyncio.create_task(shared.threads.in_order(may_answer.wait, 120))
            await asyncio.sleep(0)
            yield
            may_answer.set()
            await writing
        else:
            async with shared.space.turn:
                yield
    finally:
        may_answer.set()


@pytest.fixture
def node(tmp_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("n")
    return settings_of(folder, pool_bytes=POOL_BYTES, ssd_path=tmp_path, ssd_bytes=CAP_BYTES)


@pytest.fixture
async def disks(tmp_path, tmp_path_factory):
    settings = settings_of(tmp_path_factory.mktemp("n"), ssd_path=tmp_path, ssd_bytes=CAP_BYTES)
    (tmp_path / "a").mkdir()
    disks = DiskTiers(Disk(tmp_path / "a", None), settings)
    yield disks
    await disks.close()


async def opened(disks, left=None):
    async def leaving(hashes):
        if left is not None:
            left.update(hashes)

    return await disks.open(KIND, leaving)


async def keep(tier):
    parents = [b"", *CHAIN]
    writes = [DiskWrite(b, p, sealed(b)) for b, p in zip(CHAIN, parents, strict=False)]
    assert await tier.store(writes) == CHAIN


def sealed(block):
    slot = memoryview(mmap.mmap(-1, LAYOUT.slot_bytes))
    seal(slot, LAYOUT, DIGEST, block)
    return slot


@pytest.mark.parametrize("by", ["write", "turn"])
async def test_engines_connect_whatever_the_disk_does(node, by):
    async with running_node(MemoryIndex(lease_s=60), node) as daemon, asyncio.timeout(60):
        async with PlainEngine.connected(node.socket_path, engine="first", **SMALL):
            pass
        async with hung(daemon._opener.disks, by):
            large = PlainEngine.connected(node.socket_path, engine="large", **LARGE)
            coming = asyncio.create_task(large.__aenter__())
            await until(lambda: daemon._opener._opening.locked())

            async with PlainEngine.connected(node.socket_path, engine="small", **SMALL) as small:
                assert await stored(small, CHAIN, 1) == len(CHAIN)
                assert not coming.done()
            coming.cancel()
            await asyncio.wait({coming})


async def test_an_engine_that_comes_while_its_namespace_ends_gets_a_new_pool(node, monkeypatch):
    monkeypatch.setattr(slab_mover, "LOOK_S", 0.05)
    monkeypatch.setattr(slab_mover, "MAX_KINDS", 1)
    socket = node.socket_path
    async with running_node(MemoryIndex(lease_s=60), node) as daemon, asyncio.timeout(60):
        opener = daemon._opener
        async with PlainEngine.connected(socket, engine="small", **SMALL):
            async with PlainEngine.connected(socket, engine="large", **LARGE) as large:
                digest = large.welcome["namespace_digest"]
                ended = opener.pools[digest]
            again = PlainEngine.connected(socket, engine="large", **LARGE)
            async with hung(opener.disks, "turn"):
                await until(lambda: opener._ending == digest)
                with pytest.raises(ProtocolError, match="keep: no engine of this namespace"):
                    daemon._keep(Keep(namespace=digest, chain=tuple(CHAIN), ttl_s=60.0))
                coming = asyncio.create_task(again.__aenter__())
                await until(lambda: len(opener._opening._waiters or ()) == 1)
            await coming

            assert opener.pools[digest] is not ended
            await again.__aexit__(None, None, None)


@pytest.mark.parametrize("by", ["write", "turn"])
async def test_a_tier_that_is_not_opened_in_time_is_done_without_and_shows(
    disks, monkeypatch, caplog, by
):
    await keep(await opened(disks))
    await disks.end(DIGEST, keep=True)
    held = disks.numbers()["held_bytes"]
    assert held > 0

    async with hung(disks, by):
        monkeypatch.setattr(disk_tiers, "OPEN_S", 0.1)
        async with asyncio.timeout(30):
            assert await opened(disks) is None
        (why,) = disks.faults.values()
        assert f"no disk tier for namespace {NAME}" in why
        assert "did not answer within 0.1 s" in why
        assert caplog.text.count(why) == 1
        assert disks.numbers()["held_bytes"] == held

    monkeypatch.setattr(disk_tiers, "OPEN_S", 30.0)
    assert (await opened(disks)).pool.match(CHAIN) == len(CHAIN)
    assert disks.faults == {}


async def test_a_folder_that_is_not_read_in_time_is_waited_for_by_one_thread(disks, monkeypatch):
    may_answer, begins, begin = threading.Event(), [], disks._begin

    def slow(slot_bytes):
        begins.append(slot_bytes)
        may_answer.wait(120)
        return begin(slot_bytes)

    monkeypatch.setattr(disks, "_begin", slow)
    monkeypatch.setattr(disk_tiers, "OPEN_S", 0.1)
    try:
        async with asyncio.timeout(30):
            assert [await opened(disks) for _ in range(3)] == [None] * 3
    finally:
        may_answer.set()
    assert len(begins) == 1

    monkeypatch.setattr(disk_tiers, "OPEN_S", 30.0)
    await keep(await opened(disks))


@pytest.mark.parametrize("by", ["write", "turn"])
@pytest.mark.parametrize("stays", [True, False])
async def test_a_namespace_ends_in_time_and_its_files_are_put_away_later(
    disks, tmp_path, monkeypatch, caplog, stays, by
):
    monkeypatch.setattr(disk_threads, "CLOSE_S", 0.05)
    monkeypatch.setattr(disk_tiers, "END_S", 0.1)
    left = set()
    tier = await opened(disks, left)
    await keep(tier)
    held = disks.numbers()["held_bytes"]

    async with hung(disks, by):
        async with asyncio.timeout(30):
            await disks.end(DIGEST, keep=stays)
        assert left == set(CHAIN)
        assert disks.numbers()["held_bytes"] == held
        assert f"files of namespace {NAME} are as they were" in caplog.text

    await until(lambda: not disks._endings)
    assert disks.numbers()["unopened"] == ({NAME: held} if stays else {})
    late = DiskWrite(bytes(16), b"", sealed(bytes(16)))
    assert await tier.store([late]) == []  # it was on its way
    assert not await disks._shared.space.obtain(bytes(16), 1, list)
    assert (tmp_path / "a" / DIGEST.hex()).exists() == stays
    assert (await opened(disks)).pool.match(CHAIN) == (len(CHAIN) if stays else 0)
