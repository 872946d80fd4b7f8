"""What a node says to the index stays true: over outages, fences and evictions."""

import asyncio
import time

import pytest
from eventually import until
from indexes import chain_of, node_record, segments

from prefixfleet.cluster.announcer import PUBLISH_BLOCKS, Announcer
from prefixfleet.store.errors import IndexUnavailable
from prefixfleet.store.memory_index import MemoryIndex

CHAIN = chain_of("announcer", 40)


class CutIndex:
    """The real index in memory, behind a line that can be cut for one kind of call or for all."""

    def __init__(self):
        self.index = MemoryIndex(lease_s=30.0)
        self.cut = set()
        self.calls = []

    def __getattr__(self, name):
        async def call(*arguments):
            self.calls.append(name)
            if name in self.cut or "all" in self.cut:
                raise IndexUnavailable("the line is cut")
            return await getattr(self.index, name)(*arguments)

        return call


class Node:
    """An announcer with what it announces."""

    def __init__(self, index, name="a", held=()):
        self.held = list(held)
        self.epochs = []
        self.announcer = Announcer(
            index,
            record=lambda: node_record(name),
            resident=lambda: list(self.held),
            segments=lambda hashes: (
                segments(CHAIN, *[CHAIN.index(h) for h in hashes]) if hashes else {}
            ),
            joined=self.epochs.append,
            clock=time.monotonic,
        )
        self.loop = asyncio.create_task(self.announcer.run())

    def commit(self, hashes):
        self.held += hashes
        self.announcer.publish(hashes)

    async def stop(self):
        self.loop.cancel()
        await asyncio.gather(self.loop, return_exceptions=True)


@pytest.fixture
async def index():
    return CutIndex()


@pytest.fixture
async def start(index):
    nodes = []

    def start(**options):
        nodes.append(Node(index, **options))
        return nodes[-1]

    yield start
    for node in nodes:
        await node.stop()


async def holds(index, blocks, node="a"):
    expected = {node: blocks} if blocks else {}
    return await index.index.match(CHAIN) == expected


async def test_what_is_held_at_the_start_is_said(index, start):
    start(held=CHAIN[:5])

    await until(lambda: holds(index, 5))


async def test_what_is_committed_later_is_said_soon_and_what_goes_is_taken_back(index, start):
    node = start()
    node.commit(CHAIN[:10])
    await until(lambda: holds(index, 10))

    await node.announcer.withdraw(CHAIN[4:10])

    assert await holds(index, 4)
    assert node.announcer.withdrawn_blocks == 6


async def test_a_block_that_goes_before_it_was_said_is_never_said(index, start):
    index.cut = {"publish"}
    node = start()
    node.commit(CHAIN[:10])
    await until(lambda: "publish" in index.calls)

    await node.announcer.withdraw(CHAIN[6:10])
    index.cut = set()

    await until(lambda: not node.announcer.pending)
    assert await holds(index, 6)


async def test_many_blocks_are_said_in_bounded_calls(index, start, monkeypatch):
    monkeypatch.setattr("prefixfleet.cluster.announcer.PUBLISH_BLOCKS", 8)
    node = start(held=CHAIN)

    await until(lambda: holds(index, 40))

    assert PUBLISH_BLOCKS >= 8
    assert index.calls.count("publish") == 5
    assert node.announcer.published_blocks == 40


async def test_an_outage_is_told_once_kept_through_and_ended(index, start, caplog):
    caplog.set_level("INFO", "prefixfleet.cluster.announcer")
    node = start()
    await until(lambda: node.epochs)
    epoch = node.announcer.epoch
    index.cut = {"all"}
    node.commit(CHAIN[:3])
    await until(lambda: node.announcer.degraded)
    assert "the line is cut" in node.announcer.degraded
    assert node.announcer.epoch == epoch  # peers that were told it may still pull

    index.cut = set()

    await until(lambda: holds(index, 3))
    await until(lambda: not node.announcer.degraded)
    assert node.epochs == [epoch]  # the life went on
    assert [r.levelname for r in caplog.records].count("WARNING") == 1


async def test_a_node_that_starts_without_the_index_joins_when_it_is_there(index, start):
    index.cut = {"all"}
    node = start(held=CHAIN[:2])
    await until(lambda: node.announcer.degraded)
    assert node.announcer.epoch == 0

    index.cut = set()

    await until(lambda: holds(index, 2))


async def test_blocks_that_could_not_be_withdrawn_end_the_life_that_named_them(index, start):
    node = start(held=CHAIN[:10])
    await until(lambda: holds(index, 10))
    first = node.announcer.epoch
    index.cut = {"withdraw"}
    node.held = CHAIN[:4]

    await node.announcer.withdraw(CHAIN[4:10])

    await until(lambda: node.announcer.epoch > first)
    await until(lambda: holds(index, 4))


async def test_a_fenced_node_with_its_name_to_itself_joins_anew_and_says_everything(index, start):
    node = start(held=CHAIN[:7])
    await until(lambda: holds(index, 7))
    (member, _), *_ = await index.index.members()

    await index.index.leave(member)

    await until(lambda: len(node.epochs) == 2)
    await until(lambda: holds(index, 7))


async def test_a_node_whose_name_another_one_took_stops_and_says_what_to_set(index, start):
    old = start(held=CHAIN[:3])
    await until(lambda: holds(index, 3))

    new = start()

    await until(lambda: "PREFIXFLEET_NODE_NAME" in old.announcer.degraded)
    assert len(old.epochs) == len(new.epochs) == 1
    assert await holds(index, 0)


async def test_a_node_that_leaves_is_gone_at_once(index, start):
    node = start(held=CHAIN[:3])
    await until(lambda: holds(index, 3))
    await node.stop()

    await node.announcer.leave()

    assert await index.index.members() == []


async def test_a_record_that_changed_is_sent_before_the_next_renewal(index, start):
    node = start()
    await until(lambda: node.epochs)
    index.calls.clear()
    began = time.monotonic()

    node.announcer.refresh()

    await until(lambda: "renew" in index.calls)
    assert time.monotonic() - began < 30


async def test_it_knows_which_blocks_another_node_holds_too(index, start):
    first, second = start(name="a", held=CHAIN[:3]), start(name="b", held=CHAIN[:2])
    await until(lambda: nothing_pending(first, second))

    assert await first.announcer.elsewhere(CHAIN[:3]) == set(CHAIN[:2])


async def test_a_block_that_is_not_published_yet_and_counted_once_is_another_nodes(index, start):
    first, second = start(name="a"), start(name="b", held=CHAIN[:1])
    await until(lambda: nothing_pending(first, second))
    index.cut = {"publish"}
    first.commit(CHAIN[:2])

    assert await first.announcer.elsewhere(CHAIN[:2]) == set(CHAIN[:1])


async def test_without_the_index_every_copy_counts_as_the_last(index, start):
    node = start(held=CHAIN[:2])
    await until(lambda: nothing_pending(node))
    index.cut = {"copies"}

    assert await node.announcer.elsewhere(CHAIN[:2]) == set()


async def nothing_pending(*nodes):
    return all(n.announcer.epoch and not n.announcer.pending for n in nodes)
