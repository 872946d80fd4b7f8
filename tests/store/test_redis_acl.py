"""A Redis user with our rules can do everything that we do, and nothing else."""

import asyncio
import re
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import redis
from eventually import until
from indexes import chain_of, node_record, segments
from redis_servers import index_at
from upstreams import NAMESPACE, SECRET

from prefixfleet.store import redis_acl
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.load_board import LoadBoard
from prefixfleet.store.poll_rights import PollRights
from prefixfleet.store.records import WorkerRecord
from prefixfleet.store.redis_acl import CALLED, CALLED_INSIDE, CONNECTING, acl_rules
from prefixfleet.store.registry import WorkerRegistry
from prefixfleet.store.stored_responses import ResponseName, StoredResponses
from prefixfleet.store.worker_orders import WorkerOrders

CHAIN = chain_of("acl", 300)
NAME, PASSWORD = "fleet-user", "password-of-the-user"


@pytest.fixture
def admin(own_server):
    with redis.Redis.from_url(own_server.url) as client:
        yield client


@pytest.fixture
def user_url(own_server, admin):
    admin.execute_command("ACL", "SETUSER", NAME, "on", f">{PASSWORD}", *acl_rules("f"))
    return re.sub("://.*@", f"://{NAME}:{PASSWORD}@", own_server.url)


async def do_everything(url):
    """Every call of index and registry, lives that end in every way, and sweeps."""
    async with index_at(url, lease_s=0.1) as mortal, index_at(url) as index:
        await index.prepare()
        a, b = await index.join(node_record("a")), await index.join(node_record("b"))
        gone = await index.join(node_record("c"))
        for member in (a, b, gone):
            await index.publish(member, segments(CHAIN))
        assert await index.match(CHAIN) == {"a": 300, "b": 300, "c": 300}
        await index.copies(segments(CHAIN))
        snapshot = await index.snapshot()
        await index.withdraw(b, segments(CHAIN, 299))
        async with asyncio.timeout(20):
            assert (await anext(index.follow(snapshot.cursor))).kind == "withdraw"
        await index.join(node_record("b"))
        await index.leave(a)

        await mortal.renew(gone, node_record("c"))

        async def ended():
            return all(member.node != "c" for member, _ in await index.members())

        await until(ended)
        for _ in range(20):
            b = await index.join(node_record("b"))
            await index.renew(b, node_record("b"))
        with suppress(TimeoutError):
            async with asyncio.timeout(2):
                async for _ in index.follow((await index.snapshot()).cursor):
                    pass
    registry = WorkerRegistry(url, "f", secret=SECRET, timeout_s=20)
    record = WorkerRecord(
        worker="w",
        node="a",
        url="http://h",
        model="m",
        model_path="/m",
        namespace=asdict(NAMESPACE),
        block_bytes=1,
        max_model_tokens=1,
        prefill_tokens_per_s=1.0,
    )
    await registry.prepare()
    await registry.announce(record, ttl_s=60)
    await registry.announce(record, ttl_s=0.01)
    await asyncio.sleep(0.1)
    await registry.workers()
    await registry.announce(record, ttl_s=60)
    assert await registry.workers() == [record]
    await registry.withdraw("w")
    await registry.change_wish(lambda wish: replace(wish, nodes=2))
    await registry.close()
    orders = WorkerOrders(url, "f", SECRET, timeout_s=20)
    await orders.give("w", b"order")
    assert await orders.all() == {"w": b"order"}
    await orders.withdraw("w")
    await orders.close()
    board = LoadBoard(url, "f", "r", time.monotonic, timeout_s=20)
    assert await board.exchange({}) == []
    await board.leave()
    await board.close()
    rights = PollRights(url, "f", "r", timeout_s=20)
    assert await rights.claim("http://e:1", ttl_s=0.01)
    await rights.close()
    responses = StoredResponses(url, "f", most=1, timeout_s=20)
    await responses.note({ResponseName(b"t", b"over"): "w"})
    await responses.note({ResponseName(b"t", b"there"): "w"})
    assert await responses.worker_of(ResponseName(b"t", b"there")) == "w"
    await responses.close()


async def test_everything_works_as_a_user_with_these_rules_and_needs_each_of_them(user_url, admin):
    admin.config_resetstat()

    await do_everything(user_url)

    called = {
        name.removeprefix("cmdstat_").upper()
        for name, stat in admin.info("commandstats").items()
        if stat["calls"]
    }
    assert called - {"AUTH", "HELLO", "CONFIG|RESETSTAT"} <= {*CALLED, *CALLED_INSIDE, *CONNECTING}
    assert admin.execute_command("ACL", "LOG") == []  # nothing was refused


def test_the_list_is_what_our_functions_call():
    """Named in the sources; a command that is not needed any more leaves the list."""
    folder = Path(redis_acl.__file__).parent
    sources = "\n".join(path.read_text() for path in folder.glob("*.lua"))
    named = set(re.findall(r"redis\.p?call\('([A-Z]+)'", sources))

    assert named == set(CALLED_INSIDE)


@pytest.mark.parametrize(
    "words",
    [
        ["FLUSHALL"],
        ["CONFIG", "GET", "*"],
        ["KEYS", "*"],
        ["EVAL", "return 1", "0"],
        ["FUNCTION", "DELETE", "x"],
        ["ACL", "LIST"],
        ["HGET", "other:key", "x"],
        ["HMGET", "pf1:{other}:meta", "epoch"],
        ["MONITOR"],
    ],
)
def test_everything_else_is_refused(user_url, words):
    with (
        redis.Redis.from_url(user_url) as client,
        pytest.raises(redis.exceptions.NoPermissionError),
    ):
        client.execute_command(*words)


@pytest.mark.parametrize("fleet", ["", "*", "a*", "a}:*", "A", "x" * 41])
def test_a_name_that_would_open_other_keys_is_refused(fleet):
    with pytest.raises(ConfigError, match="fleet"):
        acl_rules(fleet)
