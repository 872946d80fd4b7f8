"""What a listener does with callers that do not keep to the protocol: a bounded end, a reason."""

import asyncio
import contextlib

import pytest
from eventually import until
from hostile import introduce, raw_caller
from links import SECRET, Echo, Rig, read, some_bytes

from prefixfleet.transfer import session, stream, wire
from prefixfleet.transfer.link import Range
from prefixfleet.transfer.tcp import TcpLink
from prefixfleet.transfer.wire import Kind

MiB = 1024 * 1024


@pytest.fixture
def service():
    return Echo()


@pytest.fixture
async def link():
    return TcpLink(node="a", secret=SECRET)


@pytest.fixture(scope="module")
def segment():
    return some_bytes(64 * MiB)


@pytest.fixture
async def listener(link, service, segment):
    listener = await link.listen("127.0.0.1", segment, service)
    yield listener
    await listener.close()


@pytest.fixture
async def caller(listener):
    async with raw_caller(listener.contact) as raw:
        yield raw


async def introduced(raw):
    await introduce(raw)
    header, _ = await raw.receive()
    assert header.kind == Kind.WELCOME
    return raw


async def expect_refusal(raw, reason):
    header, body = await raw.receive()
    assert header.kind == Kind.REFUSED
    refusal: wire.Refusal = wire.unpack(body, wire.Refusal)
    assert refusal.reason == reason
    return refusal.detail


HOSTILE_BYTES = {
    "another protocol": (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + bytes(64), "protocol"),
    "another version": (wire.HEADER.pack(b"PF", 99, 1, 10, 0, 0) + bytes(10), "refused"),
    "an unknown kind": (wire.HEADER.pack(b"PF", wire.WIRE_VERSION, 77, 0, 0, 0), "protocol"),
    "a length that lies": (
        wire.HEADER.pack(b"PF", wire.WIRE_VERSION, 1, 2**32 - 1, 0, 0),
        "protocol",
    ),
    "a question before the proof": (wire.frame_header(Kind.ASK, b"x") + b"x", "protocol"),
    "a read before the proof": (wire.frame_header(Kind.READ, bytes(16)) + bytes(16), "protocol"),
    "a body that is no message": (wire.frame_header(Kind.HELLO, b"\xff") + b"\xff", "protocol"),
    "a body that was changed": (wire.frame_header(Kind.HELLO, b"abc") + b"abd", "protocol"),
}


@pytest.mark.parametrize(("sent", "reason"), HOSTILE_BYTES.values(), ids=HOSTILE_BYTES)
async def test_junk_is_refused_counted_and_harms_nobody(
    listener, link, service, caller, sent, reason
):
    caller.writer.write(sent)

    await expect_refusal(caller, reason)

    assert await caller.ended()
    assert link.counters == {reason: 1}
    assert service.asked == []
    async with raw_caller(listener.contact) as other:
        await introduced(other)


async def test_a_caller_of_another_version_is_told_what_to_do(caller):
    caller.writer.write(wire.HEADER.pack(b"PF", 99, 1, 10, 0, 0))

    detail = await expect_refusal(caller, "refused")

    assert "version 99" in detail
    assert "install the same prefixfleet" in detail


async def test_a_caller_without_the_secret_is_told_nothing_but_that(caller):
    await introduce(caller, secret=b"another secret of the right length")

    detail = await expect_refusal(caller, "refused")

    assert "PREFIXFLEET_SECRET_FILE" in detail
    assert await caller.ended()


async def test_the_listeners_own_proof_sent_back_proves_nothing(listener, caller):
    """Reflection: the two roles prove different things."""
    hello = wire.Hello("hostile", "tcp", bytes(32))
    await caller.send(Kind.HELLO, wire.pack(hello))
    await caller.receive()
    await caller.send(Kind.PROOF, wire.pack(wire.Proof(bytes(32))))

    await expect_refusal(caller, "refused")


async def test_a_caller_of_another_link_is_refused(caller):
    await caller.send(Kind.HELLO, wire.pack(wire.Hello("hostile", "ucx", bytes(32))))

    assert "tcp" in await expect_refusal(caller, "refused")


async def test_a_connection_that_says_nothing_is_dropped(link, listener, monkeypatch):
    monkeypatch.setattr(session, "HANDSHAKE_S", 0.05)
    async with raw_caller(listener.contact) as caller:
        assert await caller.ended()

    assert link.counters == {"refused": 1}


async def test_half_a_frame_and_an_end_is_a_lost_caller(link, caller):
    caller.writer.write(wire.HEADER.pack(b"PF", wire.WIRE_VERSION, 1, 100, 0, 0) + bytes(50))
    caller.writer.write_eof()

    assert await caller.ended()
    assert link.counters == {"peer_lost": 1}


async def test_a_caller_that_falls_silent_is_dropped_and_its_service_told(service, segment):
    async with Rig("tcp") as rig:
        link = rig.link("a", heartbeat_s=0.02)
        listener = await rig.listen(link, segment, service)
        async with raw_caller(listener.contact) as caller:
            await introduced(caller)

            assert await caller.ended()

        assert link.counters == {"peer_lost": 1}
        assert (await service.gone.get()).node == "hostile"


HOSTILE_FRAMES = {
    "an answer nobody asked for": (Kind.ANSWER, b"x"),
    "data": (Kind.DATA, b""),
    "another hello": (Kind.HELLO, b""),
    "half a range": (Kind.READ, bytes(15)),
    "a range outside the segment": (Kind.READ, wire.encode_ranges([Range(64 * MiB, 1)])),
    "a range that wraps around": (Kind.READ, wire.encode_ranges([Range(2**64 - 1, 2)])),
    "too much at once": (Kind.READ, wire.encode_ranges([Range(0, 33 * MiB)] * 2)),
}


@pytest.mark.parametrize(("kind", "body"), HOSTILE_FRAMES.values(), ids=HOSTILE_FRAMES)
async def test_a_proved_caller_may_send_no_junk_either(link, service, caller, kind, body):
    await introduced(caller)

    await caller.send(kind, body)

    await expect_refusal(caller, "protocol")
    assert await caller.ended()
    assert link.counters == {"protocol": 1}
    assert not service.gone.empty()


async def test_a_range_without_a_lease_is_refused_and_the_connection_goes_on(link, service, caller):
    await introduced(caller)
    service.granting = False

    await caller.send(Kind.READ, wire.encode_ranges([Range(0, 10)]), id=5)
    header, _ = await caller.receive()

    assert (header.kind, header.id) == (Kind.REFUSED, 5)
    await caller.send(Kind.ASK, b"still", id=6)
    _, body = await caller.receive()
    assert body == b"re:still"
    assert link.counters == {"not_granted": 1}


@pytest.mark.parametrize("size", [64 * MiB, 900_000], ids=["by a thread", "by the loop"])
async def test_a_caller_that_stops_reading_is_dropped(link, service, segment, monkeypatch, size):
    monkeypatch.setattr(stream, "STALL_S", 0.05)
    listener = await link.listen("127.0.0.1", segment, service)
    async with raw_caller(listener.contact) as caller:
        await introduced(caller)

        for _ in range(-(-64 * MiB // size)):
            await caller.send(Kind.READ, wire.encode_ranges([Range(0, size)]))

        assert (await asyncio.wait_for(service.gone.get(), 20)).node == "hostile"
        await until(lambda: link.counters)
        assert link.counters == {"deadline": 1}
    await listener.close()


async def test_bytes_stop_when_the_lease_ends_under_a_slow_caller(link, service, caller):
    await introduced(caller)
    await caller.send(Kind.READ, wire.encode_ranges([Range(0, 64 * MiB)]))
    await caller.reader.readexactly(wire.HEADER.size + 1000)

    service.granting = False
    await until(lambda: link.counters)

    received = 1000
    with contextlib.suppress(ConnectionError):
        while chunk := await asyncio.wait_for(caller.reader.read(MiB), 20):
            received += len(chunk)
    assert received < 64 * MiB
    assert link.counters == {"peer_lost": 1}


async def test_a_listener_takes_no_more_connections_than_it_may(monkeypatch, service):
    monkeypatch.setattr("prefixfleet.transfer.acceptor.MAX_SESSIONS", 1)
    async with Rig("tcp") as rig:
        link = rig.link("a")
        listener = await rig.listen(link, some_bytes(100), service)
        first = await rig.connect(rig.link("b"), listener.contact)

        async with raw_caller(listener.contact) as caller:
            assert await caller.ended()

        assert link.counters == {"too_many": 1}
        assert await read(first, [Range(0, 100)]) == [some_bytes(100)]
