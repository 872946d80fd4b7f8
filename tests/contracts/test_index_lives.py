"""Contract of the prefix index: epochs, leases, slots. Every backend passes it unchanged."""

import pytest
from indexes import chain_of, node_record, segments

from prefixfleet.store.errors import Fenced
from prefixfleet.store.index import FIELD_BYTES, Membership

CHAIN = chain_of("a", 4)
LONG = chain_of("long", 3000)


async def test_blocks_of_an_earlier_life_are_not_matched(backend, index):
    """A restarted node has other bytes at the old addresses."""
    await index.publish(await backend.join("a"), segments(CHAIN))

    await backend.join("a")

    assert await index.match(CHAIN) == {}


async def test_every_life_has_a_higher_epoch(backend):
    lives = [await backend.join(name) for name in "ababba"]

    epochs = [life.epoch for life in lives]

    assert epochs == sorted(set(epochs))


@pytest.mark.parametrize("change", ["renew", "publish", "withdraw"])
async def test_an_earlier_life_is_fenced(backend, index, change):
    old = await backend.join("a")
    new = await backend.join("a")
    await index.publish(new, segments(CHAIN))
    argument = node_record("a") if change == "renew" else segments(CHAIN)

    with pytest.raises(Fenced):
        await getattr(index, change)(old, argument)

    assert await index.match(CHAIN) == {"a": 4}
    assert [member for member, _ in await index.members()] == [new]


@pytest.mark.parametrize("wrong", ["epoch", "slot", "node", "huge"])
async def test_a_member_that_never_joined_is_fenced(backend, index, wrong):
    a = await backend.join("a")
    forged = {
        "epoch": Membership("a", a.epoch + 1, a.slot),
        "slot": Membership("a", a.epoch, a.slot + 1),
        "node": Membership("b", a.epoch, a.slot),
        "huge": Membership("a", a.epoch, 1 << 40),
    }[wrong]

    with pytest.raises(Fenced):
        await index.publish(forged, segments(CHAIN))

    assert (await index.snapshot()).holders == {}


async def test_leaving_as_an_earlier_life_does_not_end_the_new_one(backend, index):
    old = await backend.join("a")
    new = await backend.join("a")
    await index.publish(new, segments(CHAIN))

    await index.leave(old)

    assert await index.match(CHAIN) == {"a": 4}


async def test_a_node_that_leaves_matches_nothing_at_once(backend, index):
    a, b = await backend.join("a"), await backend.join("b")
    await index.publish(a, segments(CHAIN))
    await index.publish(b, segments(CHAIN, 0, 1))

    await index.leave(a)
    await index.leave(a)

    assert await index.match(CHAIN) == {"b": 2}
    assert [member for member, _ in await index.members()] == [b]


async def test_a_node_matches_nothing_once_its_lease_has_ended(backend, index):
    """And the others' blocks stay: one node's loss is one node's loss."""
    a, b = await backend.join("a", mortal=True), await backend.join("b")
    await index.publish(a, segments(CHAIN))
    await index.publish(b, segments(CHAIN, 0))

    await backend.lapse()

    assert await index.match(CHAIN) == {"b": 1}
    snapshot = await index.snapshot()
    assert snapshot.members == (b,)
    assert snapshot.holders == {CHAIN[0][:FIELD_BYTES]: 1 << b.slot}


@pytest.mark.parametrize("change", ["renew", "publish", "withdraw"])
async def test_a_node_whose_lease_has_ended_is_fenced(backend, index, change):
    """It must join again: nobody kept track of it meanwhile."""
    a = await backend.join("a", mortal=True)
    await backend.lapse()
    argument = node_record("a") if change == "renew" else segments(CHAIN)

    with pytest.raises(Fenced):
        await getattr(index, change)(a, argument)


async def test_a_node_that_joins_after_its_lease_ended_starts_empty(backend, index):
    a = await backend.join("a", mortal=True)
    await index.publish(a, segments(CHAIN))
    await backend.lapse()

    again = await backend.join("a")

    assert again.epoch > a.epoch
    assert await index.match(CHAIN) == {}
    await index.publish(again, segments(CHAIN, 0))
    assert await index.match(CHAIN) == {"a": 1}


async def test_renewing_replaces_the_record(backend, index):
    a = await backend.join("a")
    record = node_record("a", contacts={"tcp": "127.0.0.1:1"}, stats={"blocks": 7})

    await index.renew(a, record)

    assert await index.members() == [(a, record)]


async def test_members_lists_every_live_node_with_its_record(backend, index):
    joined = {name: await backend.join(name) for name in "abc"}

    listed = await index.members()

    assert {member.node: member for member, _ in listed} == joined
    assert all(record == node_record(member.node) for member, record in listed)


async def test_live_members_never_share_a_slot(backend, index):
    members = [await backend.join(f"n{i}") for i in range(10)]
    for member in members[::2]:
        await index.leave(member)
    members = members[1::2] + [await backend.join(f"m{i}") for i in range(10)]

    assert len({member.slot for member in members}) == len(members)


async def test_a_slot_is_used_again_and_holds_nothing_then(backend, index):
    """Bitmaps must not grow with every restart; old bits must not count for a new node."""
    keeper = await backend.join("keeper")
    await index.publish(keeper, segments(LONG[:500]))
    slots = []
    for number in range(12):
        life = await backend.join(f"n{number}")
        slots.append(life.slot)
        assert await index.match(LONG) == {"keeper": 500}
        await index.publish(life, segments(LONG[:600]))
        assert await index.match(LONG) == {"keeper": 500, life.node: 600}
        await index.leave(life)
        for _ in range(10):  # each renewal sweeps a little
            await index.renew(keeper, node_record("keeper"))

    assert len(set(slots)) < len(slots)
    assert await index.match(LONG) == {"keeper": 500}
