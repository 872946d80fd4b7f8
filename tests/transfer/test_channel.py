"""What a caller does with listeners that do not keep to the protocol."""

import asyncio
import time

import pytest
from hostile import Raw, raw_listener, welcome
from links import SECRET, soon

from prefixfleet.store.errors import DeadlineExceeded, PeerLost, PeerRefused, ProtocolError
from prefixfleet.transfer import wire
from prefixfleet.transfer.auth import Handshake
from prefixfleet.transfer.channel import SILENCE_BEATS, Channel
from prefixfleet.transfer.extents import cut
from prefixfleet.transfer.link import Range
from prefixfleet.transfer.wire import Kind


async def open_channel(contact, deadline=None, heartbeat_s=1.0):
    return await Channel.open(
        contact,
        link="tcp",
        node="b",
        secret=SECRET,
        heartbeat_s=heartbeat_s,
        deadline=deadline or soon(),
    )


def after_welcome(*frames):
    """A listener that authenticates, takes one frame and sends these bytes."""

    async def behave(raw: Raw) -> None:
        await welcome(raw)
        await raw.receive()
        raw.writer.write(b"".join(frames))
        await raw.writer.drain()

    return behave


def frame(kind, body=b"", id=1):
    return wire.frame_header(kind, body, id) + body


async def test_a_listener_without_the_secret_gets_no_question():
    got = []

    async def behave(raw):
        await welcome(raw, secret=b"a guess of the right length")
        got.append(await raw.reader.read())

    async with raw_listener(behave) as contact:
        with pytest.raises(PeerRefused, match="listener does not know"):
            await open_channel(contact)

    assert got == [b""]


async def test_an_attachment_that_was_changed_on_the_way_is_refused():
    """It says where memory is; whoever can change it could redirect reads."""

    async def behave(raw):
        _, body = await raw.receive()
        hello: wire.Hello = wire.unpack(body, wire.Hello)
        challenge = wire.Challenge("hostile", bytes(32))
        await raw.send(Kind.CHALLENGE, wire.pack(challenge))
        await raw.receive()
        proven = wire.Welcome(
            Handshake(SECRET, hello, challenge).proof("listener", b"the real one"), b"another one"
        )
        await raw.send(Kind.WELCOME, wire.pack(proven))

    async with raw_listener(behave) as contact:
        with pytest.raises(PeerRefused):
            await open_channel(contact)


GREETINGS = {
    "another protocol": (b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64), ProtocolError),
    "another version": (wire.HEADER.pack(b"PF", 9, 2, 0, 0, 0), PeerRefused),
    "the wrong frame": (frame(Kind.PONG), ProtocolError),
    "an end": (b"", PeerLost),
}


@pytest.mark.parametrize(("sent", "error"), GREETINGS.values(), ids=GREETINGS)
async def test_a_bad_greeting_ends_the_attempt(sent, error):
    async def behave(raw):
        raw.writer.write(sent)
        raw.writer.write_eof()

    async with raw_listener(behave) as contact:
        with pytest.raises(error):
            await open_channel(contact)


async def test_a_host_that_no_name_can_be_is_a_lost_peer():
    with pytest.raises(PeerLost, match="label empty"):
        await open_channel("tcp://a..b:7000")


async def test_a_listener_that_says_nothing_ends_at_the_deadline():
    async def behave(raw):
        pass

    async with raw_listener(behave) as contact:
        with pytest.raises(DeadlineExceeded):
            await open_channel(contact, soon(0.05))


ANSWERS = {
    "junk": b"\x00" * 64,
    "no such question": frame(Kind.ANSWER, b"x", id=99),
    "data for a question": frame(Kind.DATA),
    "a question of its own": frame(Kind.ASK, b"x"),
    "a changed body": frame(Kind.ANSWER, b"abc")[:-1] + b"x",
    "a refusal that is no message": frame(Kind.REFUSED, b"\xc1"),
}


@pytest.mark.parametrize("sent", ANSWERS.values(), ids=ANSWERS)
async def test_a_bad_answer_is_a_protocol_error(sent):
    async with raw_listener(after_welcome(sent)) as contact:
        channel = await open_channel(contact)

        with pytest.raises(ProtocolError):
            await channel.ask(b"?", deadline=soon())

        assert channel.broken
        await channel.close()


@pytest.mark.parametrize("length", [0, 99, 101, 64 * 1024 * 1024])
async def test_data_of_another_length_is_a_protocol_error_and_touches_nothing(length):
    target = memoryview(bytearray(b"\xee" * 200))
    sent = wire.data_header(length, 1) + b"x" * min(length, 1000)
    async with raw_listener(after_welcome(sent)) as contact:
        channel = await open_channel(contact)

        with pytest.raises(ProtocolError, match="DATA"):
            await channel.read([Range(0, 100)], [target[:100]], deadline=soon())

        assert target == b"\xee" * 200
        await channel.close()


async def test_data_that_ends_in_the_middle_is_a_lost_peer():
    async def behave(raw):
        await welcome(raw)
        await raw.receive()
        raw.writer.write(wire.data_header(100, 1) + bytes(50))
        raw.writer.write_eof()

    async with raw_listener(behave) as contact:
        channel = await open_channel(contact)

        with pytest.raises(PeerLost):
            await channel.read([Range(0, 100)], [memoryview(bytearray(100))], deadline=soon())
        await channel.close()


async def test_a_refused_question_is_refused_with_the_peers_reason():
    refusal = wire.pack(wire.Refusal("tired", "come back tomorrow"))
    async with raw_listener(after_welcome(frame(Kind.REFUSED, refusal))) as contact:
        channel = await open_channel(contact)

        with pytest.raises(PeerRefused, match=r"tired.*come back tomorrow"):
            await channel.ask(b"?", deadline=soon())
        await channel.close()


@pytest.mark.parametrize("kind", [Kind.DATA, Kind.REFUSED])
async def test_no_answer_ends_what_goes_on_beside_the_connection(kind):
    """Else a read would count as over while bytes still arrive in its slots."""
    body = wire.pack(wire.Refusal("no", "")) if kind == Kind.REFUSED else b""
    answers = frame(Kind.ANSWER, b"yes", id=1), frame(kind, body, id=2)
    async with raw_listener(after_welcome(*answers)) as contact:
        channel = await open_channel(contact)
        end = asyncio.get_running_loop().create_future()
        asking = asyncio.create_task(channel.ask(b"?", deadline=soon()))
        waiting = asyncio.create_task(channel.wait(end, deadline=soon(), what="read"))

        ended = await asyncio.gather(asking, waiting, return_exceptions=True)

        assert [type(error) for error in ended] == [bytes, ProtocolError]
        assert channel.broken
        await channel.close()


async def test_a_peer_that_answers_slowly_for_ever_ends_at_the_deadline():
    async def behave(raw):
        await welcome(raw)
        await raw.receive()
        raw.writer.write(wire.data_header(1000, 1))
        while True:
            raw.writer.write(b"x")
            await raw.writer.drain()
            await asyncio.sleep(0.005)

    async with raw_listener(behave) as contact:
        channel = await open_channel(contact)

        with pytest.raises(DeadlineExceeded):
            await channel.read([Range(0, 1000)], [memoryview(bytearray(1000))], deadline=soon(0.1))
        await channel.close()


async def test_a_peer_that_stops_reading_ends_at_the_deadline():
    async def behave(raw):
        await welcome(raw)

    async with raw_listener(behave) as contact:
        channel = await open_channel(contact)

        asking = [channel.ask(bytes(4_000_000), deadline=soon(0.1)) for _ in range(10)]
        ended = await asyncio.gather(*asking, return_exceptions=True)

        assert {type(error) for error in ended} == {DeadlineExceeded}
        await channel.close()


async def test_a_silent_peer_is_lost_although_the_connection_stands():
    """A half-open connection: the other host is gone, and nobody says so."""

    async def behave(raw):
        await welcome(raw)

    async with raw_listener(behave) as contact:
        channel = await open_channel(contact, heartbeat_s=0.02)

        with pytest.raises(PeerLost, match="silent"):
            await channel.ask(b"?", deadline=soon())
        await channel.close()


async def test_a_stall_of_our_own_is_not_taken_for_the_peers_silence():
    """A busy host stops the whole loop: what the peer said meanwhile was not read yet, and what
    it is asked then it may answer as late as ever."""
    beat_s, answered = 0.2, asyncio.Event()

    async def behave(raw):
        await welcome(raw)
        while True:
            header, _ = await raw.receive()
            if header.kind == Kind.PING:
                await asyncio.sleep(1.5 * beat_s)
                await raw.send(Kind.PONG)
                answered.set()

    async with raw_listener(behave) as contact:
        channel = await open_channel(contact, heartbeat_s=beat_s)
        for _ in range(2):
            time.sleep(2 * SILENCE_BEATS * beat_s)  # noqa: ASYNC251 - the stall
            answered.clear()
            async with asyncio.timeout(20):
                await answered.wait()

            assert not channel.broken
        await channel.close()


@pytest.mark.parametrize("limit", [1, 7, 64, 1000])
def test_portions_keep_order_and_size(limit):
    ranges = [Range(10, 50), Range(3, 0), Range(100, 7), Range(0, 200)]
    memory = memoryview(bytearray(257))
    targets = [memory[:50], memory[50:50], memory[50:57], memory[57:]]

    portions = list(cut(ranges, targets, limit))

    assert all(sum(p.length for p in parts) <= limit for parts, _ in portions)
    flat = [i for parts, _ in portions for p in parts for i in range(p.offset, p.offset + p.length)]
    assert flat == [*range(10, 60), *range(100, 107), *range(200)]
    assert sum(view.nbytes for _, views in portions for view in views) == 257
