"""Daemons as processes of their own: a source that dies is replaced."""

import asyncio
import signal

import pytest
from engines import Node
from eventually import until
from node_rig import SECRET, PlainEngine, fresh_chain, payload_of, running_node, settings_of

from prefixfleet.store.records import PullPlan
from prefixfleet.store.redis_index import RedisIndex

BLOCKS = 60


@pytest.fixture
async def index(redis_url, fleet):
    index = RedisIndex(redis_url, fleet, lease_s=60, timeout_s=20)
    yield index
    await index.close()


@pytest.fixture
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("n")


@pytest.fixture
async def sources(redis_url, fleet, folder):
    """Two daemons, each a process."""
    secret = folder / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    environ = {
        "PREFIXFLEET_FLEET": fleet,
        "PREFIXFLEET_REDIS_URL": redis_url,
        "PREFIXFLEET_SECRET_FILE": str(secret),
    }
    nodes = [Node(name, folder, environ, 1 << 20) for name in ("a", "b")]
    for node in nodes:
        await asyncio.to_thread(node.start)
    yield nodes
    for node in nodes:
        await asyncio.to_thread(node.stop)


async def test_a_source_that_dies_during_a_pull_is_replaced_by_another_node(index, folder, sources):
    chain = fresh_chain(BLOCKS)
    a, b = sources
    async with (
        running_node(index, settings_of(folder, "c")) as c,
        PlainEngine.connected(c.settings.socket_path) as at_c,
        PlainEngine.connected(b.socket) as at_b,
    ):
        async with PlainEngine.connected(a.socket) as at_a:
            await at_a.put(chain, fill=42)
            await at_b.put(chain, fill=42)
            await until(lambda: holds(index, chain, {"a": BLOCKS, "b": BLOCKS}))
            plan = PullPlan(
                request="r",
                source="a",
                source_epoch=await asyncio.to_thread(getattr, a, "epoch"),
                blocks=BLOCKS,
                budget_s=20.0,
            )
            a.signal(signal.SIGSTOP)  # so that it dies while it is asked
            pulling = asyncio.create_task(at_c.prepare(chain, plan))
            await until(lambda: c.snapshot()["tiers"]["dram"]["reserved"] == BLOCKS)

            await asyncio.to_thread(a.signal, signal.SIGKILL)

            answer = await pulling
        assert (answer["pulled"], answer["failure"]) == (BLOCKS, "")
        for block, slot in zip(chain, answer["slots"], strict=True):
            assert at_c.payload(slot, block) == payload_of(block, 42)
        assert c.snapshot()["counters"]["failed_sources"] == {"peer_lost": 1}


async def holds(index, chain, expected):
    return await index.match(chain) == expected
