"""Frames of a peer connection: a fixed header, then a body of known length. No I/O.

Header, 64 bytes, little-endian: magic "PF", version u8, kind u8, body length u32, id u64, XXH3 of
the body u64, zeros. A header of another length would shift the ranges behind it against the cache
lines that they come from and go to; copies in the kernel then take a third longer. The body is
MessagePack, opaque bytes (a question, an answer) or, for DATA, raw ranges, which carry their own
checksums and have 0 here. The first four bytes keep their meaning in every version, so that peers
of different versions can tell each other apart.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, TypeVar

import msgpack
import msgspec
import xxhash

from prefixfleet.store.errors import PeerRefused, ProtocolError
from prefixfleet.transfer.link import MAX_MESSAGE_BYTES, Range

WIRE_VERSION = 4
HEADER = struct.Struct("<2sBBIQQ40x")
MAX_HANDSHAKE_BYTES = 1024
MAX_WELCOME_BYTES = 64 * 1024
MAX_DATA_BYTES = 64 * 1024 * 1024
"""Bound on what one READ asks for; a link cuts longer reads into several."""
MAX_RANGES = 16_384
"""Bound on the ranges of one READ."""
_MAGIC = b"PF"
_RANGE = struct.Struct("<QQ")
_TAG = struct.Struct("<Q")


class Kind(IntEnum):
    """What a frame is. HELLO to WELCOME are the handshake, in that order."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSED = 5
    ASK = 6
    ANSWER = 7
    READ = 8
    DATA = 9
    PING = 10
    PONG = 11
    REACH = 12
    PUSH = 13


@dataclass(frozen=True, slots=True)
class Header:
    """A frame's header. ``length`` is within the bound of its kind."""

    kind: Kind
    length: int
    id: int
    checksum: int


_LIMITS = {
    Kind.HELLO: MAX_HANDSHAKE_BYTES,
    Kind.CHALLENGE: MAX_HANDSHAKE_BYTES,
    Kind.PROOF: MAX_HANDSHAKE_BYTES,
    Kind.WELCOME: MAX_HANDSHAKE_BYTES + MAX_WELCOME_BYTES,
    Kind.REFUSED: MAX_HANDSHAKE_BYTES,
    Kind.ASK: MAX_MESSAGE_BYTES,
    Kind.ANSWER: MAX_MESSAGE_BYTES,
    Kind.READ: MAX_RANGES * _RANGE.size,
    Kind.DATA: MAX_DATA_BYTES,
    Kind.PING: 0,
    Kind.PONG: 0,
    Kind.REACH: MAX_WELCOME_BYTES,
    Kind.PUSH: _TAG.size + MAX_RANGES * _RANGE.size,
}


def frame_header(kind: Kind, body: bytes = b"", id: int = 0) -> bytes:
    """Header of a frame with this body. Raises `ProtocolError` if the body is too long to send."""
    _check_length(kind, len(body))
    return HEADER.pack(
        _MAGIC, WIRE_VERSION, kind, len(body), id, xxhash.xxh3_64_intdigest(body) if body else 0
    )


def data_header(length: int, id: int) -> bytes:
    """Header of a DATA frame; ``length`` raw bytes follow."""
    return HEADER.pack(_MAGIC, WIRE_VERSION, Kind.DATA, length, id, 0)


def decode_header(data: bytes | bytearray | memoryview) -> Header:
    """The header in ``data``.

    Raises:
        PeerRefused: the peer speaks another version.
        ProtocolError: anything else that no correct peer sends.
    """
    magic, version, kind, length, id, checksum = HEADER.unpack(data)
    if magic != _MAGIC:
        raise ProtocolError(f"frame: got magic {magic!r}, expected {_MAGIC!r}")
    if version != WIRE_VERSION:
        raise PeerRefused(
            f"peer speaks wire version {version}, this node speaks {WIRE_VERSION}: "
            "install the same prefixfleet on every host"
        )
    if kind not in _LIMITS:
        raise ProtocolError(f"frame: got kind {kind}, expected 1 to {max(Kind)}")
    _check_length(Kind(kind), length)
    return Header(Kind(kind), length, id, checksum)


def check_body(header: Header, body: bytes | bytearray) -> None:
    """Raises `ProtocolError` if ``body`` is not the one that its header was made for."""
    if body and xxhash.xxh3_64_intdigest(body) != header.checksum:
        raise ProtocolError(f"frame: checksum of a {header.kind.name} body differs")


def _check_length(kind: Kind, length: int) -> None:
    if length > _LIMITS[kind]:
        raise ProtocolError(
            f"frame: got {length} bytes of {kind.name}, expected at most {_LIMITS[kind]}"
        )


def encode_ranges(ranges: Sequence[Range]) -> bytes:
    """Body of a READ."""
    return b"".join(_RANGE.pack(part.offset, part.length) for part in ranges)


def decode_ranges(body: bytes, segment_bytes: int) -> list[Range]:
    """Ranges of a READ, all inside the segment and `MAX_DATA_BYTES` together at most.

    Raises `ProtocolError`.
    """
    if len(body) % _RANGE.size:
        raise ProtocolError(f"READ: got {len(body)} bytes, expected a multiple of {_RANGE.size}")
    ranges = [Range(*pair) for pair in _RANGE.iter_unpack(body)]
    for part in ranges:
        if part.offset + part.length > segment_bytes:
            raise ProtocolError(f"READ: got {part}, expected inside {segment_bytes} bytes")
    if sum(part.length for part in ranges) > MAX_DATA_BYTES:
        raise ProtocolError(f"READ: expected at most {MAX_DATA_BYTES} bytes at once")
    return ranges


def encode_push(tag: int, ranges: Sequence[Range]) -> bytes:
    """Body of a PUSH: send these ranges, the first with this tag, each other with the next."""
    return _TAG.pack(tag) + encode_ranges(ranges)


def decode_push(body: bytes, segment_bytes: int) -> tuple[int, list[Range]]:
    """First tag and ranges of a PUSH, as `decode_ranges` checks them. Raises `ProtocolError`."""
    if len(body) < _TAG.size:
        raise ProtocolError(f"PUSH: got {len(body)} bytes, expected a tag and ranges")
    (tag,) = _TAG.unpack_from(body)
    ranges = decode_ranges(body[_TAG.size :], segment_bytes)
    if tag + len(ranges) > 1 << 64:
        raise ProtocolError(f"PUSH: got tag {tag} for {len(ranges)} ranges, expected 64 bits")
    return tag, ranges


# Messages: MessagePack maps with a fixed set of fields.

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Secret32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The caller's first word: who it is and a fresh nonce."""

    node: Name
    link: Name
    nonce: Secret32


class Challenge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The listener's answer: who it is and a fresh nonce of its own."""

    node: Name
    nonce: Secret32


class Proof(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From the caller: that it knows the secret."""

    proof: Secret32


class Welcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From the listener: that it knows the secret, and what its link needs besides."""

    proof: Secret32
    attachment: Annotated[bytes, msgspec.Meta(max_length=MAX_WELCOME_BYTES)]


class Reached(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From the listener: it has a way to the caller's worker; these lanes carry what is pushed."""

    lanes: Annotated[str, msgspec.Meta(min_length=1, max_length=400)]


class Refusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why the listener will not go on. ``reason`` is one short word."""

    reason: Name
    detail: Annotated[str, msgspec.Meta(max_length=400)]


Message = TypeVar("Message")


def pack(message: msgspec.Struct) -> bytes:
    """MessagePack form of a message; a tagged one carries its tag."""
    packed: bytes = msgpack.packb(msgspec.to_builtins(message, builtin_types=(bytes,)))
    return packed


def unpack(body: bytes | bytearray, kind: type[Message] | Any) -> Message:  # noqa: ANN401 - also unions
    """The message in ``body``. Raises `ProtocolError` on anything but exactly its fields."""
    try:
        values = msgpack.unpackb(body, raw=False, strict_map_key=True)
        message: Message = msgspec.convert(values, kind)
    except (ValueError, RecursionError, msgpack.UnpackException, msgspec.ValidationError) as error:
        raise ProtocolError(f"message: {error}") from error
    return message
