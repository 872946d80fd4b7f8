"""What every adapter may rely on: one suite, on the cache of a real node daemon."""

import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest
from daemons import Daemons
from node_rig import NAMESPACE, PAYLOAD_BYTES, fresh_chain, pool_of
from patience import be_patient

from prefixfleet.cluster import cache_api
from prefixfleet.cluster.cache_api import NodePrefixCache
from prefixfleet.store.errors import EpochChanged
from prefixfleet.store.records import PullPlan
from prefixfleet.store.slot import SlotLayout

WAIT_S = 20.0


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    be_patient(monkeypatch)


def payload_of(block):
    return (block * (PAYLOAD_BYTES // 16 + 1))[:PAYLOAD_BYTES]


def writes_of(chain):
    def write_of(block):
        def write(payload):
            payload[:] = payload_of(block)

        return block, write

    return [write_of(block) for block in chain]


@pytest.fixture
def daemons(tmp_path_factory):
    with Daemons(tmp_path_factory.mktemp("n")) as daemons:
        yield daemons


def cache_at(socket, shards=1, rank=0, namespace=None):
    layout = SlotLayout(payload_bytes=PAYLOAD_BYTES, shards=shards)
    return NodePrefixCache(socket, "fourth", namespace or asdict(NAMESPACE), layout, rank)


@pytest.fixture
def cache(daemons):
    cache = cache_at(daemons.start())
    cache.welcome(WAIT_S)
    yield cache
    cache.close()


def loaded(cache, chain, plan=None, budget_s=WAIT_S):
    """Payloads of the leading blocks."""
    found = []
    with cache.pin(secrets.token_hex(4), chain, plan, budget_s) as pinned:
        for position in range(len(pinned.blocks)):
            target = memoryview(bytearray(PAYLOAD_BYTES))
            if not cache.load(pinned, position, target):
                break
            found.append(bytes(target))
    return found


def test_what_was_saved_is_matched_and_loaded(cache):
    chain = fresh_chain(5)

    assert cache.match(chain) == 0
    assert cache.save(b"", writes_of(chain)) == [True] * 5

    assert cache.match(chain) == 5
    assert loaded(cache, chain) == [payload_of(block) for block in chain]


def test_a_chain_may_be_saved_piece_by_piece_but_not_behind_a_hole(cache):
    chain = fresh_chain(4)
    cache.save(b"", writes_of(chain[:2]))

    assert cache.save(chain[2], writes_of(chain[3:])) == [False]
    assert cache.save(chain[1], writes_of(chain[2:])) == [True, True]

    assert cache.match(chain) == 4


def test_what_is_here_is_not_written_again(cache):
    chain = fresh_chain(3)
    cache.save(b"", writes_of(chain))

    assert cache.save(b"", writes_of(chain)) == [False] * 3


def test_a_pinned_block_stays_while_others_come_and_go(cache, daemons):
    chain = fresh_chain(4)
    cache.save(b"", writes_of(chain))
    slots = daemons.ask("a", lambda node: pool_of(node).host.pool.num_slots)

    with cache.pin("r", chain, None, 1.0) as pinned:
        for _ in range(3):
            cache.save(b"", writes_of(fresh_chain(slots // 2)))
        target = memoryview(bytearray(PAYLOAD_BYTES))
        for position, block in enumerate(chain):
            assert cache.load(pinned, position, target)
            assert target == payload_of(block)
    daemons.wait_unused()


def test_a_cache_that_is_closed_gives_no_slot_away_that_it_still_writes(
    cache, daemons, monkeypatch, caplog
):
    monkeypatch.setattr(cache_api, "CLOSE_S", 0.01)
    writing, go_on = threading.Event(), threading.Event()

    def write(payload):
        writing.set()
        go_on.wait(60)
        payload[:] = bytes(len(payload))

    chain = fresh_chain(5)
    with ThreadPoolExecutor() as threads:
        saving = threads.submit(cache.save, b"", [(fresh_chain(1)[0], write)])
        assert writing.wait(60)
        cache.close()
        other = cache_at(daemons.ask("a", lambda node: node.settings.socket_path))
        other.welcome(WAIT_S)
        assert other.save(b"", writes_of(chain)) == [True] * 5
        go_on.set()
        saving.result(WAIT_S)

    assert "still writes" in caplog.text
    assert loaded(other, chain) == [payload_of(block) for block in chain]
    other.close()


def reserved_slots(daemons):
    return daemons.ask("a", lambda node: pool_of(node).host.pool.counts().reserved)


def test_a_write_that_raises_holds_no_slot_and_what_it_raised_comes_out(cache, daemons):
    chain = fresh_chain(4)

    def fails(payload):
        raise ZeroDivisionError("the engine's tensor is gone")

    with pytest.raises(ZeroDivisionError, match="gone"):
        cache.save(b"", [*writes_of(chain[:2]), (chain[2], fails), *writes_of(chain[3:])])

    assert (reserved_slots(daemons), cache.match(chain)) == (0, 0)
    assert cache.save(b"", writes_of(chain)) == [True] * 4
    assert loaded(cache, chain) == [payload_of(block) for block in chain]


def test_a_save_whose_slots_cannot_be_sealed_holds_none(cache, daemons, monkeypatch):
    chain = fresh_chain(3)

    def gone(written):
        raise EpochChanged("the node daemon was replaced since the slots were reserved")

    with monkeypatch.context() as patched:
        patched.setattr(cache._pool, "commit", gone)
        assert cache.save(b"", writes_of(chain)) == [False] * 3

    assert reserved_slots(daemons) == 0
    assert cache.save(b"", writes_of(chain)) == [True] * 3


def test_a_plan_brings_a_peers_blocks(cache, daemons):
    other = cache_at(daemons.start("b"))
    other.welcome(WAIT_S)
    chain = fresh_chain(6)
    other.save(b"", writes_of(chain))
    epoch = daemons.ask("b", lambda node: node.epoch)
    plan = PullPlan(request="p", source="b", source_epoch=epoch, blocks=6, budget_s=WAIT_S)

    assert loaded(cache, chain, plan, WAIT_S) == [payload_of(block) for block in chain]
    other.close()


def test_a_damaged_block_is_a_miss_and_leaves(cache, daemons):
    chain = fresh_chain(3)
    cache.save(b"", writes_of(chain))
    daemons.ask("a", lambda node: spoil(node, chain[1]))

    assert loaded(cache, chain) == [payload_of(chain[0])]
    assert cache.match(chain) == 1


def spoil(node, block):
    host = pool_of(node).host
    with host.pool.pin([block]) as pin:
        (slot,) = pin.slots
        host.segment.view[slot * host.kind.layout.slot_bytes + 100] ^= 1


def test_without_a_daemon_everything_is_a_miss_and_it_heals(cache, daemons):
    chain = fresh_chain(2)
    cache.save(b"", writes_of(chain))
    first, _ = cache.events()
    daemons.stop()

    assert cache.match(chain) == 0
    assert cache.save(b"", writes_of(chain)) == [False, False]
    daemons.start()
    for _ in range(200):
        if cache.events()[0] not in (0, first):
            break
        threading.Event().wait(0.05)
    cache.save(b"", writes_of(chain))

    assert cache.events()[0] > first


def test_a_block_of_two_ranks_is_there_when_both_have_saved_it(daemons):
    socket = daemons.start()
    ranks = [cache_at(socket, shards=2, rank=rank) for rank in range(2)]
    for rank in ranks:
        rank.welcome(WAIT_S)
    chain = fresh_chain(2)

    ranks[0].save(b"", writes_of(chain))
    assert ranks[0].match(chain) == 0
    ranks[1].save(b"", writes_of(chain))

    assert ranks[1].match(chain) == 2
    for rank in ranks:
        rank.close()


def test_many_threads_may_call(cache):
    chains = [fresh_chain(3) for _ in range(8)]
    for chain in chains:
        cache.save(b"", writes_of(chain))

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda chain: loaded(cache, chain), chains))

    assert found == [[payload_of(block) for block in chain] for chain in chains]


def test_blocks_of_another_model_are_never_found(cache, daemons):
    """Not even where somebody names the same block."""
    socket = daemons.ask("a", lambda node: node.settings.socket_path)
    other = cache_at(socket, namespace=asdict(NAMESPACE) | {"weights": "others"})
    chain = fresh_chain(3)

    assert other.welcome(WAIT_S).pool_path == cache.welcome(WAIT_S).pool_path
    assert cache.save(b"", writes_of(chain)) == [True] * 3

    assert other.match(chain) == 0
    assert cache.match(chain) == 3
    other.close()
