"""Frames and messages: what goes in comes out, and nothing else gets through."""

import contextlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixfleet.store.errors import EpochChanged, PeerBusy, PeerRefused, ProtocolError
from prefixfleet.transfer import wire
from prefixfleet.transfer.channel import REQUEST_BYTES
from prefixfleet.transfer.extents import cut
from prefixfleet.transfer.link import MAX_MESSAGE_BYTES, Range
from prefixfleet.transfer.messages import (
    Answer,
    Lease,
    Leased,
    No,
    Question,
    Release,
    Released,
    decode_answer,
    join_hashes,
    refusal,
    split_hashes,
)
from prefixfleet.transfer.wire import Kind

LEASE = Lease(
    namespace=b"n" * 16, epoch=3, payload_bytes=10, shards=1, hashes=b"h" * 32, budget_s=1.5
)
MESSAGES = [
    (LEASE, Question),
    (Release(lease=7), Question),
    (Release(lease=7, spoiled=b"s" * 16), Question),
    (Leased(lease=7, slots=[3, 1, 2], seconds=2.0, queued_bytes=9), Answer),
    (Released(), Answer),
    (No("busy", "later"), Answer),
    (wire.Hello("a", "tcp", bytes(32)), wire.Hello),
    (wire.Welcome(bytes(32), b"x" * 1000), wire.Welcome),
]


@pytest.mark.parametrize(("message", "kind"), MESSAGES)
def test_a_message_comes_out_as_it_went_in(message, kind):
    assert wire.unpack(wire.pack(message), kind) == message


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_protocol_error(body):
    for kind in (Question, Answer, wire.Hello, wire.Welcome):
        with contextlib.suppress(ProtocolError):
            wire.unpack(body, kind)


@given(st.binary(min_size=64, max_size=64))
def test_any_bytes_are_a_header_within_its_bounds_or_an_error(data):
    try:
        header = wire.decode_header(data)
    except (ProtocolError, PeerRefused):
        return
    assert header.length <= wire.MAX_DATA_BYTES


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": -1},
        {"epoch": "3"},
        {"budget_s": 0},
        {"budget_s": float("nan")},
        {"budget_s": 1e9},
        {"namespace": b"short"},
        {"payload_bytes": 0},
        {"shards": 1 << 16},
        {"surprise": 1},
        {"ask": "everything"},
    ],
)
def test_a_question_with_a_wrong_field_is_a_protocol_error(change):
    fields = msgpack.unpackb(wire.pack(LEASE))

    with pytest.raises(ProtocolError):
        wire.unpack(msgpack.packb({**fields, **change}), Question)


def test_a_message_that_lacks_a_field_is_a_protocol_error():
    fields = msgpack.unpackb(wire.pack(LEASE))
    del fields["epoch"]

    with pytest.raises(ProtocolError, match="epoch"):
        wire.unpack(msgpack.packb(fields), Question)


def test_deep_nesting_is_a_protocol_error():
    with pytest.raises(ProtocolError):
        wire.unpack(b"\x91" * 100_000 + b"\x90", Question)


def test_a_frame_carries_kind_length_and_id():
    header = wire.decode_header(wire.frame_header(Kind.ASK, b"question", id=2**64 - 1))

    assert (header.kind, header.length, header.id) == (Kind.ASK, 8, 2**64 - 1)
    wire.check_body(header, b"question")
    with pytest.raises(ProtocolError, match="checksum"):
        wire.check_body(header, b"Question")


@pytest.mark.parametrize(
    ("kind", "limit"),
    [(Kind.ASK, MAX_MESSAGE_BYTES), (Kind.HELLO, wire.MAX_HANDSHAKE_BYTES), (Kind.PING, 0)],
)
def test_a_body_is_bounded_on_both_sides(kind, limit):
    wire.decode_header(wire.frame_header(kind, bytes(limit)))
    with pytest.raises(ProtocolError, match=kind.name):
        wire.frame_header(kind, bytes(limit + 1))
    with pytest.raises(ProtocolError, match=kind.name):
        wire.decode_header(wire.HEADER.pack(b"PF", wire.WIRE_VERSION, kind, limit + 1, 0, 0))


def test_what_a_channel_asks_for_at_once_is_what_a_listener_takes():
    size = 1 << 20
    slots = [Range(2 * i * size, size) for i in range(REQUEST_BYTES // size + 1)]
    memory = memoryview(bytes(size))

    requests = [parts for parts, _ in cut(slots, [memory] * len(slots), REQUEST_BYTES)]

    assert [part for parts in requests for part in parts] == slots
    for parts in requests:
        body = wire.encode_ranges(parts)
        wire.frame_header(Kind.READ, body)
        assert wire.decode_ranges(body, slots[-1].offset + size) == parts
        answer = wire.data_header(sum(part.length for part in parts), 1)
        assert wire.decode_header(answer).kind == Kind.DATA


def test_ranges_come_out_as_they_went_in():
    ranges = [Range(0, 0), Range(5, 95), Range(99, 1)]

    assert wire.decode_ranges(wire.encode_ranges(ranges), 100) == ranges


def test_hashes_come_out_as_they_went_in():
    hashes = [bytes([i]) * 16 for i in range(5)]

    assert split_hashes(join_hashes(hashes)) == hashes
    with pytest.raises(ProtocolError):
        split_hashes(b"x" * 17)


@pytest.mark.parametrize("error", [EpochChanged, PeerBusy, PeerRefused])
def test_a_refusal_raises_the_same_error_on_the_other_side(error):
    body = wire.pack(refusal(error("because")))

    with pytest.raises(error, match="because") as raised:
        decode_answer(body, "source")

    assert type(raised.value) is error


def test_a_refusal_for_an_unknown_reason_is_a_refusal():
    with pytest.raises(PeerRefused):
        decode_answer(wire.pack(No("mood", "")), "source")
