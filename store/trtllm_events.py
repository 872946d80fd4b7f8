"""KV events of TensorRT-LLM, from the body of one poll to records. Pure; must not know HTTP.

``POST /kv_cache_events`` of trtllm-serve answers with a JSON array and forgets what it told:
``{"event_id", "window_size", "data": {"type": ...}}``, with ``attention_dp_rank``, ``hash_algo``
and ``layer_group_id`` where they say something. Shapes as in ``KVCacheEventSerializer``
(``tensorrt_llm/_utils.py``, 1.2) and ``_event_manager.py`` of its newer cache manager, whose hashes
are hexadecimal text. Unknown types and fields are skipped; a known event of a wrong shape is an
error, because what it said is lost.
"""

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from prefixfleet.store.engine_events import BlocksRemoved, BlocksStored, EngineEvent, EngineHash
from prefixfleet.store.errors import ProtocolError

MAX_POLL_BYTES = 64 * 1024 * 1024
"""A token takes about 64 bytes: a million tokens between two polls."""
MAX_BLOCK_TOKENS = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class PolledEvent:
    """One event. ``number`` counts from 0 at every start of the engine, for each ``rank``.

    ``window`` is the attention window of the layers that it is about. ``said`` is empty where it
    changes nothing of what is held (a block moved between memories stays reusable).
    """

    number: int
    rank: int
    window: int
    kind: Literal["created", "stored", "removed", "other"]
    said: tuple[EngineEvent, ...] = ()


def decode_poll(body: bytes, block_tokens: int) -> tuple[PolledEvent, ...]:
    """Every event of one answer, in order. Blocks that are not full are left out.

    Raises:
        ProtocolError: not events; what the answer told is lost.
    """
    try:
        told = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"kv_cache_events: not JSON ({error})") from error
    if not isinstance(told, list):
        raise ProtocolError(f"kv_cache_events: got {_short(told)}, expected an array of events")
    return tuple(_event(raw, block_tokens) for raw in told)


def _event(raw: object, block_tokens: int) -> PolledEvent:
    if not isinstance(raw, dict) or not isinstance(data := raw.get("data"), dict):
        raise ProtocolError(f"kv_cache_events: got {_short(raw)}, expected event_id and data")
    number, rank = _count(raw, "event_id"), _count(raw, "attention_dp_rank", 0)
    window = _count(raw, "window_size", 0)
    place = (f"rank {rank}", _count(raw, "layer_group_id", 0))
    match data.get("type"):
        case "created":
            return PolledEvent(number=number, rank=rank, window=window, kind="created")
        case "stored":
            said: tuple[EngineEvent, ...] = tuple(_stored(data, place, block_tokens))
            return PolledEvent(number=number, rank=rank, window=window, kind="stored", said=said)
        case "removed":
            gone = BlocksRemoved(hashes=_hashes(data), medium=place[0], group=place[1])
            return PolledEvent(
                number=number, rank=rank, window=window, kind="removed", said=(gone,)
            )
        case _:
            return PolledEvent(number=number, rank=rank, window=window, kind="other")


@dataclass(frozen=True, slots=True)
class _Block:
    name: EngineHash
    token_ids: tuple[int, ...]
    salt: str
    scoped: bool


def _stored(
    data: dict[str, Any], place: tuple[str, int], block_tokens: int
) -> Sequence[BlocksStored]:
    """The full blocks, cut where one begins that its tokens do not name.

    The last block of a prompt is told before it is full: fewer tokens than the others. More tokens
    than ``block_tokens`` in any, or another number in one that is not the last, is another block
    size, and is told as it is: whoever follows must see that nothing will match.
    """
    told = data.get("blocks")
    if not isinstance(told, list):
        raise ProtocolError(f"kv_cache_events: stored without blocks: {_short(data)}")
    parent = data.get("parent_hash")
    above = None if parent is None else _hash(parent)
    blocks = [_block(one, data) for one in told]
    size = max((len(block.token_ids) for block in blocks), default=0)
    if size <= block_tokens and all(len(b.token_ids) == block_tokens for b in blocks[:-1]):
        size = block_tokens
    runs: list[BlocksStored] = []
    for run in _runs([block for block in blocks if len(block.token_ids) == size]):
        runs.append(
            BlocksStored(
                hashes=tuple(block.name for block in run),
                parent=above,
                token_ids=tuple(token for block in run for token in block.token_ids),
                block_tokens=size,
                medium=place[0],
                group=place[1],
                salt=run[0].salt if above is None else "",
                scoped=run[0].scoped,
            )
        )
        above = run[-1].name
    return runs


def _runs(blocks: Sequence[_Block]) -> list[list[_Block]]:
    runs: list[list[_Block]] = []
    for block in blocks:
        if runs and runs[-1][-1].scoped == block.scoped:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs


def _block(raw: object, data: dict[str, Any]) -> _Block:
    """Older engines tell a salt as a number, which names no salt of ours; they tell no LoRA."""
    if not isinstance(raw, dict) or not isinstance(tokens := raw.get("tokens"), list):
        raise ProtocolError(f"kv_cache_events: got {_short(raw)}, expected block_hash and tokens")
    if len(tokens) > MAX_BLOCK_TOKENS:
        raise ProtocolError(f"kv_cache_events: a block of {len(tokens)} tokens")
    pairs = [_token(token) for token in tokens]
    salt = raw.get("cache_salt")
    others = [raw.get("mm_keys"), raw.get("lora_id"), raw.get("lora_name"), data.get("lora_name")]
    named = salt if isinstance(salt, str) else ""
    scoped = (
        any(extra for _, extra in pairs)
        or any(other not in (None, "", []) for other in others)
        or salt not in (None, named)
    )
    return _Block(_hash(raw.get("block_hash")), tuple(t for t, _ in pairs), named, scoped)


def _token(raw: object) -> tuple[int, bool]:
    """(its id, whether more than the id names it: images and prompt tuning)."""
    if isinstance(raw, dict):
        token, extra = raw.get("token_id"), raw.get("token_extra_id")
        if isinstance(token, str):  # the digest of an image in a token's place
            return 0, True
        if isinstance(token, int) and 0 <= token < 2**32:
            return token, extra not in (None, 0)
    raise ProtocolError(f"kv_cache_events: got the token {_short(raw)}, expected token_id")


def _hashes(data: dict[str, Any]) -> tuple[EngineHash, ...]:
    told = data.get("block_hashes")
    if not isinstance(told, list):
        raise ProtocolError(f"kv_cache_events: removed without block_hashes: {_short(data)}")
    return tuple(_hash(one) for one in told)


def _hash(raw: object) -> EngineHash:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw % 2**64  # some write the same 64 bits with a sign
    if isinstance(raw, str) and raw:
        return raw.encode("utf-8", "surrogatepass")
    raise ProtocolError(f"kv_cache_events: got the hash {_short(raw)}, expected 64 bits or text")


def _count(raw: dict[str, Any], name: str, absent: int | None = None) -> int:
    value = raw.get(name, absent)
    if value is None and absent is not None:
        return absent
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63:
        return value
    raise ProtocolError(f"kv_cache_events: {name} is {_short(value)}, expected a number from 0 on")


def _short(value: object) -> str:
    return f"{reprlib.repr(value):.100}"
