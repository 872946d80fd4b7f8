"""What goes to the index in Redis and what comes back, as bytes: calls packed, replies proved.

A reply that no sound server sends is `IndexUnavailable`, an event of that kind is `StreamGap`. No
I/O.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.errors import IndexUnavailable
from prefixfleet.store.index import FIELD_BYTES, IndexEvent, Membership, StreamGap
from prefixfleet.store.redis_functions import Reply

CALL_BLOCKS = 256
"""Blocks one changing call carries: it keeps the server busy for 0.5 ms."""
MAX_SLOTS = 4096
"""Nodes at once, with those whose slots are not swept yet; `redis_index.lua` knows it too."""
EVENT_KINDS = ("publish", "withdraw", "join", "leave")

Segments: TypeAlias = Mapping[BlockHash, Sequence[BlockHash]]
Position: TypeAlias = tuple[int, int]
"""Generation of the event stream, and number of the last event read."""

UNSOUND = (ValueError, TypeError, LookupError, AttributeError)
"""What taking a reply apart raises when it does not have the agreed form."""


@contextlib.contextmanager
def sound(what: str) -> Iterator[None]:
    """Around the decoding of a reply, and nothing else."""
    try:
        yield
    except UNSOUND as error:
        raise IndexUnavailable(f"{what}: a reply that no sound server sends ({error})") from error


def as_bytes(value: object) -> bytes:
    """``value``, if it is bytes."""
    if not isinstance(value, bytes):
        raise TypeError(f"got {type(value).__name__}, expected bytes")
    return value


def as_member(slot: bytes | int, identity: bytes) -> Membership:
    """A life of a node, from its slot and "EPOCH NODE"."""
    epoch, _, node = identity.partition(b" ")
    if not 0 <= int(slot) < MAX_SLOTS:
        raise ValueError(f"slot {slot!r}, expected less than {MAX_SLOTS}")
    return Membership(node.decode(), int(epoch), int(slot))


def as_lengths(reply: Sequence[Reply], limit: int) -> dict[bytes, int]:
    """Identity to number of leading blocks, of a lookup of ``limit`` blocks."""
    lengths = dict(zip(reply[::2], reply[1::2], strict=True))
    if not all(isinstance(n, int) and 0 < n <= limit for n in lengths.values()):
        raise ValueError(f"lengths {list(lengths.values())} of a chain of {limit} blocks")
    return lengths


def add_holders(holders: dict[bytes, int], fields: Sequence[bytes], live: int) -> None:
    """Add the blocks of one page of a segment that any node of the bitmap ``live`` holds."""
    for field, bitmap in zip(fields[::2], fields[1::2], strict=True):
        if len(field) == FIELD_BYTES and (bits := int.from_bytes(bitmap, "little") & live):
            holders[field] = bits


def as_event(entry: Sequence[bytes]) -> IndexEvent:
    """An entry of the event stream."""
    values = dict(zip(entry[::2], entry[1::2], strict=True))
    kind, packed = values[b"kind"].decode(), values[b"fields"]
    if kind not in EVENT_KINDS or len(packed) % FIELD_BYTES:
        raise ValueError(f"event of kind {kind!r}, {len(packed)} bytes of fields")
    member = as_member(values[b"slot"], values[b"identity"])
    fields = (packed[i : i + FIELD_BYTES] for i in range(0, len(packed), FIELD_BYTES))
    return IndexEvent(kind, member, tuple(fields))


def parse_position(cursor: bytes) -> Position:
    """The position that `format_position` made the cursor of."""
    generation, number = cursor.split(b"-")
    return int(generation), int(number)


def format_position(position: Position) -> str:
    """The id of a stream entry."""
    return f"{position[0]}-{position[1]}"


def advance(position: Position, entry_id: bytes) -> Position:
    """The position after the next event. The very first generation may begin after a snapshot of
    an empty server."""
    generation, number = parse_position(entry_id)
    if position[0] not in (0, generation) or number != position[1] + 1:
        raise StreamGap(f"event {entry_id!r} does not follow {position}")
    return generation, number


def pack(blocks: Sequence[BlockHash]) -> bytes:
    """The blocks' fields, one after another."""
    packed = b"".join([block[:FIELD_BYTES] for block in blocks])
    if len(packed) != FIELD_BYTES * len(blocks):
        raise ValueError(f"a block hash is shorter than {FIELD_BYTES} bytes")
    return packed


def batches(segments: Segments) -> Iterator[list[bytes]]:
    """Arguments of calls of at most `CALL_BLOCKS` blocks: head, packed fields, head, ..."""
    batch: list[bytes] = []
    room = CALL_BLOCKS
    for head, blocks in segments.items():
        start = 0
        while start < len(blocks):
            part = blocks[start : start + room]
            batch += [head, pack(part)]
            start += len(part)
            room -= len(part)
            if room == 0:
                yield batch
                batch, room = [], CALL_BLOCKS
    if batch:
        yield batch
