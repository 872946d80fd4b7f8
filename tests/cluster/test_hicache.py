"""SGLang's pages in a node's cache: what one engine kept, another loads, bit for bit."""

import asyncio
from dataclasses import asdict

import pytest
import torch
from daemons import Daemons
from host_pools import PageFirstPool, indices_of, keys_of
from indexes import chain_of, node_record, segments
from node_rig import NAMESPACE, pool_of

from prefixfleet.cluster.cache_api import NodePrefixCache
from prefixfleet.cluster.hicache import HiCachePages, layout_of, page_bytes
from prefixfleet.cluster.hicache_sources import Sources
from prefixfleet.store.records import PullPlan
from prefixfleet.store.redis_index import RedisIndex
from prefixfleet.store.slot import SlotLayout

WAIT_S = 20.0


class Engine:
    """One rank with its host pool, at a daemon's socket."""

    def __init__(self, socket, plans=lambda chain: None, rank=0, ranks=1, is_writer=True):
        self.pool = PageFirstPool()
        layout = SlotLayout(payload_bytes=page_bytes(self.pool), shards=ranks)
        self.cache = NodePrefixCache(socket, f"s{rank}", asdict(NAMESPACE), layout, rank)
        welcome = self.cache.welcome(WAIT_S)
        self.pages = HiCachePages(
            self.cache,
            key=welcome.hash_key,
            namespace=welcome.namespace_digest,
            plans=plans,
            is_writer=is_writer,
        )

    def keep(self, keys, seed=0, before=()):
        """Compute pages and keep them; what was computed."""
        values = [self.pool.fill(page, seed + page) for page in range(len(keys))]
        indices = indices_of(*range(len(keys)))
        return values, self.pages.set(keys, indices, self.pool, before)

    def load(self, keys):
        """Pages read into another part of the pool."""
        places = range(16, 16 + len(keys))
        found = self.pages.get(keys, indices_of(*places), self.pool)
        return found, [self.pool.memory[page] for page in places]


@pytest.fixture
def daemons(tmp_path_factory):
    with Daemons(tmp_path_factory.mktemp("n")) as daemons:
        yield daemons


@pytest.fixture
def engine(daemons):
    engine = Engine(daemons.start())
    yield engine
    engine.cache.close()


def test_what_one_engine_kept_another_loads_bit_for_bit(daemons, engine):
    keys = keys_of("doc", 5)
    values, kept = engine.keep(keys)
    other = Engine(daemons.ask("a", lambda node: node.settings.socket_path))

    assert kept == [True] * 5
    assert other.pages.count_leading(keys) == 5
    found, pages = other.load(keys)

    assert found == [True] * 5
    for page, value in zip(pages, values, strict=True):
        assert torch.equal(page, value)
    other.cache.close()


def test_a_batch_that_follows_others_is_kept_behind_them(engine):
    keys = keys_of("doc", 6)
    engine.keep(keys[:3])

    _, kept = engine.keep(keys[3:], seed=50, before=keys[:3])

    assert kept == [True] * 3
    assert engine.pages.count_leading(keys) == 6
    assert engine.load(keys[3:])[0] == [True] * 3  # a chain may be read from its middle


def test_pages_behind_a_hole_are_not_kept(engine):
    keys = keys_of("doc", 4)

    assert engine.keep(keys[2:], before=keys[:2])[1] == [False, False]
    assert engine.pages.count_leading(keys) == 0


def test_the_leading_run_ends_at_the_first_page_that_is_missing(engine):
    keys = keys_of("doc", 5)
    engine.keep(keys[:3])

    assert engine.pages.count_leading(keys) == 3
    assert engine.load(keys)[0] == [True, True, True, False, False]


def test_pages_that_are_there_count_as_kept(engine):
    keys = keys_of("doc", 3)
    engine.keep(keys)

    assert engine.keep(keys)[1] == [True] * 3


def test_pages_of_a_peer_are_pulled_when_the_engine_asks(daemons, engine):
    keys = keys_of("doc", 6)
    values, _ = engine.keep(keys)
    epoch = daemons.ask("a", lambda node: node.epoch)
    plan = PullPlan(request="p", source="a", source_epoch=epoch, blocks=6, budget_s=WAIT_S)
    other = Engine(daemons.start("b"), plans=lambda chain: plan)

    assert other.pages.count_leading(keys) == 6
    found, pages = other.load(keys)

    assert found == [True] * 6
    assert all(torch.equal(page, value) for page, value in zip(pages, values, strict=True))
    other.cache.close()


def test_pages_that_left_memory_come_back_from_the_nodes_disk(daemons, tmp_path):
    """SGLang asks for a long text in pieces; each is told what lies before it."""
    disk = {"ssd_path": tmp_path / "ssd", "ssd_bytes": 8 << 20}
    engine = Engine(daemons.start(pool_bytes=1 << 20, **disk))
    keys = keys_of("doc", 16)
    values, _ = engine.keep(keys)
    chain = [engine.pages.block(key) for key in keys]

    def has_left(node):
        cache = pool_of(node).cache
        return cache.pool.match(chain[8:]) == 0 and cache.tier.pool.match(chain) == 16

    for number in range(200):
        if daemons.ask("a", has_left):
            break
        engine.keep(keys_of(f"other-{number}", 16))
    assert daemons.ask("a", has_left)

    asked = (engine.pages.count_leading(keys[8:], keys[:8]) for _ in range(20))
    assert 8 in asked  # what a busy disk brings too late for one question is there for the next
    found, pages = engine.load(keys[8:])

    assert found == [True] * 8
    assert all(torch.equal(page, value) for page, value in zip(pages, values[8:], strict=True))
    engine.cache.close()


def test_a_peers_pages_are_pulled_to_behind_those_before_them(daemons, engine):
    keys = keys_of("doc", 6)
    engine.keep(keys)
    epoch = daemons.ask("a", lambda node: node.epoch)
    plan = PullPlan(request="p", source="a", source_epoch=epoch, blocks=6, budget_s=WAIT_S)
    other = Engine(daemons.start("b"), plans=lambda chain: plan)

    assert other.pages.count_leading(keys[2:], keys[:2]) == 4
    last = other.pages.block(keys[-1])
    assert daemons.ask("b", lambda node: len(pool_of(node).host.pool.chain_to(last))) == 6
    other.cache.close()


def test_a_damaged_page_ends_the_load(daemons, engine):
    keys = keys_of("doc", 3)
    engine.keep(keys)

    def spoil(node):
        host = pool_of(node).host
        with host.pool.pin([engine.pages.block(keys[1])]) as pin:
            host.segment.view[pin.slots[0] * host.kind.layout.slot_bytes + 100] ^= 1

    daemons.ask("a", spoil)

    assert engine.load(keys)[0] == [True, False, False]
    assert engine.pages.count_leading(keys) == 1


def test_every_rank_keeps_its_own_shard(daemons):
    socket = daemons.start()
    ranks = [Engine(socket, rank=rank, ranks=2) for rank in range(2)]
    keys = keys_of("doc", 3)

    first, _ = ranks[0].keep(keys, seed=1)
    assert ranks[0].pages.count_leading(keys) == 0
    second, _ = ranks[1].keep(keys, seed=100)

    for rank, values in zip(ranks, (first, second), strict=True):
        found, pages = rank.load(keys)
        assert found == [True] * 3
        assert all(torch.equal(page, value) for page, value in zip(pages, values, strict=True))
        rank.cache.close()


def test_a_rank_that_is_no_writer_reads_what_the_writer_kept(daemons, engine):
    keys = keys_of("doc", 3)
    reader = Engine(daemons.ask("a", lambda node: node.settings.socket_path), is_writer=False)
    reader.keep(keys)
    assert engine.pages.count_leading(keys) == 0

    engine.keep(keys)

    assert reader.load(keys)[0] == [True] * 3
    reader.cache.close()


def test_a_page_is_named_by_the_clusters_key_and_the_namespace(engine):
    (key,) = keys_of("doc", 1)
    names = {
        HiCachePages(
            engine.cache, key=k, namespace=n, plans=lambda chain: None, is_writer=True
        ).block(key)
        for k in (b"a" * 32, b"b" * 32)
        for n in (b"n" * 16, b"m" * 16)
    }

    assert len(names) == 4
    assert not any(bytes.fromhex(key)[:8] in name for name in names)


def test_layouts_tell_pools_apart():
    pool = PageFirstPool()
    other = PageFirstPool()
    other.layout = "layer_first"

    assert layout_of(pool) != layout_of(other)
    assert layout_of(pool) == layout_of(PageFirstPool(pages=3))


@pytest.fixture
def sources(redis_url, fleet):
    """The index's view of nodes "far" and "near", which hold 3 and 5 blocks of a chain."""
    index = RedisIndex(redis_url, fleet, lease_s=60, timeout_s=WAIT_S)
    chain = chain_of("doc", 6)

    async def fill():
        for name, blocks in (("far", 5), ("near", 3)):
            member = await index.join(node_record(name))
            await index.publish(member, segments(chain[:blocks]))
        await index.close()

    asyncio.run(fill())
    found = []

    def made(node):
        found.append(Sources(RedisIndex(redis_url, fleet, timeout_s=WAIT_S), node))
        return found[-1], chain

    yield made
    for one in found:
        one.close()


def test_a_chain_is_pulled_from_the_node_that_has_most_of_it(sources):
    asked, chain = sources("me")
    plan = asked.plan(chain)

    assert (plan.source, plan.blocks) == ("far", 5)
    assert plan.source_epoch > 0


def test_nothing_is_pulled_where_nobody_has_more(sources):
    asked, chain = sources("far")

    assert asked.plan(chain) is None
    assert asked.plan(chain_of("other", 3)) is None


def test_without_the_index_there_is_no_plan_and_it_is_said_once(tmp_path, caplog):
    sources = Sources(RedisIndex(f"unix://{tmp_path}/nobody.sock", "f"), "me")

    assert [sources.plan(chain_of("doc", 2)) for _ in range(3)] == [None] * 3
    sources.close()

    assert len([r for r in caplog.records if "no pulls" in r.message]) == 1
