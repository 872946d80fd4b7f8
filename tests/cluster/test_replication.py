"""A prefix that many nodes ask for reaches the others in one broadcast, if the setting says so."""

from contextlib import AsyncExitStack

import pytest
from eventually import until
from node_rig import PlainEngine, fresh_chain, payload_of, pool_of, running_node, settings_of

from prefixfleet.store.heat import HOT_NODES
from prefixfleet.store.memory_index import MemoryIndex
from prefixfleet.store.records import PullPlan

pytestmark = pytest.mark.timeout(400)  # importing torch in six processes takes its time
OTHERS = 2


@pytest.fixture
def folder(tmp_path_factory):
    """Short: sockets are made in it."""
    return tmp_path_factory.mktemp("n")


class Fleet:
    """One source, as many nodes as make its prefix hot, and two more. Owned by the test."""

    def __init__(self, folder, mode):
        self._folder = folder
        self._mode = mode
        self.daemons, self.engines = [], []

    async def open(self, stack):
        index = MemoryIndex(lease_s=60)
        for number in range(1 + HOT_NODES + OTHERS):
            settings = settings_of(self._folder, f"n{number}", collective=self._mode)
            daemon = await stack.enter_async_context(running_node(index, settings))
            engine = PlainEngine.connected(daemon.settings.socket_path)
            self.daemons.append(daemon)
            self.engines.append(await stack.enter_async_context(engine))
        for daemon in self.daemons:
            await until(lambda d=daemon: d.status()["contacts"] and self.at_rest(d), 200)
        await until(lambda: self.all_known(index), 60)
        self.index = index

    def at_rest(self, daemon):
        worker = pool_of(daemon).replicator.part.worker
        return worker.ready or self._mode != "enforce"

    async def all_known(self, index):
        members = await index.members()
        for daemon in self.daemons:
            await daemon._peers.refresh()
        return sum(bool(record.contacts) for _, record in members) == len(self.daemons)

    async def make_hot(self, chain):
        await self.engines[0].put(chain)
        source = self.daemons[0]
        await until(lambda: self._published(chain))
        plan = PullPlan(
            request="r", source="n0", source_epoch=source.epoch, blocks=len(chain), budget_s=60.0
        )
        for engine in self.engines[1 : 1 + HOT_NODES]:
            assert (await engine.prepare(chain, plan))["blocks"] == len(chain)

    async def _published(self, chain):
        return (await self.index.match(chain)).get("n0") == len(chain)

    async def holders(self, chain):
        return {name for name, blocks in (await self.index.match(chain)).items() if blocks}


async def test_observe_counts_what_it_would_send(folder):
    chain = fresh_chain(6)
    async with AsyncExitStack() as stack:
        fleet = Fleet(folder, "observe")
        await fleet.open(stack)
        await fleet.make_hot(chain)

        slot_bytes = fleet.engines[0].layout.slot_bytes
        counted = fleet.daemons[0].snapshot()["collective"]
        assert counted == {"observed": 1, "observed_bytes": OTHERS * 6 * slot_bytes}
        hot = {f"n{i}" for i in range(1 + HOT_NODES)}
        await until(lambda: _same(fleet, chain, hot))  # the last one says so a moment later


async def test_enforce_brings_it_to_all_and_into_the_index(folder):
    chain = fresh_chain(6)
    async with AsyncExitStack() as stack:
        fleet = Fleet(folder, "enforce")
        await fleet.open(stack)
        await fleet.make_hot(chain)

        everybody = {daemon.settings.name for daemon in fleet.daemons}
        await until(lambda: _same(fleet, chain, everybody), 90)
        for engine in fleet.engines[-OTHERS:]:
            answer = await engine.prepare(chain)
            assert (answer["local"], answer["pulled"]) == (6, 0)
            for block, slot in zip(chain, answer["slots"], strict=True):
                assert engine.payload(slot, block) == payload_of(block)
        for daemon in fleet.daemons:
            assert daemon.snapshot()["degraded"] == []


async def _same(fleet, chain, everybody):
    return await fleet.holders(chain) == everybody
