"""The disk tier of a node daemon with real parts: what leaves memory comes back, whole, or not."""

import asyncio
import shutil
import threading

import pytest
from eventually import until
from node_rig import PlainEngine, fresh_chain, payload_of, pool_of, running_node, settings_of

from prefixfleet.cluster import demotion, evictions
from prefixfleet.cluster.engine_channel import join_hashes
from prefixfleet.cluster.node_stats import render_metrics
from prefixfleet.store import watermark
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.records import PullPlan
from prefixfleet.store.redis_index import RedisIndex
from prefixfleet.store.slot_files import SlotFiles

SLOT_BYTES = 8192
POOL_SLOTS = 128


@pytest.fixture
async def index(redis_url, fleet):
    index = RedisIndex(redis_url, fleet, lease_s=60, timeout_s=20)
    yield index
    await index.close()


@pytest.fixture
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("n")


@pytest.fixture
def settings(folder, tmp_path):
    """A pool of 128 slots over a disk tier of 512."""

    def make(name="a", **changes):
        values = {
            "pool_bytes": POOL_SLOTS * SLOT_BYTES,
            "ssd_path": tmp_path / "ssd",
            "ssd_bytes": 4 * POOL_SLOTS * SLOT_BYTES,
        }
        return settings_of(folder, name, **values | changes)

    return make


@pytest.fixture(autouse=True)
def whole_pool_may_wait(monkeypatch):
    """However slow disk and index are, nothing leaves unwritten because too much waits for them."""
    monkeypatch.setattr(demotion, "WAITING_SHARE", 1)


def disk(daemon):
    return daemon.snapshot()["tiers"]["ssd"]


async def idle(daemon):
    """Until nothing is on its way to the disk or out of the pool, nor is about to be."""
    tiers = daemon.snapshot()["tiers"]
    roomy = pool_of(daemon).host.pool.free_slots >= tiers["dram"]["keep_free"]
    return roomy and tiers["ssd"]["waiting_blocks"] == 0 and tiers["dram"]["leaving"] == 0


async def fill(daemon, engine, chains):
    """Compute chains one after the other; each may push out the one before."""
    for chain in chains:
        await engine.put(chain)
        await until(lambda: idle(daemon))


async def matched(index, chain, expected):
    return await index.match(chain) == expected


def on_disk(daemon, chain):
    return pool_of(daemon).cache.tier.pool.match(chain)


async def check(engine, chain, request="r"):
    """How many blocks of ``chain`` come back, each proved to be what was computed."""
    answer = await engine.prepare(chain, request=request)
    for block, slot in zip(chain, answer["slots"], strict=False):
        assert engine.payload(slot, block) == payload_of(block)
    return answer["blocks"]


async def test_what_was_pushed_out_of_memory_comes_back_from_disk(index, settings):
    chains = [fresh_chain(60) for _ in range(5)]
    async with (
        running_node(index, settings()) as daemon,
        PlainEngine.connected(daemon.settings.socket_path) as engine,
    ):
        await fill(daemon, engine, chains)
        assert (
            daemon.snapshot()["tiers"]["dram"]["resident"] <= POOL_SLOTS < disk(daemon)["resident"]
        )

        for number, chain in enumerate(chains):
            assert await check(engine, chain, f"r{number}") == 60
            await engine.ask("release", request=f"r{number}")
            await until(lambda chain=chain: matched(index, chain, {"a": 60}))
            await until(lambda: idle(daemon))
        assert disk(daemon)["promoted_blocks"] > 0


@pytest.mark.parametrize(("admission", "kept"), [("reused", "first"), ("all", "last")])
async def test_what_a_full_disk_takes_of_what_nobody_asked_for_is_a_setting(
    index, settings, admission, kept
):
    chains = [fresh_chain(60) for _ in range(16)]
    chosen = settings(ssd_admission=admission, eviction="lru")
    async with (
        running_node(index, chosen) as daemon,
        PlainEngine.connected(daemon.settings.socket_path) as engine,
    ):
        await fill(daemon, engine, chains)

        first, late = on_disk(daemon, chains[0]), on_disk(daemon, chains[-5])
        assert (first == 60, late == 60) == (kept == "first", kept == "last")
        assert (disk(daemon)["not_worth_blocks"] > 0) == (admission == "reused")


@pytest.fixture
def slow_disk(monkeypatch):
    """Writes wait until this is set."""
    gate, write = threading.Event(), SlotFiles.write

    def wait(files, blocks):
        gate.wait(120)
        write(files, blocks)

    monkeypatch.setattr(SlotFiles, "write", wait)
    yield gate
    gate.set()


async def test_a_prompt_gets_the_room_of_what_is_leaving_already(
    index, settings, slow_disk, monkeypatch
):
    monkeypatch.setattr(evictions, "WAIT_S", 50.0)  # shorter than the engine waits
    prompt, asked = fresh_chain(60), asyncio.Event()
    async with (
        running_node(index, settings()) as daemon,
        PlainEngine.connected(daemon.settings.socket_path) as engine,
    ):
        await engine.put(fresh_chain(POOL_SLOTS - 8))
        cache = pool_of(daemon).cache
        cache.evictions._evict(POOL_SLOTS - 8)
        assert cache.pool.free_slots == 8
        admit = cache.evictions.admit

        async def admit_and_tell(missing, **how):
            asked.set()
            return await admit(missing, **how)

        monkeypatch.setattr(cache.evictions, "admit", admit_and_tell)
        storing = asyncio.create_task(engine.put(prompt))
        await asked.wait()
        slow_disk.set()

        assert -1 not in await storing
        assert await check(engine, prompt) == 60


async def test_nothing_leaves_for_blocks_that_cannot_follow_what_is_not_here(
    index, settings, monkeypatch
):
    monkeypatch.setattr(watermark, "MOST_SHARE", watermark.LEAST_SHARE)  # nor for the load
    async with (
        running_node(index, settings(eviction="lru")) as daemon,
        PlainEngine.connected(daemon.settings.socket_path) as engine,
    ):
        await fill(daemon, engine, [fresh_chain(POOL_SLOTS)])
        evicted = daemon.snapshot()["cache"]["evicted_blocks"]
        more = join_hashes(fresh_chain(60))

        answer = await engine.ask("reserve", parent=bytes(16), hashes=more, rank=0)
        assert set(answer["slots"]) == {-1}
        assert not list(pool_of(daemon).host.pool.leaving())
        assert daemon.snapshot()["cache"]["evicted_blocks"] == evicted


async def test_a_disk_that_does_not_answer_is_not_waited_for_by_each_prompt(
    index, settings, slow_disk, monkeypatch
):
    monkeypatch.setattr(evictions, "WAIT_S", 600.0)
    async with (
        running_node(index, settings()) as daemon,
        PlainEngine.connected(daemon.settings.socket_path) as engine,
    ):
        await engine.put(fresh_chain(POOL_SLOTS - 8))
        pool_of(daemon).cache.evictions._evict(POOL_SLOTS - 8)
        monkeypatch.setattr(demotion, "STALLED_S", 0.0)
        await until(lambda: pool_of(daemon).cache.disk_numbers()["degraded"])

        slots = await engine.put(fresh_chain(60))
        assert slots.count(-1) == 52
        slow_disk.set()


async def test_what_is_on_its_way_to_disk_when_the_node_joins_anew_is_published(
    index, settings, slow_disk
):
    """A lease lapses on a busy machine; the new life starts from what the node has then."""
    chain = fresh_chain(60)
    async with (
        running_node(index, settings()) as daemon,
        PlainEngine.connected(daemon.settings.socket_path) as engine,
    ):
        await engine.put(chain)
        await until(lambda: daemon.snapshot()["index"]["pending_blocks"] == 0)
        pool = pool_of(daemon).host.pool
        pool_of(daemon).cache.evictions._evict(20)
        assert set(pool.leaving()) == set(chain[40:])

        await index.leave(daemon._announcer.member)
        await until(lambda: daemon.snapshot()["index"]["joins"] == 2)
        assert set(pool.leaving()) == set(chain[40:])
        slow_disk.set()
        await until(lambda: idle(daemon))

        assert on_disk(daemon, chain) == 60
        await until(lambda: matched(index, chain, {"a": 60}))


async def test_what_is_computed_again_while_it_leaves_the_disk_stays_published(index, settings):
    chain = fresh_chain(60)
    async with (
        running_node(index, settings()) as daemon,
        PlainEngine.connected(daemon.settings.socket_path) as engine,
    ):
        await engine.put(fresh_chain(1))
        async with daemon._announcer._lock:  # the index is slow
            leaves = asyncio.create_task(pool_of(daemon).cache.left_disk(chain))
            await asyncio.sleep(0)
            await engine.put(chain)
        await leaves

        await until(lambda: matched(index, chain, {"a": 60}))


async def test_the_middle_of_a_chain_comes_back_to_its_place(index, settings):
    """Some engines ask for a chain piece by piece; at the root a block would be another's."""
    chains = [fresh_chain(60) for _ in range(5)]
    async with (
        running_node(index, settings()) as daemon,
        PlainEngine.connected(daemon.settings.socket_path) as engine,
    ):
        await fill(daemon, engine, chains)
        first, pool = chains[0], pool_of(daemon).host.pool
        assert pool.match(first[40:]) < 20

        assert await check(engine, first[40:]) == 20
        assert pool.match(first) == 60
        assert len(pool.chain_to(first[-1])) == 60


async def test_a_node_whose_hits_come_from_disk_tells_the_routers_that_they_take_longer(
    index, settings
):
    chains = [fresh_chain(60) for _ in range(5)]
    big = settings("b", pool_bytes=8 * POOL_SLOTS * SLOT_BYTES, ssd_path=None)
    async with (
        running_node(index, settings()) as small,
        running_node(index, big) as roomy,
        PlainEngine.connected(small.settings.socket_path) as from_disk,
        PlainEngine.connected(roomy.settings.socket_path) as from_memory,
    ):
        for engine in (from_disk, from_memory):
            for chain in chains:
                await engine.put(chain)
                await until(lambda: idle(small))
        for number, chain in enumerate(chains):
            for engine in (from_disk, from_memory):
                assert await check(engine, chain, f"r{number}") == 60
                await engine.ask("release", request=f"r{number}", copied=60, copy_s=0.6)
            await until(lambda: idle(small))

        async def published():
            found = {m.node: r.stats["hits"] for m, r in await index.members()}
            return all(hits["copy_s"] > 0 for hits in found.values()) and found

        hits = await until(published)
        assert hits["a"]["read_s"] > hits["b"]["read_s"]
        assert hits["a"]["block_s"] == hits["a"]["read_s"] + hits["a"]["copy_s"]
        assert hits["a"]["copy_s"] <= 0.01  # less and less, from the last load on


async def test_a_restart_brings_the_disk_back_under_the_new_epoch(index, settings):
    chains = [fresh_chain(60) for _ in range(3)]
    async with (
        running_node(index, settings()) as daemon,
        PlainEngine.connected(daemon.settings.socket_path) as engine,
    ):
        await fill(daemon, engine, chains)
        kept, epoch = on_disk(daemon, chains[0]), daemon.epoch
    assert kept == 60
    await until(lambda: matched(index, chains[0], {}))

    async with (
        running_node(index, settings()) as daemon,
        PlainEngine.connected(daemon.settings.socket_path) as engine,
    ):
        await until(lambda: matched(index, chains[0], {"a": kept}))
        assert daemon.epoch > epoch
        assert await check(engine, chains[0]) == kept


async def test_a_spoiled_file_is_a_miss_and_leaves_the_index(index, settings, tmp_path):
    chains = [fresh_chain(60) for _ in range(4)]
    async with (
        running_node(index, settings()) as daemon,
        PlainEngine.connected(daemon.settings.socket_path) as engine,
    ):
        await fill(daemon, engine, chains)
        first = chains[0]
        assert on_disk(daemon, first) == 60
        in_memory = pool_of(daemon).host.pool.match(first)
        spoiled = payload_of(first[in_memory + 2])[:100]
        files = (tmp_path / "ssd" / "a").glob("*/bucket-*")
        (path,) = [path for path in files if spoiled in path.read_bytes()]
        data = path.read_bytes()
        start = data.index(spoiled)
        with path.open("r+b") as file:
            file.seek(start + 50)
            file.write(bytes([data[start + 50] ^ 1]))

        assert await check(engine, first) == in_memory + 2
        await until(lambda: matched(index, first, {"a": in_memory + 2}))
        assert disk(daemon)["corrupt"] == 1


async def test_a_peer_pulls_what_lies_on_disk(index, settings):
    chains = [fresh_chain(60) for _ in range(4)]
    async with (
        running_node(index, settings()) as source,
        running_node(index, settings("b")) as target,
        PlainEngine.connected(source.settings.socket_path) as there,
        PlainEngine.connected(target.settings.socket_path) as engine,
    ):
        await fill(source, there, chains)
        assert pool_of(source).host.pool.match(chains[0]) < 60
        plan = PullPlan(
            request="r", source="a", source_epoch=source.epoch, blocks=60, budget_s=20.0
        )

        answer = await engine.prepare(chains[0], plan)

        assert (answer["blocks"], answer["pulled"]) == (60, 60)
        assert source.snapshot()["hits"]["read_s"] > 0
        for block, slot in zip(chains[0], answer["slots"], strict=True):
            assert engine.payload(slot, block) == payload_of(block)


async def test_a_restarted_node_goes_on_with_the_same_wear_budget(index, settings):
    tight = settings(ssd_write_bytes_per_day=24 * 10 * SLOT_BYTES)
    written = 0
    for _ in range(2):
        async with (
            running_node(index, tight) as daemon,
            PlainEngine.connected(daemon.settings.socket_path) as engine,
        ):
            await fill(daemon, engine, [fresh_chain(60) for _ in range(4)])
            written += disk(daemon)["written_blocks"]

    assert 0 < written <= 15, "ten, and what came in a few minutes"


async def test_a_disk_that_takes_no_more_leaves_the_node_serving_and_shows(index, settings):
    """A wear budget of nothing much: blocks leave memory unwritten, and are counted."""
    chains = [fresh_chain(60) for _ in range(4)]
    tight = settings(ssd_write_bytes_per_day=24 * 10 * SLOT_BYTES)
    async with (
        running_node(index, tight) as daemon,
        PlainEngine.connected(daemon.settings.socket_path) as engine,
    ):
        await fill(daemon, engine, chains)

        assert disk(daemon)["written_blocks"] <= 10
        assert disk(daemon)["refused_wear"] + disk(daemon)["not_worth_blocks"] > 0
        assert disk(daemon)["wear_left"] < 1
        assert b"prefixfleet_node_ssd_wear_left " in render_metrics(daemon.snapshot())
        assert await check(engine, chains[-1]) == 60
        await until(
            lambda: matched(
                index,
                chains[0],
                {} if not on_disk(daemon, chains[0]) else {"a": on_disk(daemon, chains[0])},
            )
        )


async def test_a_failing_disk_degrades_and_the_node_serves_on(index, settings, tmp_path):
    chains = [fresh_chain(60) for _ in range(4)]
    async with (
        running_node(index, settings()) as daemon,
        PlainEngine.connected(daemon.settings.socket_path) as engine,
    ):
        files = tmp_path / "ssd" / "a"
        shutil.rmtree(files)  # no bucket can be made any more
        await fill(daemon, engine, chains)

        assert disk(daemon)["write_error"] >= 1
        assert any("disk" in why for why in daemon.status()["stats"]["degraded"])
        assert await check(engine, chains[-1]) == 60


async def test_two_daemons_never_share_a_folder(index, settings, tmp_path_factory):
    other = settings().model_copy(update={"runtime_dir": tmp_path_factory.mktemp("m")})
    async with running_node(index, settings()):
        with pytest.raises(ConfigError, match="SSD_PATH"):
            async with running_node(index, other):
                pass


async def test_a_path_that_cannot_be_a_folder_stops_the_start(index, settings, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="PREFIXFLEET_NODE_SSD_PATH"):
        async with running_node(index, settings(ssd_path=tmp_path / "file")):
            pass


async def test_with_a_key_nothing_on_disk_can_be_read_and_everything_comes_back(
    index, settings, tmp_path
):
    (tmp_path / "key").write_text("7f" * 32)
    encrypted = settings(ssd_key_file=tmp_path / "key")
    chains = [fresh_chain(60) for _ in range(3)]
    async with (
        running_node(index, encrypted) as daemon,
        PlainEngine.connected(daemon.settings.socket_path) as engine,
    ):
        await fill(daemon, engine, chains)
        assert on_disk(daemon, chains[0]) == 60
    files = b"".join(path.read_bytes() for path in (tmp_path / "ssd" / "a").glob("*/bucket-*"))
    assert files
    assert not any(payload_of(block)[:32] in files for block in chains[0])

    async with (
        running_node(index, encrypted) as daemon,
        PlainEngine.connected(daemon.settings.socket_path) as engine,
    ):
        assert await check(engine, chains[0]) == 60


async def test_a_node_never_writes_plain_because_its_key_is_not_there(index, settings, tmp_path):
    with pytest.raises(ConfigError, match="disk key"):
        async with running_node(index, settings(ssd_key_file=tmp_path / "none")):
            pass


async def test_a_key_without_a_disk_is_a_mistake(index, settings, tmp_path):
    (tmp_path / "key").write_text("7f" * 32)

    with pytest.raises(ConfigError, match="SSD_PATH"):
        async with running_node(index, settings(ssd_path=None, ssd_key_file=tmp_path / "key")):
            pass
