"""Contract of a link. Every kind passes this file unchanged: real sockets, real UCX, in process."""

import asyncio
import errno

import pytest
from links import KINDS, NETWORK_KINDS, Echo, Rig, link_source, read, some_bytes, soon

from prefixfleet.store.errors import (
    ConfigError,
    DeadlineExceeded,
    PeerLost,
    PeerRefused,
    ProtocolError,
    PullFailed,
)
from prefixfleet.transfer.inproc import Faults
from prefixfleet.transfer.link import MAX_MESSAGE_BYTES, Range

MiB = 1024 * 1024


@pytest.fixture(params=KINDS)
async def rig(request):
    async with Rig(request.param) as rig:
        yield rig


@pytest.fixture(params=NETWORK_KINDS)
async def network_rig(request):
    async with Rig(request.param) as rig:
        yield rig


@pytest.fixture
def segment():
    return some_bytes(8 * MiB)


@pytest.fixture
def service():
    return Echo()


# Questions


async def test_a_question_gets_the_services_answer(rig, segment, service):
    _, peer = await rig.pair(segment, service)

    assert await peer.ask(b"hello", deadline=soon()) == b"re:hello"
    assert await peer.ask(b"", deadline=soon()) == b"re:"


async def test_each_side_knows_the_proved_name_of_the_other(rig, segment, service):
    _, peer = await rig.pair(segment, service)
    await peer.ask(b"who", deadline=soon())

    assert peer.node == "a"
    assert service.asked[0][0].node == "b"


async def test_questions_and_answers_may_be_as_long_as_the_limit(rig, segment, service):
    _, peer = await rig.pair(segment, service)
    question = bytes(some_bytes(MAX_MESSAGE_BYTES))

    assert await peer.ask(question, deadline=soon()) == question


async def test_a_longer_question_is_refused_before_it_is_sent(rig, segment, service):
    _, peer = await rig.pair(segment, service)

    with pytest.raises(ProtocolError, match="bytes"):
        await peer.ask(bytes(MAX_MESSAGE_BYTES + 1), deadline=soon())

    assert service.asked == []


async def test_overlapping_questions_get_their_own_answers(rig, segment, service):
    _, peer = await rig.pair(segment, service)
    questions = [b"%d" % i for i in range(50)]

    answers = await asyncio.gather(*(peer.ask(q, deadline=soon()) for q in questions))

    assert answers == [b"re:" + q for q in questions]


async def test_a_fault_of_the_service_ends_that_connection_only(rig, segment, service):
    listener, peer = await rig.pair(segment, service)
    other = await rig.connect(rig.link("c"), listener.contact)

    with pytest.raises(PeerLost):
        await peer.ask(b"fail", deadline=soon())

    assert await other.ask(b"still there", deadline=soon()) == b"re:still there"


# Reads

RANGES = {
    "nothing": [],
    "an empty range": [Range(5, 0)],
    "one byte": [Range(8 * MiB - 1, 1)],
    "everything": [Range(0, 8 * MiB)],
    "the same twice": [Range(4096, 4096), Range(4096, 4096)],
    "odd sizes backwards": [Range(5 * MiB + 1, MiB + 7), Range(3, 65_537), Range(0, 1)],
    "many scattered": [Range((i * 7919 * 64) % (8 * MiB - 4096), 4096) for i in range(1500)],
}


@pytest.mark.parametrize("ranges", RANGES.values(), ids=RANGES)
async def test_targets_get_exactly_the_bytes_of_their_ranges(rig, segment, service, ranges):
    _, peer = await rig.pair(segment, service)

    targets = await read(peer, ranges)

    assert targets == [segment[r.offset : r.offset + r.length] for r in ranges]


async def test_targets_may_lie_anywhere_and_nothing_beside_them_is_touched(rig, segment, service):
    _, peer = await rig.pair(segment, service)
    ranges = [Range(i * 1000, 500) for i in range(100)]
    ours = memoryview(bytearray(b"\xee" * 200_000))
    offsets = [(i * 7 % 100) * 2000 + 3 for i in range(100)]

    await read(peer, ranges, [ours[start : start + 500] for start in offsets])

    for part, start in zip(ranges, offsets, strict=True):
        assert ours[start : start + 500] == segment[part.offset : part.offset + 500]
        assert ours[start - 1] == ours[start + 500] == 0xEE


async def test_who_listens_hears_only_of_bytes_that_are_in_place(rig, segment, service):
    """Where a link tells it: a count never runs ahead of the bytes, and never goes back."""
    _, peer = await rig.pair(segment, service)
    ranges = [Range(4 * MiB, 4 * MiB), Range(0, 4 * MiB)]
    ours, wanted = (
        memoryview(bytearray(8 * MiB)),
        segment[4 * MiB :].tobytes() + segment[: 4 * MiB].tobytes(),
    )
    heard = [0]

    def arrived(count):
        assert ours[heard[-1] : count] == wanted[heard[-1] : count]
        heard.append(count)

    targets = [ours[: 4 * MiB], ours[4 * MiB :]]
    await peer.read(ranges, targets, deadline=soon(), arrived=arrived)

    assert heard == sorted(set(heard))
    assert heard[-1] == (0 if rig.kind.startswith("ucx") else 8 * MiB)
    assert ours == wanted


async def test_reads_that_overlap_on_one_connection_do_not_mix(rig, segment, service):
    _, peer = await rig.pair(segment, service)
    batches = [[Range(i * MiB + j * 1000, 100_000) for j in range(5)] for i in range(7)]

    results = await asyncio.gather(*(read(peer, ranges) for ranges in batches))

    for ranges, targets in zip(batches, results, strict=True):
        assert targets == [segment[r.offset : r.offset + r.length] for r in ranges]


async def test_several_peers_read_at_once(rig, segment, service):
    listener, first = await rig.pair(segment, service)
    peers = [first, *[await rig.connect(rig.link(f"n{i}"), listener.contact) for i in range(3)]]

    results = await asyncio.gather(*(read(peer, [Range(0, 8 * MiB)]) for peer in peers))

    assert all(targets == [segment] for targets in results)


async def test_a_change_of_the_segment_is_seen_by_the_next_read(rig, segment, service):
    _, peer = await rig.pair(segment, service)
    await read(peer, [Range(0, 16)])

    segment[:16] = b"another 16 bytes"

    (after,) = await read(peer, [Range(0, 16)])
    assert bytes(after) == b"another 16 bytes"


@pytest.mark.parametrize(
    "targets",
    [[], [memoryview(bytearray(9))], [memoryview(bytes(10))]],
    ids=["too few", "too short", "read-only"],
)
async def test_targets_that_do_not_fit_are_our_own_fault(rig, segment, service, targets):
    _, peer = await rig.pair(segment, service)

    with pytest.raises(ValueError, match="read:"):
        await peer.read([Range(0, 10)], targets, deadline=soon())


async def test_a_range_outside_the_segment_is_refused(rig, segment, service):
    _, peer = await rig.pair(segment, service)

    with pytest.raises((ProtocolError, PeerRefused)):
        await read(peer, [Range(8 * MiB - 10, 11)])


async def test_a_range_that_is_not_granted_does_not_leave(rig, segment, service):
    """A one-sided read is promised by the lease alone; the source's CPU is not asked."""
    if rig.kind in ("ucx", "ucx-py"):
        pytest.skip("UCX reads one-sided: the source cannot refuse single ranges")
    _, peer = await rig.pair(segment, service)
    service.granting = False
    target = memoryview(bytearray(10))

    with pytest.raises(PeerRefused):
        await read(peer, [Range(0, 10)], [target])

    assert target == bytes(10)


# Who may connect


async def test_another_secret_is_refused_and_neither_secret_is_shown(rig, segment, service, caplog):
    listener = await rig.listen(rig.link("a"), segment, service)

    with pytest.raises(PeerRefused) as refused:
        await rig.connect(rig.link("b", secret=b"some other secret"), listener.contact)

    assert service.asked == []
    shown = str(refused.value) + caplog.text
    assert "some other secret" not in shown
    assert "the same on all hosts" not in shown


async def test_connections_come_and_go_and_the_service_is_told_once(rig, segment, service):
    _, peer = await rig.pair(segment, service)
    await peer.ask(b"hello", deadline=soon())

    await peer.close()
    await peer.close()

    async with asyncio.timeout(20):
        assert await service.gone.get() == service.asked[0][0]
    assert service.gone.empty()


async def test_two_nodes_read_from_each_other_and_one_that_closes_harms_no_other_way(rig, segment):
    """Both ways at once, as nodes of a fleet do: UCX takes two endpoints of one pair for one."""
    links = {name: rig.link(name) for name in "ab"}
    contacts = {n: (await rig.listen(link, segment, Echo())).contact for n, link in links.items()}
    from_a = await rig.connect(links["b"], contacts["a"])
    from_b = await rig.connect(links["a"], contacts["b"])
    for peer in (from_a, from_b):
        assert await read(peer, [Range(0, MiB)]) == [segment[:MiB]]

    await from_a.close()

    for _ in range(3):
        assert await read(from_b, [Range(0, 8 * MiB)]) == [segment]
    assert not from_b.broken


async def test_a_contact_where_nobody_listens_is_a_lost_peer(rig, segment, service):
    listener = await rig.listen(rig.link("a"), segment, service)
    await listener.close()

    with pytest.raises(PeerLost):
        await rig.connect(rig.link("b"), listener.contact)


async def test_a_contact_of_another_kind_is_refused(network_rig):
    for contact in ("inproc://a/b/1", "", "tcp://", "ucx://x", f"{network_rig.scheme()}://h:99999"):
        with pytest.raises(ProtocolError, match="contact"):
            await network_rig.connect(network_rig.link("b"), contact)


@pytest.mark.parametrize("host", ["localhost", "::1"])
async def test_host_names_and_ipv6_addresses_work(network_rig, segment, service, host):
    try:
        listener = await network_rig.listen(network_rig.link("a"), segment, service, host)
    except ConfigError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRNOTAVAIL:
            pytest.skip("this machine has no IPv6 loopback")
        raise
    peer = await network_rig.connect(network_rig.link("b"), listener.contact)

    assert await read(peer, [Range(0, 1000)]) == [segment[:1000]]


async def test_a_host_that_does_not_resolve_is_a_lost_peer(network_rig):
    contact = f"{network_rig.scheme()}://nowhere.invalid:7"

    with pytest.raises(PeerLost):
        await network_rig.connect(network_rig.link("b"), contact)


async def test_a_port_in_use_stops_the_start_and_says_what_to_set(network_rig, segment, service):
    listener = await network_rig.listen(network_rig.link("a"), segment, service)
    port = int(listener.contact.rpartition(":")[2])

    with pytest.raises(ConfigError, match="PREFIXFLEET_NODE_PORT"):
        await network_rig.listen(network_rig.link("b", port=port), segment, service)


# Ends


async def test_after_close_every_call_fails_at_once(rig, segment, service):
    _, peer = await rig.pair(segment, service)

    await peer.close()

    assert peer.broken
    with pytest.raises(PeerLost):
        await peer.ask(b"hello", deadline=soon())
    with pytest.raises(PeerLost):
        await read(peer, [Range(0, 10)])


async def test_a_closed_listener_is_a_lost_peer(rig, segment, service):
    listener, peer = await rig.pair(segment, service)

    await listener.close()

    with pytest.raises(PeerLost):
        await peer.ask(b"hello", deadline=soon())


async def test_a_deadline_that_has_passed_ends_the_call(rig, segment, service):
    _, peer = await rig.pair(segment, service)

    with pytest.raises(DeadlineExceeded):
        await peer.ask(b"wait", deadline=soon(0.0))


async def test_an_answer_that_does_not_come_ends_at_the_deadline(rig, segment, service):
    _, peer = await rig.pair(segment, service)

    with pytest.raises(DeadlineExceeded):
        await peer.ask(b"wait", deadline=soon(0.05))

    assert peer.broken


async def test_a_cancelled_call_leaves_a_connection_that_knows_it_is_useless(rig, segment, service):
    _, peer = await rig.pair(segment, service)
    asking = asyncio.create_task(peer.ask(b"wait", deadline=soon()))
    await asyncio.sleep(0)

    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)

    assert peer.broken


async def test_a_frozen_network_ends_at_the_deadline_in_process(segment, service):
    async with Rig("inproc") as rig:
        _, peer = await rig.pair(segment, service)
        rig.network.faults = Faults(frozen=True)

        with pytest.raises(DeadlineExceeded):
            await read(peer, [Range(0, 10)], deadline=soon(0.05))


@pytest.mark.parametrize("kind", NETWORK_KINDS)
async def test_a_frozen_process_ends_at_the_deadline(kind):
    async with link_source(kind, 8 * MiB) as source, Rig(kind) as rig:
        peer = await rig.connect(rig.link("b"), source.told["contact"])
        source.freeze()

        with pytest.raises(DeadlineExceeded):
            await read(peer, [Range(0, 8 * MiB)], deadline=soon(0.2))


@pytest.mark.parametrize("kind", NETWORK_KINDS)
async def test_a_frozen_process_is_found_by_its_silence_before_the_deadline(kind):
    async with link_source(kind, 64 * MiB) as source, Rig(kind) as rig:
        peer = await rig.connect(rig.link("b", heartbeat_s=0.05), source.told["contact"])
        source.freeze()

        with pytest.raises(PeerLost, match="silent"):
            await read(peer, [Range(0, 64 * MiB)])


@pytest.mark.parametrize("kind", NETWORK_KINDS)
async def test_a_killed_process_is_a_lost_peer(kind):
    async with link_source(kind, 64 * MiB) as source, Rig(kind) as rig:
        peer = await rig.connect(rig.link("b"), source.told["contact"])
        source.freeze()  # so that the read is under way when the process dies
        reading = asyncio.create_task(read(peer, [Range(0, 64 * MiB)]))
        asking = asyncio.create_task(peer.ask(b"hello", deadline=soon()))
        await asyncio.sleep(0)

        await source.kill()

        ended = await asyncio.gather(reading, asking, return_exceptions=True)
        assert [type(error) for error in ended] == [PeerLost, PeerLost]


@pytest.mark.parametrize("kind", NETWORK_KINDS)
async def test_nothing_is_written_after_close_has_returned(kind):
    """The timeout trap: late bytes must not land in memory that is somebody else's by now."""
    size = 64 * MiB
    async with link_source(kind, size) as source, Rig(kind) as rig:
        peer = await rig.connect(rig.link("b"), source.told["contact"])
        target = memoryview(bytearray(size))
        await read(peer, [Range(0, MiB)], [target[:MiB]])
        source.freeze()
        with pytest.raises(DeadlineExceeded):
            await read(peer, [Range(0, size)], [target], deadline=soon(0.05))

        await peer.close()
        target[:] = b"\xee" * size
        source.thaw()
        other = await rig.connect(rig.link("c"), source.told["contact"])
        await read(other, [Range(0, size)])

        assert target == b"\xee" * size


async def test_every_error_of_a_peer_is_a_failed_pull(rig, segment, service):
    """Whoever pulls catches one class."""
    listener, peer = await rig.pair(segment, service)
    await listener.close()

    with pytest.raises(PullFailed):
        await peer.ask(b"hello", deadline=soon())
