"""Pools of several namespaces behind one listener: each question reaches the pool it is about."""

import itertools
from dataclasses import dataclass

import pytest

from prefixfleet.store.errors import LeaseExpired, PeerRefused
from prefixfleet.store.eviction import LruOrder
from prefixfleet.store.pool import SlotPool
from prefixfleet.store.slot import SlotLayout, seal
from prefixfleet.transfer import wire
from prefixfleet.transfer.link import Caller, Range
from prefixfleet.transfer.messages import Lease, Release, Released, decode_answer, join_hashes
from prefixfleet.transfer.serve import BlockServer
from prefixfleet.transfer.serve_several import Servers

A, B = Caller(1, "a"), Caller(2, "b")
PAGE = 4096
PAGES = 24
"""The first half is the small one's, the second one the large one's."""


@dataclass
class Kind:
    namespace: bytes
    layout: SlotLayout
    pool: SlotPool
    server: BlockServer
    spoiled: list[bytes]

    @property
    def chain(self):
        return [self.namespace[:15] + bytes([i]) for i in range(3)]


@pytest.fixture
def segment():
    return memoryview(bytearray(PAGES * PAGE))


@pytest.fixture
def kinds(segment, clock):
    ids = itertools.count(1)
    made = []
    for name, pages, slots in ((b"s", 1, range(12)), (b"l", 3, range(4, 8))):
        layout = SlotLayout(payload_bytes=pages * PAGE - 100)
        pool = SlotPool(PAGES // pages, LruOrder(), clock, absent=True)
        pool.grow(slots)
        spoiled: list[bytes] = []
        server = BlockServer(
            pool, segment, layout,
            namespace=name * 16, node="source", epoch=7, clock=clock, ids=ids,
            on_corrupt=spoiled.append,
        )  # fmt: skip
        kind = Kind(name * 16, layout, pool, server, spoiled)
        with pool.reserve(b"", kind.chain) as reservation:
            for block, slot in zip(kind.chain, reservation.slots, strict=True):
                memory = segment[slot * layout.slot_bytes : (slot + 1) * layout.slot_bytes]
                seal(memory, layout, kind.namespace, block)
                assert reservation.commit(block)
        made.append(kind)
    return made


@pytest.fixture
def servers(kinds):
    servers = Servers()
    for kind in kinds:
        servers.add(kind.server)
    return servers


async def ask(servers, caller, question):
    return decode_answer(await servers.answer(caller, wire.pack(question)), "source")


async def lease(servers, caller, kind, namespace=None):
    return await ask(
        servers,
        caller,
        Lease(
            namespace=namespace or kind.namespace,
            epoch=7,
            payload_bytes=kind.layout.payload_bytes,
            shards=1,
            hashes=join_hashes(kind.chain),
            budget_s=5.0,
        ),
    )


def granted(servers, caller):
    """Pages that the caller may read."""
    return {i for i in range(PAGES) if servers.grants(caller, Range(i * PAGE, PAGE))}


async def test_a_lease_is_of_the_pool_whose_namespace_it_names(servers, kinds):
    small, large = kinds

    of_small = await lease(servers, A, small)
    assert granted(servers, A) == set(of_small.slots)

    of_large = await lease(servers, B, large)
    pages = {3 * slot + i for slot in of_large.slots for i in range(3)}
    assert granted(servers, B) == pages
    assert not pages & granted(servers, A)
    assert of_large.lease != of_small.lease


async def test_a_release_ends_the_lease_of_its_number_and_no_other(servers, kinds):
    leases = [await lease(servers, A, kind) for kind in kinds]

    assert await ask(servers, A, Release(leases[1].lease)) == Released()

    assert [len(kind.server.leases) for kind in kinds] == [1, 0]
    with pytest.raises(LeaseExpired):
        await ask(servers, A, Release(leases[1].lease))
    with pytest.raises(LeaseExpired):
        await ask(servers, B, Release(leases[0].lease))


@pytest.mark.parametrize("number", [0, 1])
async def test_a_spoiled_block_is_looked_at_where_it_lies(servers, kinds, segment, number):
    kind = kinds[number]
    block = kind.chain[1]
    with kind.pool.pin([block]) as pin:
        kind.layout.payload(segment[pin.slots[0] * kind.layout.slot_bytes :])[5] ^= 1

    await ask(servers, A, Release(0, block))

    assert kind.spoiled == [block]
    assert kinds[1 - number].spoiled == []


async def test_blocks_of_one_namespace_are_not_found_under_another(servers, kinds):
    small, large = kinds

    with pytest.raises(PeerRefused, match="namespace"):
        await lease(servers, A, small, namespace=b"x" * 16)
    answer = await ask(
        servers, A, Lease(large.namespace, 7, large.layout.payload_bytes, 1,
                          join_hashes(small.chain), 5.0),
    )  # fmt: skip
    assert answer.slots == []


async def test_a_caller_that_goes_leaves_no_lease_in_any_pool(servers, kinds):
    for kind in kinds:
        await lease(servers, A, kind)

    servers.disconnected(A)

    assert granted(servers, A) == set()
    assert [kind.pool.counts().pinned for kind in kinds] == [0, 0]


async def test_a_leased_slot_that_is_to_go_stays_until_the_lease_ends(servers, kinds):
    small, _ = kinds
    leased = await lease(servers, A, small)

    small.pool.shrink(range(12))
    small.pool.free(small.pool.expel(small.pool.standing_on(range(12))))

    assert granted(servers, A) == set(leased.slots)
    assert small.pool.capacity == 3
    await ask(servers, A, Release(leased.lease))
    small.pool.free(small.pool.expel(small.pool.standing_on(range(12))))
    assert small.pool.absent(range(12))
    assert granted(servers, A) == set()
    small.pool.check()
