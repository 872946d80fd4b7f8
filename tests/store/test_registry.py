"""The registry of workers, in a real server."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import redis.asyncio
from eventually import until
from upstreams import SECRET

from prefixfleet.store.adapters import MAX_ADAPTERS, MAX_NAME
from prefixfleet.store.errors import ConfigError, IndexUnavailable
from prefixfleet.store.records import FleetWish, WorkerRecord
from prefixfleet.store.registry import WorkerRegistry


@pytest.fixture
async def registry(redis_url, fleet):
    made = WorkerRegistry(redis_url, fleet, secret=SECRET, timeout_s=20)
    yield made
    await made.close()


@pytest.fixture
async def raw(redis_url):
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        yield client


def worker(name, **fields):
    known: dict[str, Any] = {
        "node": "n",
        "url": "http://127.0.0.1:1",
        "model": "m",
        "model_path": "/m",
        "namespace": {"model": "m"},
        "block_bytes": 1,
        "max_model_tokens": 1,
        "prefill_tokens_per_s": 1.0,
    }
    return WorkerRecord(worker=name, **(known | fields))


async def test_announced_workers_are_listed_by_name(registry):
    for name in ("b", "a", "c"):
        await registry.announce(worker(name), ttl_s=60)

    assert await registry.workers() == [worker("a"), worker("b"), worker("c")]


async def test_nobody_is_listed_at_first(registry):
    assert await registry.workers() == []


async def test_announcing_again_replaces_the_record(registry):
    await registry.announce(worker("a"), ttl_s=60)

    await registry.announce(worker("a", state="draining"), ttl_s=60)

    assert await registry.workers() == [worker("a", state="draining")]


async def test_a_worker_that_stops_announcing_is_listed_no_longer(registry, raw, fleet):
    await registry.announce(worker("a"), ttl_s=60)
    await registry.announce(worker("b"), ttl_s=0.05)

    async def gone():
        return await registry.workers() == [worker("a")]

    await until(gone)
    await registry.announce(worker("a"), ttl_s=60)  # and cleans up behind it
    assert await raw.hkeys(f"pf1:{{{fleet}}}:workers") == [b"a"]


async def test_a_withdrawn_worker_is_gone_at_once(registry):
    await registry.announce(worker("a"), ttl_s=60)

    await registry.withdraw("a")
    await registry.withdraw("a")
    await registry.withdraw("never there")

    assert await registry.workers() == []


async def test_a_record_that_cannot_be_read_is_skipped_and_counted(registry, raw, fleet, caplog):
    await registry.announce(worker("a"), ttl_s=60)
    await registry.announce(worker("b"), ttl_s=60)
    await registry.announce(worker("c"), ttl_s=60)
    await raw.hset(f"pf1:{{{fleet}}}:workers", "b", b"\xc1 junk")
    await raw.hdel(f"pf1:{{{fleet}}}:workers", "c")

    assert await registry.workers() == [worker("a")]
    assert registry.corrupt_records == 2
    assert "record of a worker ignored" in caplog.text


async def test_a_record_of_a_million_adapters_is_skipped_unread(registry, caplog):
    """It would hold up whoever decodes it for a second, each second."""
    await registry.announce(worker("a"), ttl_s=60)
    names = {f"{number:0{MAX_NAME}}": "0a" * 16 for number in range(MAX_ADAPTERS)}
    await registry.announce(worker("most", adapters=names), ttl_s=60)
    names = {f"{number}": "" for number in range(1_000_000)}
    await registry.announce(worker("more", adapters=names), ttl_s=60)

    assert [record.worker for record in await registry.workers()] == ["a", "most"]
    assert "expected 2097152 at most" in caplog.text


async def test_fleets_on_one_server_keep_their_workers_apart(registry, redis_url, fleet):
    other = WorkerRegistry(redis_url, f"{fleet}-2", timeout_s=20)
    await registry.announce(worker("a"), ttl_s=60)

    assert await other.workers() == []
    await other.close()


async def test_callers_at_once_lose_nobody(registry):
    names = [f"w{i:02}" for i in range(50)]

    await asyncio.gather(*(registry.announce(worker(name), ttl_s=60) for name in names))

    assert [record.worker for record in await registry.workers()] == names


async def test_without_a_server_every_call_is_unavailable(tmp_path):
    registry = WorkerRegistry(f"unix://{tmp_path}/nobody.sock", "f")

    for call in (
        registry.workers(),
        registry.announce(worker("a"), ttl_s=1),
        registry.withdraw("a"),
        registry.prepare(),
    ):
        with pytest.raises(IndexUnavailable):
            await call
    await registry.close()


async def test_a_key_of_another_type_is_unavailable(registry, raw, fleet):
    await raw.set(f"pf1:{{{fleet}}}:worker_leases", b"junk")

    with pytest.raises(IndexUnavailable):
        await registry.workers()


def test_a_wrong_url_is_refused():
    with pytest.raises(ConfigError):
        WorkerRegistry("ftp://h", "f")


async def test_nothing_is_wished_at_first(registry):
    assert await registry.wish() == FleetWish()


async def test_a_wish_is_read_as_it_was_changed(registry):
    wish = FleetWish(draining=("a",), nodes=3, rollout=2, environ={"A": "ä"}, failed="why")

    assert await registry.change_wish(lambda _: wish) == wish
    assert await registry.wish() == wish


async def test_changes_at_the_same_time_are_all_kept(registry):
    def one_more(wish):
        return replace(wish, nodes=wish.nodes + 1)

    await asyncio.gather(*(registry.change_wish(one_more) for _ in range(4)))

    assert (await registry.wish()).nodes == 4


async def test_a_change_that_never_gets_its_turn_ends(registry, redis_url, fleet):
    other = WorkerRegistry(redis_url, fleet, secret=SECRET, timeout_s=20)
    count = 0

    async def disturb():
        await other.change_wish(lambda wish: replace(wish, rollout=wish.rollout + 1))

    asked = registry._stored_wish

    async def read_late():
        nonlocal count
        count += 1
        seen = await asked()
        await disturb()
        return seen

    registry._stored_wish = read_late
    with pytest.raises(IndexUnavailable, match="changed 10 times"):
        await registry.change_wish(lambda wish: replace(wish, nodes=7))
    assert count == 10
    await other.close()


@pytest.mark.parametrize("record", [b"", b"\xc1", b"\x81\xa7version\x09"])
async def test_an_unreadable_wish_is_an_error_and_is_not_replaced(registry, raw, fleet, record):
    key, record = f"pf1:{{{fleet}}}:wish", registry._seals.seal("", record)
    await raw.hset(key, mapping={"generation": 1, "record": record})

    with pytest.raises(ConfigError, match="FleetWish"):
        await registry.change_wish(lambda wish: replace(wish, nodes=7))
    assert await raw.hget(key, "record") == record
