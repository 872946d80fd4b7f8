"""KV events of an engine, from the wire to records. Pure decoding; must not know sockets.

vLLM and SGLang publish over ZeroMQ: ``[topic,] sequence (8 bytes, big endian), MessagePack``, the
last an array ``[timestamp, [event, ...], rank]``. An event is a map with ``type`` (vLLM since June
2026) or an array led by its tag (before, and SGLang). Unknown types and fields are skipped, since
engines add some with every release; a known event of a wrong shape is an error.
"""

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from prefixfleet.store.errors import ProtocolError

MAX_PAYLOAD_BYTES = 16 * 1024 * 1024
"""One step of an engine: a prompt of a million tokens takes 5 bytes each, its 62,500 blocks 34
bytes each for their names, and as many may leave."""
MAX_CONTAINERS = 524_288
"""Lists and maps in one batch: for each of those blocks its extra keys, or an event of its own."""
MAX_NAME = 64
"""Bytes of a block's name, letters of a medium's: something is kept for each."""
PIECE_BYTES = 64 * 1024
"""Decoded at once, in a few ms; whoever decodes stops all threads for as long as one call takes."""

EngineHash = int | bytes
"""The engine's own name of a block: 64 bits, or the whole digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksStored:
    """New full blocks, each following the one before, the first one following ``parent``.

    ``salt`` is the tenant's, which an engine mixes into the first block of a prompt; ``lora`` the
    name of the adapter, which it mixes into all. ``scoped`` says that something else is part of the
    hashes, as an image: tokens, salt and adapter do not name such blocks.
    """

    hashes: tuple[EngineHash, ...]
    parent: EngineHash | None
    token_ids: tuple[int, ...]
    block_tokens: int
    medium: str
    group: int
    salt: str
    scoped: bool
    lora: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksRemoved:
    """One copy of each of these blocks is gone."""

    hashes: tuple[EngineHash, ...]
    medium: str
    group: int


@dataclass(frozen=True, slots=True)
class AllCleared:
    """The engine holds nothing any more."""


EngineEvent = BlocksStored | BlocksRemoved | AllCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """What one message said. ``sequence`` counts from 0 at every start of the engine."""

    sequence: int
    events: tuple[EngineEvent, ...]


# Field order of the array form: vLLM's and SGLang's structs before the map form.
_STORED = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
    "lora_name", "extra_keys", "group_idx",
)  # fmt: skip
_REMOVED = ("block_hashes", "medium", "group_idx")


def decode_batch(frames: Sequence[bytes]) -> EventBatch:
    """The batch in the frames of one message; older publishers leave the topic out.

    Raises:
        ProtocolError: not a batch; nothing of it may be used.
    """
    if not 2 <= len(frames) <= 3 or len(frames[-2]) != 8:
        raise ProtocolError(f"engine events: got {len(frames)} frames, expected topic, seq, batch")
    if len(frames[-1]) > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"engine events: a batch of {len(frames[-1])} bytes is too long")
    try:
        batch = _unpacked(frames[-1])
    except (ValueError, TypeError, msgpack.UnpackException) as error:  # TypeError: a list as a key
        raise ProtocolError(f"engine events: not MessagePack ({error})") from error
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise ProtocolError(
            f"engine events: got {reprlib.repr(batch):.100}, expected [time, events, rank]"
        )
    events = tuple(event for raw in batch[1] if (event := _event(raw)) is not None)
    return EventBatch(int.from_bytes(frames[-2], "big"), events)


def _unpacked(payload: bytes) -> object:
    """The one value in ``payload``, decoded in pieces. Raises ValueError."""
    left = MAX_CONTAINERS

    def counted(container: object) -> object:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"more than {MAX_CONTAINERS} lists and maps")
        return container

    unpacker = msgpack.Unpacker(
        raw=False,
        strict_map_key=False,
        max_buffer_size=MAX_PAYLOAD_BYTES,
        list_hook=counted,
        object_hook=counted,
    )
    for start in range(0, len(payload), PIECE_BYTES):
        unpacker.feed(payload[start : start + PIECE_BYTES])
        try:
            value: object = unpacker.unpack()
        except msgpack.OutOfData:
            continue  # it goes on where it stopped
        if unpacker.tell() != len(payload):
            raise ValueError("more bytes after the batch")
        return value
    raise ValueError("truncated")


def _event(raw: object) -> EngineEvent | None:
    tag, fields = _tag_and_fields(raw)
    match tag:
        case "BlockStored":
            return _stored(fields)
        case "BlockRemoved":
            return BlocksRemoved(
                hashes=_hashes(fields), medium=_medium(fields), group=_group(fields)
            )
        case "AllBlocksCleared":
            return AllCleared()
        case _:
            return None


def _tag_and_fields(raw: object) -> tuple[object, dict[str, Any]]:
    if isinstance(raw, dict):
        return raw.get("type"), raw
    if isinstance(raw, list) and raw:
        order = {"BlockStored": _STORED, "BlockRemoved": _REMOVED}.get(str(raw[0]), ())
        return raw[0], dict(zip(order, raw[1:], strict=False))
    raise ProtocolError(
        f"engine events: got {reprlib.repr(raw):.100}, expected a map or a tagged array"
    )


def _stored(fields: dict[str, Any]) -> BlocksStored:
    hashes, tokens = _hashes(fields), fields.get("token_ids")
    size, parent = fields.get("block_size"), fields.get("parent_block_hash")
    whole = isinstance(tokens, list) and all(isinstance(t, int) and 0 <= t < 2**32 for t in tokens)
    if not whole or not isinstance(size, int) or size < 1:
        raise ProtocolError("engine events: BlockStored without token_ids or block_size")
    if parent is not None and not isinstance(parent, int | bytes):
        raise ProtocolError(f"engine events: parent_block_hash is {reprlib.repr(parent):.40}")
    lora = _lora(fields)
    salt, others = _salt(fields, lora, is_first=parent is None)
    return BlocksStored(
        hashes=hashes,
        parent=parent,
        token_ids=tuple(tokens or ()),
        block_tokens=size,
        medium=_medium(fields),
        group=_group(fields),
        salt=salt,
        scoped=others or (not lora and _is_set(fields.get("lora_id"))),
        lora=lora,
    )


def _lora(fields: dict[str, Any]) -> str:
    """Name of the adapter in the hashes; empty without one, or for one without a name."""
    name = fields.get("lora_name")
    return name if isinstance(name, str) else ""


def _salt(fields: dict[str, Any], lora: str, *, is_first: bool) -> tuple[str, bool]:
    """The salt in the hash of a prompt's first block, and whether anything else is in the hashes.

    An adapter's name leads the keys of each of its blocks. SGLang names the salt. vLLM puts it
    among the first block's extra keys, a list a block, without a tag: one text there is the salt,
    since images come with their positions.
    """
    extra = fields.get("extra_keys")
    keys = [_listed(key) for key in extra] if isinstance(extra, list) else []
    if lora:
        if not all(key[:1] == [lora] for key in keys):
            return "", True
        keys = [key[1:] for key in keys]
    named = fields.get("cache_salt")
    if isinstance(named, str) and named:
        return named, any(key not in ([], [named]) for key in keys)
    if is_first and keys and len(keys[0]) == 1 and isinstance(keys[0][0], str):
        return keys[0][0], any(keys[1:])
    return "", _is_set(named) or any(keys)


def _listed(key: object) -> list[object]:
    """One block's extra keys; an older engine sends a single one bare."""
    if isinstance(key, list):
        return key
    return [key] if _is_set(key) else []


def _hashes(fields: dict[str, Any]) -> tuple[EngineHash, ...]:
    hashes = fields.get("block_hashes")
    if not isinstance(hashes, list) or not all(map(_is_name, hashes)):
        raise ProtocolError(f"engine events: block_hashes is {reprlib.repr(hashes):.60}")
    return tuple(hashes)


def _is_name(name: object) -> bool:
    return isinstance(name, int) or (isinstance(name, bytes) and len(name) <= MAX_NAME)


def _medium(fields: dict[str, Any]) -> str:
    medium = fields.get("medium")
    if not isinstance(medium, str):
        return "GPU"
    if len(medium) > MAX_NAME:
        raise ProtocolError(f"engine events: medium is {reprlib.repr(medium):.60}")
    return medium


def _group(fields: dict[str, Any]) -> int:
    group = fields.get("group_idx")
    return group if isinstance(group, int) else 0


def _is_set(value: object) -> bool:
    return value not in (None, "", [], ())
