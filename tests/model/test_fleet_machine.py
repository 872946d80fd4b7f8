"""Random histories of a small fleet in virtual time: real pools, caches, announcers, leases and
pulls, under eviction, restarts, lost answers, a bad network and spoiled memory.

Every wait is virtual, so an example explores minutes of interleavings in milliseconds; a failing
one is shrunk and printed as a program.
"""

import asyncio
import logging
import os
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from invariants import (
    a_promised_prefix_stays,
    a_resident_block_is_right,
    no_slot_is_lost_or_used_twice,
    nothing_is_held_at_rest,
    only_live_lives_are_named,
    the_index_names_nothing_that_was_given_away,
    the_index_says_what_is_here,
)
from model_fleet import Holding, LossyIndex, ModelNode, chain_of
from virtual_time import virtual_time

from prefixfleet.cluster.evictions import Evictions
from prefixfleet.store.records import PullPlan
from prefixfleet.transfer import proof
from prefixfleet.transfer.inproc import Faults, InprocNetwork

NAMES = "abc"
SLACK_S = 5.0
"""Beyond its budget a prepare may wait for the index to hear of what makes room."""
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "12"))

names = st.sampled_from(NAMES)
chains = st.sampled_from(  # few, and with common beginnings: histories should meet
    [text[:end] for text in ("xyxyxyx", "xyxxyyx", "yyyxxxx") for end in (2, 5, 7)]
)
bad_networks = st.sampled_from(
    [
        Faults(),
        Faults(delay_s=0.4),
        Faults(bytes_per_s=20_000.0),
        Faults(drop_share=0.3),
        Faults(corrupt_share=0.3),
        Faults(cut_after_bytes=20_000),
        Faults(frozen=True),
    ]
)


class FleetMachine(RuleBasedStateMachine):
    """Three nodes, one index, one network."""

    def __init__(self):
        super().__init__()
        self.stack = ExitStack()
        self.loop = self.stack.enter_context(virtual_time())
        logging.disable(logging.CRITICAL)
        self.stack.callback(logging.disable, logging.NOTSET)
        self.index = LossyIndex()
        self.network = InprocNetwork(seed=1)
        self.nodes = {name: self.loop.do(self.start(name)) for name in NAMES}
        self.asked = {}  # tasks of prepares, with the time by which they must be over
        self.holdings = []
        self.texts = set()
        self.count = 0
        self.loop.advance(1.0)

    async def start(self, name):
        return await ModelNode(name, self.index, self.network).start()

    @rule(name=names, text=chains, end=st.sampled_from(["commit", "commit", "abandon", "vanish"]))
    def write(self, name, text, end):
        """Two ranks write a chain; the second commits, abandons or dies."""
        node, chain = self.nodes[name], chain_of(text)
        self.texts.add(text)
        self.count += 1
        sessions = (self.count * 2, self.count * 2 + 1)

        async def ranks_write():
            for rank, session in enumerate(sessions):
                slots = await node.cache.reserve(session, rank, b"", chain)
                mine = [(b, s) for b, s in zip(chain, slots, strict=True) if s >= 0]
                for block, slot in mine:
                    node.write(block, slot, rank)
                    await asyncio.sleep(0)
                blocks = [block for block, _ in mine]
                if rank and end == "abandon":
                    node.cache.abandon(session, rank, blocks)
                elif not (rank and end == "vanish"):
                    node.cache.commit(session, rank, blocks)
            for session in sessions:
                node.cache.disconnect(session)

        self.watch(ranks_write(), 20.0)

    @rule(name=names, source=names, text=chains, budget=st.sampled_from([0.05, 1.0, 4.0]))
    def prepare(self, name, source, text, budget):
        node, chain = self.nodes[name], chain_of(text)
        self.texts.add(text)
        self.count += 1
        request, session = f"r{self.count}", -self.count
        plan = PullPlan(
            request=request,
            source=source if source != name else "",
            source_epoch=max(0, self.nodes[source].announcer.epoch),
            blocks=len(chain),
            budget_s=budget,
        )

        async def ask():
            prepared = await node.cache.prepare(session, request, chain, plan, 10.0)
            self.holdings.append(Holding(node, session, request, chain, prepared))

        self.watch(ask(), budget + SLACK_S)

    @rule(name=names, source=names, text=chains)
    def hint(self, name, source, text):
        """A router's hint for a request that may never come."""
        self.count += 1
        chain = chain_of(text)
        plan = PullPlan(
            request=f"r{self.count + 1}",
            source=source if source != name else "",
            source_epoch=max(0, self.nodes[source].announcer.epoch),
            blocks=len(chain),
            budget_s=1.0,
        )

        async def start():
            self.nodes[name].cache.claims.start_early(chain, plan)

        self.loop.do(start())

    @precondition(lambda self: self.holdings)
    @rule(data=st.data(), whole_session=st.booleans())
    def release(self, data, whole_session):
        holding = self.holdings.pop(data.draw(st.integers(0, len(self.holdings) - 1)))
        if whole_session:
            holding.node.cache.disconnect(holding.session)
        else:
            holding.node.cache.release(holding.session, holding.request)

    @rule(name=names, text=chains, told=st.booleans())
    def spoil(self, name, text, told):
        """Memory goes bad; an engine may notice, or a peer does."""
        node, block = self.nodes[name], chain_of(text)[-1]
        node.spoil(block)

        async def discard():
            node.cache.discard([block])

        if told:
            self.loop.do(discard())

    @rule(faults=bad_networks)
    def change_network(self, faults):
        self.network.faults = faults

    @rule(name=names, how=st.sampled_from(["away", "mute", "well"]))
    def change_index(self, name, how):
        self.index.away.discard(name)
        self.index.mute.discard(name)
        if how != "well":
            getattr(self.index, how).add(name)

    @rule()
    def index_forgets(self):
        """It restarts empty; the epochs go on, as Redis's do."""
        epoch = self.index._epoch
        self.index._lives.clear()
        self.index._holders.clear()
        self.index._epoch = epoch + 1

    @rule(name=names)
    def restart(self, name):
        old = self.nodes[name]
        self.loop.do(old.die())
        self.holdings = [h for h in self.holdings if h.node is not old]
        self.nodes[name] = self.loop.do(self.start(name))

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.1, 4.0, 40.0]))
    def wait(self, seconds):
        self.loop.advance(seconds)

    @rule(count=st.integers(1, 30))
    def run_a_little(self, count):
        self.loop.steps(count)

    def watch(self, work, within_s):
        task = self.loop.create_task(work)
        self.asked[task] = self.loop.time() + within_s

    @invariant()
    def rules_hold(self):
        now = self.loop.time()
        for task, limit in list(self.asked.items()):
            assert task.done() or now <= limit, f"still waiting {now - limit} s after its time"
            if task.done():
                del self.asked[task]
                assert task.cancelled() or task.exception() is None, task.exception()
        only_live_lives_are_named(self.index)
        for node in self.nodes.values():
            for loop in node.tasks:
                assert not loop.done(), f"{node.name}: a loop of the daemon ended"
            no_slot_is_lost_or_used_twice(node)
            a_resident_block_is_right(node)
            the_index_names_nothing_that_was_given_away(node)
        for holding in self.holdings:
            a_promised_prefix_stays(holding)

    def teardown(self):
        """Everything is well again: what was held is given back, and the index is exact."""
        try:
            self.network.faults = Faults()
            self.index.away.clear()
            self.index.mute.clear()
            self.loop.advance(90.0)
            self.rules_hold()
            for holding in self.holdings:
                holding.node.cache.release(holding.session, holding.request)
            self.loop.advance(1.0)
            found = [(t, self.loop.do(self.index.match(chain_of(t)))) for t in sorted(self.texts)]
            for node in self.nodes.values():
                nothing_is_held_at_rest(node)
                the_index_says_what_is_here(
                    node, [(chain_of(text), lengths.get(node.name, 0)) for text, lengths in found]
                )
        finally:
            for node in self.nodes.values():
                self.loop.do(node.die())
            self.stack.close()


TestFleet = FleetMachine.TestCase
TestFleet.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=30,
    suppress_health_check=list(HealthCheck),
)


def look_often(machine):
    for _ in range(60):
        machine.run_a_little(1)
        machine.rules_hold()


async def free_before_withdrawing(evictions, victims, spoiled):
    evictions._pool.free(victims)
    await evictions._announcer.withdraw(victims.hashes)


def test_the_rules_notice_a_slot_that_is_given_away_before_it_is_withdrawn(monkeypatch):
    monkeypatch.setattr(Evictions, "_let_leave", free_before_withdrawing)
    machine = FleetMachine()
    machine.write("a", "xyxyxyx", "commit")
    machine.wait(1.1)
    machine.write("a", "yyyxxxx", "commit")

    with pytest.raises(AssertionError, match="the index still names"):
        look_often(machine)
    machine.stack.close()


def test_the_rules_notice_a_puller_that_proves_nothing(monkeypatch):
    monkeypatch.setattr(proof.ShardProof, "finish", lambda _: None)
    machine = FleetMachine()
    machine.write("a", "xyxyxyx", "commit")
    machine.wait(1.1)
    machine.spoil("a", "xyx", False)
    machine.prepare("b", "a", "xyxyxyx", 4.0)
    machine.wait(4.0)

    with pytest.raises(AssertionError, match="is wrong"):
        machine.rules_hold()
    machine.stack.close()
