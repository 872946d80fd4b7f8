"""Serving and pulling with real pools and real bytes, over every link."""

import asyncio

import pytest
from eventually import until
from links import KINDS, NETWORK_KINDS
from pulls import EPOCH, LAYOUT, PoolNode, PullRig, chain, pull_source

from prefixfleet.store.slot import SlotLayout
from prefixfleet.transfer import wire
from prefixfleet.transfer.flow import Flow
from prefixfleet.transfer.gather import MISSING
from prefixfleet.transfer.inproc import Faults
from prefixfleet.transfer.messages import Leased
from prefixfleet.transfer.peers import MAX_PER_PEER
from prefixfleet.transfer.pull import POOL_FULL, Puller

CHAIN = chain(40)


@pytest.fixture(params=KINDS)
async def rig(request):
    async with PullRig.of(request.param) as rig:
        yield rig


@pytest.fixture
async def inproc():
    async with PullRig.of("inproc") as rig:
        yield rig


@pytest.fixture
def source():
    node = PoolNode("source")
    node.fill(CHAIN)
    return node


async def test_a_pull_brings_the_whole_chain_byte_for_byte(rig, source):
    contacts = await rig.serve(source)

    result = await rig.pull(contacts, CHAIN)

    assert (result.blocks, result.failure, result.link) == (40, "", rig.link.name)
    assert result.bytes == 40 * LAYOUT.slot_bytes
    assert rig.target.holds(CHAIN) == 40


async def test_what_a_source_reads_from_disk_is_not_learned_as_time_of_the_link(rig):
    async def bring(hashes, within_s):
        source.now_s += 100.0

    source = PoolNode("source", bring=bring)
    source.fill(CHAIN)

    result = await rig.pull(await rig.serve(source), CHAIN)

    assert result.blocks == 40
    speed = rig.puller.paths.estimates.speed("source", rig.link.name)
    assert (speed.pulls, speed.setup_s) == (1, 0.0)


@pytest.mark.parametrize("count", [1, 8])
async def test_a_few_small_blocks_come_with_the_answer(rig, source, count):
    contacts = await rig.serve(source)

    result = await rig.pull(contacts, CHAIN[:count])

    assert (result.blocks, result.failure, result.link) == (count, "", rig.link.name)
    assert rig.target.holds(CHAIN) == count
    assert source.server.counters == {"sent_along": 1}


async def test_a_small_pull_takes_what_is_missing_only(rig, source):
    rig.target.fill(CHAIN[:3])
    contacts = await rig.serve(source)

    result = await rig.pull(contacts, CHAIN[:8])

    assert (result.blocks, result.bytes) == (8, 5 * LAYOUT.slot_bytes)
    assert rig.target.holds(CHAIN) == 8


async def test_a_spoiled_block_of_a_small_pull_ends_it_and_is_dropped_at_its_source(rig, source):
    contacts = await rig.serve(source)
    with source.pool.pin(CHAIN[:5]) as pin:
        LAYOUT.payload(source.slot(pin.slots[4]))[5] ^= 1

    result = await rig.pull(contacts, CHAIN[:8])

    assert (result.blocks, result.failure) == (4, "corrupt")
    assert rig.target.holds(CHAIN) == 4
    await until(lambda: source.corrupt == [CHAIN[4]])


async def test_small_pulls_one_after_the_other_keep_one_connection(rig, source):
    contacts = await rig.serve(source)
    for _ in range(5):
        assert (await rig.pull(contacts, CHAIN[:2])).blocks == 2
        rig.target.evict(2)

    assert rig.puller._peers.idle == 1


class Liar:
    """A source that answers something else than it was asked for."""

    def __init__(self, server, answer):
        self._server, self._answer = server, answer

    def __getattr__(self, name):
        return getattr(self._server, name)

    async def answer(self, caller, question):
        return wire.pack(self._answer)


async def test_slots_that_came_along_and_are_not_whole_are_a_miss(rig, source):
    along = bytes(2 * LAYOUT.slot_bytes - 1)
    source.server = Liar(source.server, Leased(0, [0, 1], 0.0, 0, along))

    result = await rig.pull(await rig.serve(source), CHAIN[:2])

    assert (result.blocks, result.failure) == (0, "protocol")
    assert rig.target.holds(CHAIN) == 0


@pytest.mark.parametrize("slot", [2**20, 2**31, 2**60])
async def test_slots_that_no_pool_has_are_a_miss(rig, source, slot):
    source.server = Liar(source.server, Leased(1, [slot], 10.0))

    result = await rig.pull(await rig.serve(source), CHAIN)

    assert (result.blocks, result.failure) == (0, "protocol")


async def test_a_pull_goes_on_behind_what_is_here(rig, source):
    rig.target.fill(CHAIN[:10])
    contacts = await rig.serve(source)

    result = await rig.pull(contacts, CHAIN[10:], parent=CHAIN[9])

    assert result.blocks == 30
    assert rig.target.holds(CHAIN) == 40


async def test_blocks_that_are_here_already_count_but_do_not_travel(rig, source):
    rig.target.fill(CHAIN[:10])
    contacts = await rig.serve(source)

    result = await rig.pull(contacts, CHAIN)

    assert (result.blocks, result.bytes) == (40, 30 * LAYOUT.slot_bytes)


async def test_a_source_that_lacks_blocks_gives_the_leading_ones(rig, source):
    source.evict(15)
    contacts = await rig.serve(source)

    result = await rig.pull(contacts, CHAIN)

    assert (result.blocks, result.failure) == (25, MISSING)
    assert rig.target.holds(CHAIN) == 25


async def test_a_source_that_has_nothing_is_a_miss(rig):
    contacts = await rig.serve(PoolNode("source"))

    result = await rig.pull(contacts, CHAIN)

    assert (result.blocks, result.failure) == (0, MISSING)


async def test_a_pool_without_room_takes_the_leading_blocks():
    async with PullRig.of("tcp", slots=25) as rig:
        source = PoolNode("source")
        source.fill(CHAIN)

        result = await rig.pull(await rig.serve(source), CHAIN)

        assert (result.blocks, result.failure) == (25, POOL_FULL)
        assert rig.target.holds(CHAIN) == 25


async def test_a_block_that_somebody_else_writes_ends_the_pull_before_it(inproc, source):
    contacts = await inproc.serve(source)
    with inproc.target.pool.reserve(b"", CHAIN[:5]):
        result = await inproc.pull(contacts, CHAIN)

    assert (result.blocks, result.failure) == (0, POOL_FULL)


async def test_another_life_of_the_source_is_not_read(rig, source):
    contacts = await rig.serve(source)

    result = await rig.pull(contacts, CHAIN, epoch=EPOCH - 1)

    assert (result.blocks, result.failure) == (0, "epoch")


async def test_a_source_of_another_namespace_is_not_read(rig, source):
    contacts = await rig.serve(source)

    result = await rig.pull(contacts, CHAIN, namespace=b"m" * 16)

    assert (result.blocks, result.failure) == (0, "refused")


@pytest.mark.parametrize(
    "layout",
    [SlotLayout(payload_bytes=8001, shards=2), SlotLayout(payload_bytes=4000, shards=4)],
    ids=["another size", "another tensor-parallel degree"],
)
async def test_a_source_with_other_slots_is_not_read(rig, layout):
    source = PoolNode("source", layout=layout)
    source.fill(CHAIN[:3])

    result = await rig.pull(await rig.serve(source), CHAIN)

    assert (result.blocks, result.failure) == (0, "layout")


async def test_a_refused_pull_does_not_cost_the_connection(inproc, source):
    contacts = await inproc.serve(source)
    await inproc.pull(contacts, CHAIN, epoch=EPOCH - 1)
    inproc.rig.network.listeners.clear()  # nobody could connect anew

    result = await inproc.pull(contacts, CHAIN)

    assert result.blocks == 40


async def test_what_is_being_read_is_not_evicted(inproc, source):
    contacts = await inproc.serve(source)
    held, go = hold_long_reads(inproc.link, 0)
    pulling = asyncio.create_task(inproc.pull(contacts, CHAIN))
    await until(lambda: held)

    source.evict(64)

    go.set()
    assert (await pulling).blocks == 40
    assert source.holds(CHAIN) == 40


async def test_a_lease_is_released_when_the_pull_is_over(rig, source):
    contacts = await rig.serve(source)
    await rig.pull(contacts, CHAIN)

    await until(lambda: not source.server.leases.slots)

    source.evict(64)
    assert source.holds(CHAIN) == 0


async def test_a_corrupt_block_ends_the_prefix_and_its_owner_is_told(rig, source):
    contacts = await rig.serve(source)
    with source.pool.pin(CHAIN) as pin:
        spoiled = source.slot(pin.slots[20])
    LAYOUT.payload(spoiled, 1)[17] ^= 1

    result = await rig.pull(contacts, CHAIN)

    assert (result.blocks, result.failure) == (20, "corrupt")
    assert rig.target.holds(CHAIN) == 20
    await until(lambda: source.corrupt)
    assert source.corrupt == [CHAIN[20]]


async def test_a_byte_that_changes_on_the_way_is_never_served(inproc, source):
    contacts = await inproc.serve(source)
    inproc.rig.network.faults = Faults(corrupt_share=1.0)

    result = await inproc.pull(contacts, CHAIN)

    assert result.failure == "corrupt"
    assert inproc.target.holds(CHAIN) == result.blocks < 40
    assert source.corrupt == []  # the owner looked, and its own bytes are fine


async def test_a_connection_cut_in_the_middle_keeps_what_was_proved(source):
    async with PullRig.of("inproc", slots=64) as rig:
        contacts = await rig.serve(source)
        rig.rig.network.faults = Faults(cut_after_bytes=600_000)

        result = await rig.pull(contacts, CHAIN)

        assert result.failure == "peer_lost"
        assert rig.target.holds(CHAIN) == result.blocks < 40


async def test_a_frozen_source_ends_the_pull_at_its_deadline(inproc, source):
    contacts = await inproc.serve(source)
    inproc.rig.network.faults = Faults(frozen=True)

    result = await inproc.pull(contacts, CHAIN, seconds=0.05)

    assert (result.blocks, result.failure) == (0, "deadline")


async def test_a_slow_source_ends_the_pull_at_its_deadline(inproc, source):
    contacts = await inproc.serve(source)
    inproc.rig.network.faults = Faults(bytes_per_s=1_000_000.0)

    result = await inproc.pull(contacts, CHAIN, seconds=0.1)

    assert result.failure == "deadline"
    assert inproc.target.holds(CHAIN) == result.blocks < 40


async def test_slots_of_an_unfinished_read_wait_until_the_connection_is_gone(inproc, source):
    contacts = await inproc.serve(source)
    await inproc.pull(contacts, CHAIN[:1])
    inproc.rig.network.faults = Faults(bytes_per_s=1.0)

    result = await inproc.pull(contacts, CHAIN[1:], parent=CHAIN[0], seconds=0.02)

    assert result.failure == "deadline"
    counts = inproc.target.pool.counts()
    assert counts.reserved == 0
    assert counts.quarantined in (0, 39)  # 0 once the connection is closed
    await inproc.puller.close()
    assert inproc.target.pool.counts().free == 63


async def test_a_cancelled_pull_gives_everything_back(inproc, source):
    contacts = await inproc.serve(source)
    inproc.rig.network.faults = Faults(bytes_per_s=1.0)
    pulling = asyncio.create_task(inproc.pull(contacts, CHAIN))
    await until(lambda: inproc.target.pool.counts().reserved)

    pulling.cancel()
    await asyncio.gather(pulling, return_exceptions=True)

    await inproc.puller.close()
    assert inproc.target.pool.counts().free == 64
    assert source.server.leases.slots == 0


async def test_a_stale_connection_is_replaced_once(inproc, source):
    contacts = await inproc.serve(source)
    await inproc.pull(contacts, CHAIN[:5])
    for listener in list(inproc.rig.network.listeners.values()):
        for peer in list(listener.peers):
            await peer.close()
            peer.broken = False  # the source dropped it while it was idle; we have not noticed

    result = await inproc.pull(contacts, CHAIN)

    assert result.blocks == 40


async def test_no_link_in_common_is_a_refused_pull(inproc):
    result = await inproc.pull({"pigeon": "pigeon://loft"}, CHAIN)

    assert (result.blocks, result.failure, result.link) == (0, "refused", "")


async def test_a_source_that_serves_enough_is_busy():
    async with PullRig.of("inproc") as rig:
        source = PoolNode("source", slots=64)
        source.fill(CHAIN[:33])
        source.fill(chain(20, "else"))
        contacts = await rig.serve(source)
        held, go = hold_long_reads(rig.link, 0)
        first = asyncio.create_task(rig.pull(contacts, CHAIN))
        await until(lambda: held)

        other = PoolNode("other")
        puller = Puller(other.pool, other.segment, LAYOUT, links={"inproc": rig.rig.link("other")})
        busy = await PullRig(rig.rig, puller, other, rig.link).pull(contacts, chain(20, "else"))

        assert (busy.blocks, busy.failure) == (0, "busy")
        go.set()
        assert (await first).blocks == 33
        await puller.close()


async def test_pulls_at_once_from_one_source_do_not_mix(rig, source):
    others = chain(20, "other")
    source.fill(others)
    contacts = await rig.serve(source)

    results = await asyncio.gather(rig.pull(contacts, CHAIN), rig.pull(contacts, others))

    assert [result.blocks for result in results] == [40, 20]
    assert rig.target.holds(CHAIN) == 40
    assert rig.target.holds(others) == 20


async def test_what_was_measured_shows_by_peer_and_link(rig, source):
    contacts = await rig.serve(source)

    await rig.pull(contacts, CHAIN)

    speed = rig.puller.paths.estimates.as_dict()["source"][rig.link.name]
    assert speed["bytes_per_s"] > 0
    assert speed["setup_s"] > 0
    assert rig.puller.counters == {"ok": 1}
    assert rig.puller.paths.lanes[rig.link.name].startswith(rig.link.name)


# Several sources


async def serve_two(rig, first_blocks=40):
    """Contacts of two sources; the first has the leading blocks only."""
    contacts = []
    for name, count in (("one", first_blocks), ("two", 40)):
        node = PoolNode(name)
        node.fill(CHAIN[:count])
        contacts.append(await rig.serve(node))
    return contacts


async def test_what_one_source_lacks_comes_from_another(rig):
    one, two = await serve_two(rig, first_blocks=13)

    result = await rig.pull(one, CHAIN, others=[two])

    assert (result.blocks, result.failure) == (40, "")
    assert rig.target.holds(CHAIN) == 40


async def test_a_source_that_nobody_reaches_is_replaced(rig):
    one, two = await serve_two(rig)
    name = rig.link.name
    nowhere = {name: one[name].rpartition(":")[0] + ":1"}

    result = await rig.pull(nowhere, CHAIN, others=[two])

    assert (result.blocks, result.failure) == (40, "")
    assert rig.puller.paths.failed == {"peer_lost": 1}


async def test_a_source_of_another_epoch_is_replaced(rig):
    one, two = await serve_two(rig)

    result = await rig.pull(one, CHAIN, epoch=EPOCH - 1, others=[two])

    assert (result.blocks, result.failure) == (40, "")
    assert rig.puller.paths.failed == {"epoch": 1}


async def test_a_spoiled_block_comes_from_another_source(rig):
    spoiled, fine = PoolNode("spoiled"), PoolNode("fine")
    for node in (spoiled, fine):
        node.fill(CHAIN)
    with spoiled.pool.pin(CHAIN) as pin:
        LAYOUT.payload(spoiled.slot(pin.slots[20]), 1)[17] ^= 1
    contacts = await rig.serve(spoiled)

    result = await rig.pull(contacts, CHAIN, others=[await rig.serve(fine)])

    assert (result.blocks, result.failure) == (40, "")
    assert rig.target.holds(CHAIN) == 40
    await until(lambda: spoiled.corrupt)
    assert (spoiled.corrupt, fine.corrupt) == ([CHAIN[20]], [])


async def test_a_source_lost_in_the_middle_is_replaced_for_the_rest(monkeypatch):
    monkeypatch.setattr("prefixfleet.transfer.pull.PORTION_BYTES", 5 * LAYOUT.slot_bytes)
    async with PullRig.of("inproc") as rig:
        one, two = await serve_two(rig)
        rig.rig.network.faults = Faults(cut_after_bytes=25 * LAYOUT.slot_bytes)

        result = await rig.pull(one, CHAIN, others=[two])

        assert (result.blocks, result.failure) == (40, "")
        assert rig.puller.paths.failed == {"peer_lost": 1}
        assert rig.target.holds(CHAIN) == 40


async def test_a_long_pull_is_shared_by_its_sources(monkeypatch):
    monkeypatch.setattr("prefixfleet.transfer.pull.PORTION_BYTES", 2 * LAYOUT.slot_bytes)
    monkeypatch.setattr("prefixfleet.transfer.pull.MULTI_BYTES", LAYOUT.slot_bytes)
    async with PullRig.of("inproc") as rig:
        one, two = await serve_two(rig)
        rig.rig.network.faults = Faults(bytes_per_s=5_000_000.0)

        result = await rig.pull(one, CHAIN, others=[two])

        assert (result.blocks, result.failure) == (40, "")
        assert rig.target.holds(CHAIN) == 40
        # the source that was not needed for the last blocks may end after the pull
        await until(lambda: set(rig.puller.paths.estimates.as_dict()) == {"one", "two"})


async def test_others_are_not_looked_for_while_one_source_is_enough(rig):
    one, two = await serve_two(rig)

    await rig.pull(one, CHAIN, others=[two])

    assert rig.asked_others == 0


async def test_when_every_source_fails_the_reason_is_that_of_the_last(inproc):
    one, two = await serve_two(inproc)
    inproc.rig.network.faults = Faults(cut_after_bytes=0)

    result = await inproc.pull(one, CHAIN, others=[two])

    assert (result.blocks, result.failure) == (0, "peer_lost")
    assert inproc.puller.paths.failed == {"peer_lost": 2}


async def test_a_short_pull_overtakes_a_long_one(monkeypatch):
    """A request waits for the short one; the long one has had its share."""
    monkeypatch.setattr("prefixfleet.transfer.pull.PORTION_BYTES", LAYOUT.slot_bytes)
    flow = Flow(max_bytes=LAYOUT.slot_bytes, max_peer_bytes=LAYOUT.slot_bytes)
    async with PullRig.of("inproc", flow=flow) as rig:
        source = PoolNode("source")
        source.fill(CHAIN)
        source.fill(chain(2, "short"))
        contacts = await rig.serve(source)
        rig.rig.network.faults = Faults(bytes_per_s=20_000_000.0)
        long = asyncio.create_task(rig.pull(contacts, CHAIN))
        await until(lambda: rig.target.pool.match(CHAIN) > 2)

        short = await rig.pull(contacts, chain(2, "short"))

        assert short.blocks == 2
        assert not long.done()
        assert (await long).blocks == 40


def hold_long_reads(link, longest_bytes):
    """Reads of more bytes wait for the event; the list has one entry for each of them."""
    held, go, connect = [], asyncio.Event(), link.connect

    async def connect_held(contact, *, deadline):
        peer = await connect(contact, deadline=deadline)
        read = peer.read

        async def read_held(ranges, targets, **options):
            if sum(part.length for part in ranges) > longest_bytes:
                held.append(ranges)
                await go.wait()
            await read(ranges, targets, **options)

        peer.read = read_held
        return peer

    link.connect = connect_held
    return held, go


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("longs", [2, MAX_PER_PEER])
async def test_long_pulls_from_one_source_leave_room_for_a_short_one(kind, longs, monkeypatch):
    """However many they are: they fill the bytes, or the places, that pulls from a source have."""
    monkeypatch.setattr("prefixfleet.transfer.pull.PORTION_BYTES", 16 * LAYOUT.slot_bytes)
    monkeypatch.setattr("prefixfleet.transfer.source.ALONG_BYTES", 0)
    flow = Flow(max_bytes=128 * LAYOUT.slot_bytes, max_peer_bytes=64 * LAYOUT.slot_bytes)
    async with PullRig.of(kind, slots=520, flow=flow) as rig:
        source = PoolNode("source", slots=520, max_leased_slots=520)
        chains, short = [chain(64, f"long-{i}") for i in range(longs)], chain(4, "short")
        for hashes in (*chains, short):
            source.fill(hashes)
        contacts = await rig.serve(source)
        held, go = hold_long_reads(rig.link, 4 * LAYOUT.slot_bytes)
        pulls = [asyncio.create_task(rig.pull(contacts, hashes, seconds=60)) for hashes in chains]
        await until(lambda: len(held) == 4 and len(source.server.leases) == longs)

        assert (await rig.pull(contacts, short, seconds=10)).blocks == 4

        assert len(held) == 4  # the bounds hold: no long one went on
        go.set()
        assert [(await pull).blocks for pull in pulls] == [64] * longs


@pytest.mark.parametrize("kind", NETWORK_KINDS)
async def test_a_source_killed_in_the_middle_of_a_pull_is_a_shorter_prefix(kind):
    hashes = chain(2000)
    async with pull_source(kind, 2000) as source, PullRig.of(kind, slots=2000) as rig:
        await rig.pull(source.told["contacts"], hashes[:10])
        source.freeze()  # the pull is under way when the process dies
        pulling = asyncio.create_task(
            rig.pull(source.told["contacts"], hashes[10:], parent=hashes[9])
        )
        await asyncio.sleep(0)

        await source.kill()

        result = await pulling
        assert result.failure == "peer_lost"
        assert rig.target.holds(hashes) == 10 + result.blocks
