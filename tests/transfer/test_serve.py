"""Read leases: whom they let read what, that they always end, and that they are bounded."""

import pytest
from pulls import EPOCH, LAYOUT, NAMESPACE, PoolNode, chain

from prefixfleet.store.errors import LeaseExpired, PeerBusy, PeerRefused, ProtocolError
from prefixfleet.transfer import wire
from prefixfleet.transfer.link import Caller, Range
from prefixfleet.transfer.messages import Lease, Release, Released, decode_answer, join_hashes
from prefixfleet.transfer.serve import GRACE_S, MAX_LEASE_S, BlockServer

CHAIN = chain(10)
A, B = Caller(1, "a"), Caller(2, "b")
SLOT = LAYOUT.slot_bytes


@pytest.fixture
def node():
    node = PoolNode("source", slots=24)
    node.fill(CHAIN)
    return node


async def lease(node, caller, hashes=CHAIN, budget_s=5.0, server=None, along_bytes=0):
    question = Lease(
        namespace=NAMESPACE,
        epoch=EPOCH,
        payload_bytes=LAYOUT.payload_bytes,
        shards=LAYOUT.shards,
        hashes=join_hashes(hashes),
        budget_s=budget_s,
        along_bytes=along_bytes,
    )
    answer = await (server or node.server).answer(caller, wire.pack(question))
    return decode_answer(answer, "source")


async def release(node, caller, number, spoiled=b""):
    answer = await node.server.answer(caller, wire.pack(Release(number, spoiled)))
    return decode_answer(answer, "source")


def granted(node, caller):
    """Slots that the caller may read now."""
    return [i for i in range(24) if node.server.grants(caller, Range(i * SLOT, SLOT))]


async def test_a_lease_grants_its_own_slots_to_its_own_caller_only(node):
    leased = await lease(node, A, CHAIN[:4])

    assert granted(node, A) == sorted(leased.slots)
    assert granted(node, B) == []


async def test_a_range_is_granted_only_if_every_slot_of_it_is(node):
    leased = await lease(node, A, CHAIN[:2])
    first, second = sorted(leased.slots)
    assert second == first + 1

    assert node.server.grants(A, Range(first * SLOT, 2 * SLOT))
    assert node.server.grants(A, Range(first * SLOT + 7, 1))
    assert not node.server.grants(A, Range(first * SLOT, 2 * SLOT + 1))


async def test_a_lease_ends_after_its_time_and_a_grace(node, clock):
    await lease(node, A, budget_s=2.0)

    node.now_s += 2.0 + GRACE_S - 0.01
    assert granted(node, A) != []
    node.now_s += 0.02

    assert granted(node, A) == []
    node.evict(24)
    assert node.holds(CHAIN) == 0


async def test_no_budget_makes_a_lease_last_for_ever(node):
    leased = await lease(node, A, budget_s=3600.0)

    assert leased.seconds == MAX_LEASE_S + GRACE_S


async def test_a_lease_keeps_blocks_from_being_evicted_until_it_is_released(node):
    leased = await lease(node, A, CHAIN[:6])
    node.evict(24)
    assert node.holds(CHAIN) == 6

    assert await release(node, A, leased.lease) == Released()

    assert granted(node, A) == []
    node.evict(24)
    assert node.holds(CHAIN) == 0


async def test_two_leases_on_one_block_end_one_by_one(node):
    first = await lease(node, A)
    second = await lease(node, A, CHAIN[:5])

    await release(node, A, first.lease)
    assert granted(node, A) == sorted(second.slots)
    await release(node, A, second.lease)

    assert granted(node, A) == []


async def test_nobody_releases_the_lease_of_another(node):
    leased = await lease(node, A)

    with pytest.raises(LeaseExpired):
        await release(node, B, leased.lease)

    assert granted(node, A) == sorted(leased.slots)


async def test_a_release_that_comes_too_late_is_told_so(node):
    leased = await lease(node, A, budget_s=1.0)
    node.now_s += 10

    with pytest.raises(LeaseExpired):
        await release(node, A, leased.lease)


async def test_leases_end_with_their_callers_connection(node):
    await lease(node, A)
    await lease(node, B, CHAIN[:1])

    node.server.disconnected(A)

    assert granted(node, A) == []
    assert len(granted(node, B)) == 1


async def test_nothing_stays_pinned_when_the_server_closes(node):
    await lease(node, A)

    node.server.close()

    node.evict(24)
    assert node.holds(CHAIN) == 0


async def test_blocks_that_are_not_here_end_the_lease_before_them(node):
    unknown = chain(3, "unknown")

    leased = await lease(node, A, [*CHAIN[:2], *unknown])
    nothing = await lease(node, A, unknown)

    assert len(leased.slots) == 2
    assert (nothing.lease, nothing.slots) == (0, [])


async def test_a_second_lease_over_the_bound_is_refused_as_busy(node):
    node.fill(chain(3, "other"))
    server = BlockServer(
        node.pool,
        node.segment,
        LAYOUT,
        namespace=NAMESPACE,
        node="source",
        epoch=EPOCH,
        clock=lambda: node.now_s,
        max_leased_slots=10,
    )
    await lease(node, A, server=server)

    with pytest.raises(PeerBusy):
        await lease(node, B, chain(3, "other"), server=server)

    assert server.counters == {"leased": 1, "busy": 1}
    assert len((await lease(node, B, CHAIN[:5], server=server)).slots) == 5  # kept anyway


async def test_more_leases_than_the_bound_are_refused_as_busy(node):
    server = BlockServer(
        node.pool,
        node.segment,
        LAYOUT,
        namespace=NAMESPACE,
        node="source",
        epoch=EPOCH,
        clock=lambda: node.now_s,
        max_leases=2,
    )
    await lease(node, A, CHAIN[:1], server=server)
    await lease(node, A, CHAIN[:1], server=server)

    with pytest.raises(PeerBusy):
        await lease(node, A, CHAIN[:1], server=server)


async def test_how_much_others_read_is_told_to_who_asks(node):
    await lease(node, A, CHAIN[:4])

    assert (await lease(node, B)).queued_bytes == 4 * SLOT


async def test_an_owner_looks_at_a_block_that_is_said_to_be_spoiled(node):
    leased = await lease(node, A)
    LAYOUT.payload(node.slot(leased.slots[3]))[5] ^= 1

    await release(node, A, leased.lease, spoiled=CHAIN[3])
    await lease(node, A)
    assert node.corrupt == [CHAIN[3]]


async def test_an_owner_does_not_drop_a_block_because_somebody_says_so(node):
    leased = await lease(node, A)

    await release(node, A, leased.lease, spoiled=CHAIN[3])

    assert node.corrupt == []


async def test_a_new_epoch_refuses_questions_for_the_old_one_and_keeps_leases(node):
    leased = await lease(node, A)

    node.server.epoch = EPOCH + 1

    with pytest.raises(Exception, match=f"epoch {EPOCH}"):
        await lease(node, A)
    assert granted(node, A) == sorted(leased.slots)


async def test_few_bytes_come_with_the_answer_and_nothing_is_leased(node):
    leased = await lease(node, A, CHAIN[:3], along_bytes=3 * SLOT)

    assert leased.along == b"".join(node.slot(slot) for slot in leased.slots)
    assert (leased.lease, len(node.server.leases), granted(node, A)) == (0, 0, [])
    assert node.pool.choose_victims(24) != []  # nothing is pinned any more


async def test_more_bytes_than_were_asked_for_are_leased(node):
    leased = await lease(node, A, CHAIN[:3], along_bytes=3 * SLOT - 1)

    assert leased.along == b""
    assert granted(node, A) == sorted(leased.slots)


async def test_a_spoiled_block_that_came_along_is_looked_at_without_a_lease(node):
    with node.pool.pin(CHAIN[:1]) as pin:
        LAYOUT.payload(node.slot(pin.slots[0]))[5] ^= 1

    await release(node, A, 0, spoiled=CHAIN[0])

    assert node.corrupt == [CHAIN[0]]


async def test_a_question_that_is_no_question_is_a_protocol_error(node):
    with pytest.raises(ProtocolError):
        await node.server.answer(A, b"\xc1")


async def test_a_namespace_that_differs_says_so(node):
    question = Lease(
        namespace=b"x" * 16,
        epoch=EPOCH,
        payload_bytes=LAYOUT.payload_bytes,
        shards=LAYOUT.shards,
        hashes=b"",
        budget_s=1.0,
    )

    with pytest.raises(PeerRefused, match="namespace"):
        decode_answer(await node.server.answer(A, wire.pack(question)), "source")
