"""Two models on one node with a disk: real daemons, sockets and files."""

import errno
import os
from contextlib import asynccontextmanager
from dataclasses import asdict

import pytest
from eventually import until
from node_rig import NAMESPACE, SECRET, PlainEngine, fresh_chain, running_node, settings_of
from two_models import LARGE, POOL_BYTES, SMALL, both_at, found, kind, stored

from prefixfleet.cluster import slab_mover
from prefixfleet.cluster.node_stats import NAME_DIGITS, render_metrics
from prefixfleet.store import disk_space, slab_shares
from prefixfleet.store.memory_index import MemoryIndex
from prefixfleet.store.namespace import in_era
from prefixfleet.store.records import PullPlan

CAP_BYTES = 40 << 20
ERA = SMALL | {"namespace": asdict(in_era(NAMESPACE, "era"))}


@pytest.fixture
def index():
    return MemoryIndex(lease_s=60)


@pytest.fixture
def settings(tmp_path_factory, tmp_path):
    """The same node each time; a disk of some times its memory."""
    folder = tmp_path_factory.mktemp("n")

    def make(**changes):
        values = {"pool_bytes": POOL_BYTES, "ssd_path": tmp_path, "ssd_bytes": CAP_BYTES}
        return settings_of(folder, **values | changes)

    return make


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(slab_shares, "LEAST_AGE_S", 0.0)
    monkeypatch.setattr(slab_mover, "LOOK_S", 0.05)


@asynccontextmanager
async def engine_at(daemon, model, name="e"):
    async with PlainEngine.connected(daemon.settings.socket_path, engine=name, **model) as engine:
        await until(lambda: kind(daemon, engine)["slabs"])
        yield engine


async def demoted(daemon, engine, fill, blocks=300):
    """Chains of a model, some of which went to disk; what is there of them."""
    chains = []
    while kind(daemon, engine)["disk_blocks"] < blocks:
        chains.append(fresh_chain(50))
        await stored(engine, chains[-1], fill)
    await until(lambda: at_rest(daemon))
    return chains


async def at_rest(daemon):
    tiers = daemon.snapshot()["tiers"]
    return not tiers["ssd"]["waiting_blocks"] and not tiers["dram"]["leaving"]


def on_disk(daemon, engine, chains):
    tier = daemon._opener.pools[engine.welcome["namespace_digest"]].cache.tier
    return [tier.pool.match(chain) for chain in chains]


async def names(index, chains, expected):
    return [(await index.match(chain)).get("a", 0) for chain in chains] == expected


async def all_back(engine, chains, fill, expected):
    """Each block proved; a load that was given too little time or memory is asked for again."""
    for chain, blocks in zip(chains, expected, strict=True):
        await until(lambda chain=chain, blocks=blocks: is_back(engine, chain, fill, blocks))


async def is_back(engine, chain, fill, blocks):
    return await found(engine, chain, fill) == blocks


def held_by_files(tmp_path):
    return sum(size_of(path) for path in tmp_path.glob("a/*/bucket-*"))


def size_of(path):
    try:
        return path.stat().st_size
    except FileNotFoundError:  # it went just now
        return 0


@pytest.mark.parametrize("encrypted", [False, True])
async def test_both_have_their_blocks_back_whoever_comes_first(
    index, settings, tmp_path, encrypted
):
    if encrypted:
        (tmp_path / "key").write_text("7f" * 32)
    node = settings(**{"ssd_key_file": tmp_path / "key"} if encrypted else {})
    async with running_node(index, node) as daemon, both_at(daemon) as (small, large):
        mine = await demoted(daemon, small, 1)
        theirs = await demoted(daemon, large, 2)
        kept_mine, kept_theirs = on_disk(daemon, small, mine), on_disk(daemon, large, theirs)
        epoch, name = daemon.epoch, small.welcome["namespace_digest"].hex()[:NAME_DIGITS]

    async with running_node(index, node) as daemon, engine_at(daemon, LARGE) as large:
        await until(lambda: names(index, theirs, kept_theirs))
        assert await names(index, mine, [0] * len(mine))
        assert daemon.snapshot()["disk"]["unopened"].keys() == {name}
        assert daemon.snapshot()["disk"]["unopened"][name] > 0
        await all_back(large, theirs, 2, kept_theirs)

        async with engine_at(daemon, SMALL) as small:
            assert daemon.epoch > epoch
            assert daemon.snapshot()["disk"]["unopened"] == {}
            await until(lambda: names(index, mine, kept_mine))
            await all_back(small, mine, 1, kept_mine)


async def test_one_cap_holds_for_the_sum_and_what_comes_back_is_right(
    index, settings, tmp_path, monkeypatch
):
    monkeypatch.setattr(disk_space, "LEAST_AGE_S", 0.0)
    cap = 8 << 20
    async with running_node(index, settings(ssd_bytes=cap)) as daemon, both_at(daemon) as engines:
        chains, written = {engine: [] for engine in engines}, set()
        for turn in range(60):
            for fill, engine in enumerate(engines):
                chains[engine].append(fresh_chain(40))
                await stored(engine, chains[engine][-1], fill)
                assert held_by_files(tmp_path) <= cap
                snapshot = daemon.snapshot()
                assert snapshot["disk"]["held_bytes"] <= cap
                written |= {name for name, kind in snapshot["kinds"].items() if kind["disk_blocks"]}
            if turn % 10 == 9:
                for fill, engine in enumerate(engines):
                    for chain in chains[engine]:
                        await found(engine, chain, fill)
        for pool in daemon._opener.pools.values():
            pool.cache.tier.pool.check()
        snapshot = daemon.snapshot()
        assert written
        assert snapshot["disk"]["cap_bytes"] == cap
        metrics = render_metrics(snapshot)
        assert metrics.count(b"prefixfleet_node_kind_disk_bytes{") == 2
        assert b"prefixfleet_node_ssd_held_bytes " in metrics


async def test_a_model_whose_blocks_nobody_asked_for_again_has_room_on_a_disk_of_older_ones(
    index, settings, tmp_path, monkeypatch
):
    cap = 8 << 20
    async with running_node(index, settings(ssd_bytes=cap)) as daemon, both_at(daemon) as engines:
        small, large = engines
        space = daemon._opener.disks._shared.space
        while space.has_room(cap // 32):
            await stored(small, fresh_chain(50), 1)
        monkeypatch.setattr(disk_space, "LEAST_AGE_S", 0.0)
        monkeypatch.setattr(disk_space, "OLDER", 1.0)  # nothing of it is used from now on
        held = kind(daemon, small)["disk_bytes"]

        async def has_half():
            await large.put(fresh_chain(50), 2)
            assert held_by_files(tmp_path) <= cap
            return kind(daemon, large)["disk_bytes"] > held / 2

        await until(has_half)
        assert kind(daemon, small)["disk_bytes"] < held
        assert daemon.snapshot()["disk"]["given_files"] > 0


async def test_what_an_absent_model_left_goes_when_it_is_oldest(
    index, settings, tmp_path, monkeypatch
):
    cap = settings(ssd_bytes=8 << 20)
    async with running_node(index, cap) as daemon, engine_at(daemon, SMALL) as small:
        mine = await demoted(daemon, small, 1)

    async with running_node(index, cap) as daemon, engine_at(daemon, LARGE) as large:
        (left,) = daemon.snapshot()["disk"]["unopened"].values()
        assert left > 300 * 8_192
        monkeypatch.setattr(disk_space, "LEAST_AGE_S", 0.0)
        monkeypatch.setattr(disk_space, "OLDER", 0.0)

        async def took_some():
            await stored(large, fresh_chain(50), 2)
            return sum(daemon.snapshot()["disk"]["unopened"].values()) < left / 2

        await until(took_some)
        assert held_by_files(tmp_path) <= 8 << 20
        async with engine_at(daemon, SMALL) as small:
            back = [await found(small, chain, 1) for chain in mine]
            assert sum(back) < 300


async def test_files_of_an_earlier_release_are_deleted_and_it_is_said(
    index, settings, tmp_path, caplog
):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "bucket-000000.slots").write_bytes(b"x" * 9_000)
    async with running_node(index, settings()) as daemon, engine_at(daemon, SMALL) as small:
        assert await stored(small, fresh_chain(10), 1) == 10
    assert "1 files of an earlier release are deleted" in caplog.text
    assert not (tmp_path / "a" / "bucket-000000.slots").exists()


async def test_a_smaller_cap_keeps_what_fits(index, settings, tmp_path, caplog):
    async with running_node(index, settings()) as daemon, both_at(daemon) as (small, large):
        await demoted(daemon, small, 1)
        await demoted(daemon, large, 2)
    assert held_by_files(tmp_path) > 4 << 20

    smaller = settings(ssd_bytes=4 << 20)
    async with running_node(index, smaller) as daemon, engine_at(daemon, LARGE):
        assert held_by_files(tmp_path) <= 4 << 20
    assert "PREFIXFLEET_NODE_SSD_BYTES" in caplog.text


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("cap", [9 << 20, 10 * CAP_BYTES])
async def test_another_cap_keeps_what_lies_there(index, settings, tmp_path, cap, encrypted):
    (tmp_path / "key").write_text("7f" * 32)
    key = {"ssd_key_file": tmp_path / "key"} if encrypted else {}
    async with running_node(index, settings(**key)) as daemon, engine_at(daemon, SMALL) as small:
        mine = await demoted(daemon, small, 1, 1_500)
        kept = on_disk(daemon, small, mine)
        held = daemon.snapshot()["disk"]["held_bytes"]

    other = settings(ssd_bytes=cap, **key)
    async with running_node(index, other) as daemon, engine_at(daemon, SMALL) as small:
        now, fits = on_disk(daemon, small, mine), min(1.0, cap / held)
        # what stays of a chain is lost where what lies before it went
        assert sum(now) >= (sum(kept) if fits == 1.0 else 0.5 * fits * sum(kept))
        assert daemon.snapshot()["disk"]["held_bytes"] <= cap
        await all_back(small, mine, 1, now)


async def test_a_model_that_ends_leaves_its_files_and_an_era_leaves_none(
    index, settings, tmp_path, monkeypatch
):
    monkeypatch.setattr(slab_mover, "ERA_S", 0.0)
    monkeypatch.setattr(slab_mover, "MAX_KINDS", 1)
    async with running_node(index, settings()) as daemon, engine_at(daemon, LARGE) as large:
        async with engine_at(daemon, SMALL) as small:
            mine = await demoted(daemon, small, 1)
            kept = on_disk(daemon, small, mine)
            folder = tmp_path / "a" / small.welcome["namespace_digest"].hex()
        await until(lambda: len(daemon.snapshot()["kinds"]) == 1)
        await until(lambda: names(index, mine, [0] * len(mine)))
        assert len(daemon.snapshot()["disk"]["unopened"]) == 1
        assert list(folder.glob("bucket-*"))

        async with engine_at(daemon, SMALL) as small:
            now = on_disk(daemon, small, mine)  # what was in memory then came there too
            assert all(more >= before for more, before in zip(now, kept, strict=True))
            await until(lambda: names(index, mine, now))
            await all_back(small, mine, 1, now)
        await until(lambda: len(daemon.snapshot()["kinds"]) == 1)

        async with engine_at(daemon, ERA) as engine:
            await demoted(daemon, engine, 3, 30)
            era = tmp_path / "a" / engine.welcome["namespace_digest"].hex()
            assert era.exists()
        await until(lambda: len(daemon.snapshot()["kinds"]) == 1)
        assert not era.exists()
        assert await stored(large, fresh_chain(10), 2) == 10


async def test_a_full_disk_is_told_once_and_the_node_serves_both(index, settings, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with running_node(index, settings()) as daemon, both_at(daemon) as (small, large):
        mine = await demoted(daemon, small, 1, 60)
        monkeypatch.setattr(os, "posix_fallocate", full)
        for _ in range(30):
            await stored(small, fresh_chain(50), 1)
            await stored(large, fresh_chain(50), 2)
        await until(lambda: daemon.snapshot()["tiers"]["ssd"]["write_error"] >= 2)

        degraded = daemon.snapshot()["degraded"]
        assert [why for why in degraded if "No space left" in why] == degraded
        assert len(degraded) == 1
        assert sum([await found(small, chain, 1) for chain in mine]) >= 60
        assert await stored(large, fresh_chain(20), 2) == 20


async def test_a_folder_that_cannot_be_read_costs_that_model_its_disk(
    index, settings, tmp_path, caplog
):
    digest = NAMESPACE.digest(SECRET).hex()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / digest).write_text("in the way")

    async with running_node(index, settings()) as daemon, both_at(daemon) as (small, large):
        assert not kind(daemon, small)["disk"]
        assert kind(daemon, large)["disk"]
        (why,) = daemon.snapshot()["degraded"]
        assert f"no disk tier for namespace {digest[:NAME_DIGITS]}" in why
        await demoted(daemon, large, 2, 60)
        assert await stored(small, fresh_chain(20), 1) == 20


async def test_what_is_told_to_be_on_disk_can_be_read_though_its_engines_left(
    index, settings, tmp_path_factory, monkeypatch
):
    """A first model is never closed: a slab of its own stays for what peers ask of its disk."""
    monkeypatch.setattr(slab_mover, "MAX_KINDS", 1)
    async with running_node(index, settings()) as daemon:
        async with engine_at(daemon, SMALL) as small:
            chains = await demoted(daemon, small, 1)
        async with engine_at(daemon, LARGE):
            await until(lambda: kind(daemon, small)["ends"])
            await until(lambda: slab_shares.next_move(daemon._opener.mover._holdings()) is None)
            assert (kind(daemon, small)["slabs"], kind(daemon, small)["slots"]) == (1, 48)
            told = [(await index.match(chain)).get("a", 0) for chain in chains]
            most = chains[told.index(50)][:40]  # a slab has room for these at once
            other = settings_of(tmp_path_factory.mktemp("b"), name="b", pool_bytes=POOL_BYTES)
            async with running_node(index, other) as peer, engine_at(peer, SMALL) as puller:
                plan = PullPlan(
                    request="r", source="a", source_epoch=daemon.epoch, blocks=40, budget_s=20.0
                )
                await until(lambda: pulled(puller, most, plan))


async def pulled(engine, chain, plan):
    return (await engine.prepare(chain, plan))["blocks"] == len(chain)
