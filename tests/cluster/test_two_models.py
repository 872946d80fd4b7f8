"""Two models on one host, in one fleet: pools of different slot sizes, and no block crosses."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace

import pytest
from eventually import until
from node_rig import NAMESPACE, PlainEngine, fresh_chain, payload_of, running_node, settings_of

from prefixfleet.cluster.node import NodeDaemon
from prefixfleet.store.records import PullPlan
from prefixfleet.store.redis_index import RedisIndex

BIG_BYTES = 70_000
BIG = {
    "namespace": asdict(replace(NAMESPACE, model="big", layout="l2")),
    "payload_bytes": BIG_BYTES,
}
SMALL_FILL, BIG_FILL = 7, 9
BLOCKS = 4


@pytest.fixture
async def index(redis_url, fleet):
    index = RedisIndex(redis_url, fleet, lease_s=60, timeout_s=20)
    yield index
    await index.close()


@asynccontextmanager
async def served(
    index, folder, name, link, **hello
) -> AsyncIterator[tuple[NodeDaemon, PlainEngine]]:
    """A node with an engine of one model."""
    settings = settings_of(folder, name, link=link)
    async with (
        running_node(index, settings) as daemon,
        PlainEngine.connected(settings.socket_path, **hello) as engine,
    ):
        yield daemon, engine


@pytest.mark.parametrize("link", ["tcp", "shm"])
async def test_each_model_is_served_from_its_pool_and_no_block_crosses(
    index, tmp_path_factory, link
):
    """Even where two models have the same hashes: a plan to pull from the other one is a miss."""
    folder, chain, own = tmp_path_factory.mktemp("n"), fresh_chain(BLOCKS), fresh_chain(BLOCKS)
    async with (
        served(index, folder, "a", link) as (small, of_small),
        served(index, folder, "b", link, **BIG) as (_, of_big),
    ):
        await of_small.put(chain, SMALL_FILL)
        await of_big.put(own, BIG_FILL)

        async def both_published():
            held = [await index.match(chain), await index.match(own)]
            contacts = [record.contacts for _, record in await index.members()]
            return held == [{"a": BLOCKS}, {"b": BLOCKS}] and all(contacts)

        await until(both_published)
        plan = PullPlan(
            request="r",
            source="a",
            source_epoch=small.epoch,
            blocks=BLOCKS,
            budget_s=20.0,
        )
        crossed = await of_big.prepare(chain, plan)
        found = await of_big.prepare(own, request="s")
        again = await of_small.prepare(chain, request="t")

        assert (crossed["blocks"], crossed["failure"]) == (0, "refused")
        assert (found["blocks"], again["blocks"]) == (BLOCKS, BLOCKS)
        for block, slot in zip(own, found["slots"], strict=True):
            assert of_big.payload(slot, block) == payload_of(block, BIG_FILL, BIG_BYTES)
        for block, slot in zip(chain, again["slots"], strict=True):
            assert of_small.payload(slot, block) == payload_of(block, SMALL_FILL)


async def test_a_third_node_pulls_from_the_one_of_its_own_model(index, tmp_path_factory):
    folder, chain = tmp_path_factory.mktemp("n"), fresh_chain(BLOCKS)
    async with (
        served(index, folder, "a", "tcp") as (_, of_small),
        served(index, folder, "b", "tcp", **BIG) as (big, of_big),
        served(index, folder, "c", "tcp", **BIG) as (_, of_third),
    ):
        await of_small.put(chain, SMALL_FILL)
        await of_big.put(chain, BIG_FILL)

        async def both_published():
            contacts = [record.contacts for _, record in await index.members()]
            return await index.match(chain) == {"a": BLOCKS, "b": BLOCKS} and all(contacts)

        await until(both_published)
        plan = PullPlan(
            request="r", source="b", source_epoch=big.epoch, blocks=BLOCKS, budget_s=20.0
        )
        pulled = await of_third.prepare(chain, plan)

        assert pulled["pulled"] == BLOCKS
        for block, slot in zip(chain, pulled["slots"], strict=True):
            assert of_third.payload(slot, block) == payload_of(block, BIG_FILL, BIG_BYTES)
