"""Messages with tags: the way in which UCX reads where it cannot use the source's memory key, and
sources and callers that do not keep to it. Real UCX on both sides."""

import asyncio
import threading

import pytest
from eventually import until
from hostile import introduce, raw_caller
from links import Echo, Rig, link_source, read, some_bytes, soon
from pulls import PoolNode, PullRig, chain

from prefixfleet.store.errors import DeadlineExceeded, PeerLost, PeerRefused, ProtocolError
from prefixfleet.transfer import pushing, ucx_binding, ucx_inbox, ucx_listener, wire
from prefixfleet.transfer.link import Range
from prefixfleet.transfer.ucx_get import Libucp
from prefixfleet.transfer.ucx_listener import UcxSender
from prefixfleet.transfer.wire import Kind

pytestmark = pytest.mark.skipif(
    "ucxx" not in ucx_binding.available(), reason="the Python binding ucxx is not installed"
)
MiB = 1024 * 1024
SIZE = 8 * MiB


@pytest.fixture
async def rig():
    async with Rig("ucx-tags") as rig:
        yield rig


@pytest.fixture
def small_pieces(monkeypatch):
    """Several messages make one read."""
    monkeypatch.setattr(ucx_listener, "PIECE_BYTES", MiB)
    monkeypatch.setattr("prefixfleet.transfer.ucx_peer.PIECE_BYTES", MiB)


def sending(monkeypatch, lie):
    """Sources send what ``lie`` makes of pieces (address, length) and first tag: more of both."""
    send = UcxSender.send

    async def other(self, ranges, tag):
        for others, first in lie(list(ranges), tag):
            await send(self, others, first)

    monkeypatch.setattr(UcxSender, "send", other)


# The way is chosen


async def test_by_default_memory_is_read_one_sided():
    async with Rig("ucx") as rig:
        _, peer = await rig.pair(some_bytes(1000), Echo())

        assert "tags" not in peer.lanes


async def test_a_key_that_ucx_cannot_use_makes_it_messages_and_it_shows(monkeypatch, caplog):
    def unpack(self, endpoint, packed):
        raise PeerLost("UCX rkey_unpack: Destination is unreachable")

    monkeypatch.setattr(Libucp, "unpack_rkey", unpack)
    async with Rig("ucx") as rig:
        listener = await rig.listen(rig.link("a"), some_bytes(SIZE), Echo())
        link = rig.link("b")
        for _ in range(2):
            peer = await rig.connect(link, listener.contact)

            assert await read(peer, [Range(0, SIZE)]) == [some_bytes(SIZE)]

        assert peer.lanes.startswith("ucx:tags over ")
        assert "memory key" in peer.lanes
        assert link.counters == {"no_memory_key": 2}
    assert caplog.text.count("Destination is unreachable") == 1


# Sources that lie

LIES = {
    "a short message": lambda ranges, tag: [([Range(0, MiB - 1), *ranges[1:]], tag)],
    "an empty message": lambda ranges, tag: [([Range(0, 0), *ranges[1:]], tag)],
    "a long message": lambda ranges, tag: [([Range(0, MiB + 1), *ranges[1:]], tag)],
    "a small one that is long": lambda ranges, tag: [([*ranges[:-1], Range(0, 4097)], tag)],
    "a tag that nobody told": lambda ranges, tag: [(ranges[:1], tag + 1000)],
    "a small one that nobody told": lambda ranges, tag: [([Range(0, 10)], tag + 1000)],
    "a tag twice": lambda ranges, tag: [(ranges[:1], tag), (ranges[:1], tag)],
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
async def test_a_message_that_must_not_come_is_a_protocol_error(
    rig, small_pieces, monkeypatch, lie
):
    sending(monkeypatch, lie)
    _, peer = await rig.pair(some_bytes(SIZE), Echo())

    with pytest.raises(ProtocolError, match="UCX: got a message"):
        await read(peer, [Range(0, 3 * MiB), Range(4 * MiB, 4096)])

    assert peer.broken


async def test_messages_after_the_last_read_end_the_connection(rig, small_pieces):
    """What nothing waits for does not pile up."""
    listener = await rig.listen(rig.link("a"), some_bytes(SIZE), Echo())
    peer = await rig.connect(rig.link("b"), listener.contact)
    await read(peer, [Range(0, MiB)])
    (session,) = listener._acceptor._sessions
    assert not peer._inbox.gone
    sender = session.get_coro().cr_frame.f_locals["pushes"]._sender

    sending = asyncio.create_task(sender.send([Range(0, MiB)], 77))

    await until(lambda: peer._inbox.gone)
    with pytest.raises(ProtocolError, match="nothing waits for"):
        await read(peer, [Range(0, MiB)])
    await peer.close()
    with pytest.raises(PeerLost):
        await asyncio.wait_for(sending, 20)


@pytest.mark.parametrize("sent", [0, 2])
async def test_a_source_that_stops_sending_ends_at_the_deadline(
    rig, small_pieces, monkeypatch, sent
):
    sending(monkeypatch, lambda ranges, tag: [(ranges[:sent], tag)])
    _, peer = await rig.pair(some_bytes(SIZE), Echo())
    target = memoryview(bytearray(SIZE))

    with pytest.raises(DeadlineExceeded):
        await read(peer, [Range(0, SIZE)], [target], deadline=soon(0.3))

    await peer.close()
    assert bytes(target[sent * MiB :]) == bytes(SIZE - sent * MiB)


async def test_slots_of_a_read_that_stopped_midway_are_nobodys_until_its_worker_is_gone(
    monkeypatch, small_pieces
):
    """The source says that it has sent everything, and half of it never comes."""
    async with PullRig.of("ucx-tags", slots=600) as rig:
        node = PoolNode("source", slots=600)
        node.fill(chain(600))
        contacts = await rig.serve(node)
        with monkeypatch.context() as patched:
            sending(patched, lambda ranges, tag: [(ranges[: len(ranges) // 2], tag)])
            late = await rig.pull(contacts, chain(600), seconds=1)
        assert (late.blocks, late.failure) == (0, "deadline")
        await until(lambda: not rig.target.pool.counts().quarantined)
        rig.target.fill(chain(300, "others"))

        assert (await rig.pull(contacts, chain(300))).blocks == 300

        assert rig.target.holds(chain(300, "others")) == 300
        assert rig.target.holds(chain(300)) == 300


async def test_a_connection_that_ends_in_the_middle_of_a_message_writes_no_more():
    """Not only receives that no message has met: those whose message is arriving, too."""
    size = 64 * MiB
    async with link_source("ucx-tags", size) as source, Rig("ucx-tags") as rig:
        link = rig.link("b")
        broken = 0
        for turn in range(20):
            peer = await link.connect(source.told["contact"], deadline=soon())
            target = memoryview(bytearray(size))
            reading = asyncio.create_task(read(peer, [Range(0, size)], [target]))
            await asyncio.sleep(turn * 0.001)
            await until(lambda t=target, r=reading: t[0] or r.done())

            await peer.close()

            broken += not reading.done() or reading.exception() is not None
            target[:] = b"\xee" * size
            await asyncio.gather(reading, return_exceptions=True)
            await asyncio.sleep(0.005)
            assert target == b"\xee" * size
        assert broken


async def test_a_connection_is_not_gone_while_its_worker_goes(rig, monkeypatch):
    """It may still write then, and targets are given away once it is gone."""
    going, may_go = threading.Event(), threading.Event()
    destroy = ucx_inbox.Worker.destroy

    def slowly(worker):
        going.set()
        may_go.wait(20)
        destroy(worker)

    monkeypatch.setattr(ucx_inbox.Worker, "destroy", slowly)
    _, peer = await rig.pair(some_bytes(SIZE), Echo())
    closing = asyncio.create_task(peer.close())
    await until(going.is_set)

    again = peer._thread.disconnect(peer._inbox)

    assert not again.done()
    may_go.set()
    await asyncio.gather(closing, again)


async def test_an_endpoint_that_ucx_does_not_close_goes_with_its_worker(monkeypatch):
    monkeypatch.setattr(ucx_inbox, "END_S", 0.05)
    monkeypatch.setattr(ucx_inbox.Remote, "advance", lambda self: None)
    async with link_source("ucx-tags", SIZE) as source, Rig("ucx-tags") as rig:
        peer = await rig.connect(rig.link("b"), source.told["contact"])
        source.freeze()
        reading = asyncio.create_task(read(peer, [Range(0, SIZE)]))
        await until(lambda: peer._inbox._batches)

        await peer.close()

        assert peer._inbox.gone
        with pytest.raises(PeerLost):
            await reading


# Callers that lie


@pytest.fixture
async def caller(rig):
    service = Echo()
    link = rig.link("a")
    listener = await rig.listen(link, some_bytes(SIZE), service)
    async with raw_caller(listener.contact, "ucx") as raw:
        await introduce(raw, link="ucx")
        await raw.receive()
        raw.link, raw.service = link, service
        yield raw


PUSH = wire.encode_push(1, [Range(0, 10)])


async def refusal(raw):
    header, body = await raw.receive()
    assert header.kind == Kind.REFUSED
    said: wire.Refusal = wire.unpack(body, wire.Refusal)
    return said.reason


async def test_a_push_before_anything_is_reached_is_refused(caller):
    await caller.send(Kind.PUSH, PUSH)

    assert await refusal(caller) == "protocol"
    assert await caller.ended()


async def reach(rig, raw, id=1):
    """As a caller does: with a worker of real UCX."""
    thread = await rig.link("b")._started("reading")
    serving = await raw.link._started("serving")
    inbox = await thread.run(lambda: thread.open_inbox(serving.binding.address()))
    await raw.send(Kind.REACH, inbox.address, id)
    return thread


async def test_what_is_not_granted_is_not_sent(rig, caller):
    await reach(rig, caller)
    assert (await caller.receive())[0].kind == Kind.ANSWER
    caller.service.granting = False

    await caller.send(Kind.PUSH, PUSH, id=2)

    assert await refusal(caller) == "not_granted"
    assert caller.link.counters["not_granted"] == 1


WRONG_PUSHES = {
    "no tag": bytes(7),
    "half a range": PUSH[:-1],
    "a range outside the segment": wire.encode_push(1, [Range(SIZE - 1, 2)]),
    "a range that wraps around": wire.encode_push(1, [Range(2**64 - 1, 2)]),
    "tags that wrap around": wire.encode_push(2**64 - 1, [Range(0, 1), Range(0, 1)]),
    "too much at once": wire.encode_push(1, [Range(0, SIZE)] * 9),
}


@pytest.mark.parametrize("body", WRONG_PUSHES.values(), ids=WRONG_PUSHES)
async def test_a_push_that_no_correct_caller_asks_for_ends_the_session(rig, caller, body):
    await reach(rig, caller)
    await caller.receive()

    await caller.send(Kind.PUSH, body)

    assert await refusal(caller) == "protocol"
    assert await caller.ended()


@pytest.mark.parametrize("address", [b"", b"\xff" * 64, b"no address"])
async def test_what_is_no_address_of_a_worker_is_not_reached(caller, address):
    """UCX itself would end the process."""
    await caller.send(Kind.REACH, address)

    assert await refusal(caller) == "not_reached"
    assert caller.link.counters["not_reached"] == 1
    await caller.send(Kind.ASK, b"still", id=6)
    assert (await caller.receive())[1] == b"re:still"


async def test_a_caller_reaches_once(rig, caller):
    await reach(rig, caller)
    await caller.receive()

    await reach(rig, caller)

    assert await refusal(caller) == "protocol"


async def test_pushes_at_once_are_bounded(rig, caller, monkeypatch):
    async def never(self, ranges, tag):
        await asyncio.Event().wait()

    monkeypatch.setattr(UcxSender, "send", never)
    await reach(rig, caller)
    await caller.receive()
    for number in range(pushing.MAX_PUSHES + 1):
        await caller.send(Kind.PUSH, PUSH, id=10 + number)

    assert await refusal(caller) == "protocol"
    assert await caller.ended()


async def test_a_caller_that_takes_nothing_ends_with_its_lease(rig, caller):
    """Its worker stands still: what it asked for is dropped when the lease is over."""
    await reach(rig, caller)
    await caller.receive()
    await caller.send(Kind.PUSH, wire.encode_push(1, [Range(0, SIZE)]), id=2)
    caller.service.granting = False

    assert await caller.ended()
    async with asyncio.timeout(20):
        await caller.service.gone.get()
    assert caller.link.counters["peer_lost"] == 1


async def test_a_session_of_a_link_without_messages_refuses_them():
    async with Rig("tcp") as rig:
        listener = await rig.listen(rig.link("a"), some_bytes(10), Echo())
        async with raw_caller(listener.contact) as raw:
            await introduce(raw)
            await raw.receive()

            await raw.send(Kind.REACH, b"address")

            assert await refusal(raw) == "protocol"


async def test_a_lease_that_ends_while_messages_leave_is_a_lost_peer(rig, monkeypatch):
    async def never(self, ranges, tag):
        await asyncio.Event().wait()

    service = Echo()
    monkeypatch.setattr(UcxSender, "send", never)
    _, peer = await rig.pair(some_bytes(SIZE), service)
    reading = asyncio.create_task(read(peer, [Range(0, SIZE)]))
    await until(lambda: peer._inbox._batches)
    await asyncio.sleep(0.05)
    service.granting = False

    with pytest.raises((PeerLost, PeerRefused)):
        await reading
