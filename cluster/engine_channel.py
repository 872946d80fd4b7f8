"""The channel between an engine and its node's daemon: frames over a Unix socket.

A frame is a little-endian u32 length and a MessagePack map. The engine asks, each question has
an ``id`` and an ``op``; the answer carries the same ``id`` and either the fields below or
``error`` (a text). Answers may come in any order. Hash lists travel as one ``bytes``.

op        question                                       answer
hello     version, engine, role ("scheduler" |           node, epoch, pool_path, pool_bytes,
          "worker"), rank, namespace (map),              hash_key, namespace_digest
          payload_bytes, shards
prepare   request, chain, plan (map | nil), budget_s     blocks, slots, local, pulled,
                                                         pulled_bytes, pull_s, link, failure
release   request                                        -
reserve   parent, hashes, rank                           slots (-1: have it, or no room)
commit    hashes, rank                                   -
abandon   hashes, rank                                   -
discard   hashes                                         -
outcome   outcome (map of `records.Outcome`)             -

``prepare`` pins the leading blocks of ``chain`` that are in the pool, pulls more if the plan
says so, and answers when that is over, at the latest after ``budget_s``; what it answers stays
pinned for (this connection, request) until ``release`` or until the connection ends. Slots are
numbers; slot ``i`` lies at ``i * slot_bytes`` of the pool file. ``reserve`` hands out slots for
blocks that follow ``parent`` (empty at the chain's root) and gives every rank the same ones; a
block is published when each of ``shards`` ranks has committed it. ``discard`` names blocks that
an engine could not prove: the daemon proves them itself, and drops a damaged one with all that
follows it. A connection's end frees its pins and its reservations: an engine that dies loses
nothing but its own work.
"""

import asyncio
import reprlib
import socket
import struct
from typing import Any

import msgpack

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.errors import ProtocolError
from prefixfleet.store.namespace import DIGEST_BYTES

CHANNEL_VERSION = 1
MAX_FRAME_BYTES = 16 * 1024 * 1024
_LENGTH = struct.Struct("<I")


def encode_frame(message: dict[str, Any]) -> bytes:
    """The frame of ``message``. Raises `ProtocolError` if it is too long to send."""
    body: bytes = msgpack.packb(message, use_bin_type=True)
    _check_length(len(body))
    return _LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> dict[str, Any]:
    """The next frame. Raises `asyncio.IncompleteReadError` at the end, `ProtocolError` on junk."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    _check_length(length)
    return _decode_body(await reader.readexactly(length))


def receive_frame(connection: socket.socket) -> dict[str, Any]:
    """The next frame of a blocking socket. Raises `EOFError` at the end, `ProtocolError`."""
    (length,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size))
    _check_length(length)
    return _decode_body(_receive_exactly(connection, length))


def join_hashes(hashes: list[BlockHash]) -> bytes:
    """Hash list to wire form."""
    return b"".join(hashes)


def split_hashes(joined: bytes) -> list[BlockHash]:
    """Wire form to hash list. Raises `ProtocolError` if it is no whole number of hashes."""
    if not isinstance(joined, bytes) or len(joined) % DIGEST_BYTES:
        raise ProtocolError(
            f"hash list: got {reprlib.repr(joined):.80}, expected n x {DIGEST_BYTES} bytes"
        )
    return [joined[i : i + DIGEST_BYTES] for i in range(0, len(joined), DIGEST_BYTES)]


def _check_length(length: int) -> None:
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"engine frame: got {length} bytes, expected at most {MAX_FRAME_BYTES}")


def _decode_body(body: bytes) -> dict[str, Any]:
    try:
        message = msgpack.unpackb(body, raw=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"engine frame: not MessagePack ({error})") from error
    if not isinstance(message, dict):
        raise ProtocolError(f"engine frame: got {type(message).__name__}, expected a map")
    return message


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    buffer = bytearray(count)
    view = memoryview(buffer)
    while view:
        received = connection.recv_into(view)
        if received == 0:
            raise EOFError("the daemon closed the engine channel")
        view = view[received:]
    return bytes(buffer)
