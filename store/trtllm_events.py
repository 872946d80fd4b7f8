"""KV events of TensorRT-LLM, from the body of one poll to records. Pure; must not know HTTP.

``POST /kv_cache_events`` of trtllm-serve answers with a JSON array and forgets what it told:
``{"event_id", "window_size", "data": {"type": ...}}``, with ``attention_dp_rank``, ``hash_algo``
and ``layer_group_id`` where they say something. Shapes as in ``KVCacheEventSerializer``
(``tensorrt_llm/_utils.py``, 1.2) and ``_event_manager.py`` of its newer cache manager, whose hashes
are hexadecimal text. Unknown types and fields are skipped; a known event of a wrong shape is an
error, because what it said is lost.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec

from prefixfleet.store.engine_events import BlocksRemoved, BlocksStored, EngineHash
from prefixfleet.store.errors import ProtocolError

MAX_POLL_BYTES = 64 * 1024 * 1024
"""A token takes about 64 bytes: a million tokens between two polls."""
MAX_POLL_VALUES = 4_194_304
"""By commas, counted before anything is decoded: that million tokens has three million."""
MAX_POLL_ITEMS = 262_144
"""Events and block hashes in one answer: that million in blocks of four."""
MAX_BLOCK_TOKENS = 65_536

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=1_023)]
"""Something is kept for each."""
Hash = int | Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Said = BlocksStored | BlocksRemoved


class PolledEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event. ``number`` counts from 0 at every start of the engine, for each ``rank``.

    ``window`` is the attention window of the layers that it is about. ``said`` is empty where it
    changes nothing of what is held (a block moved between memories stays reusable).
    """

    number: int
    rank: int
    window: int
    said: tuple[Said, ...] = ()


class _Token(msgspec.Struct, frozen=True, gc=False):
    """Its id is text where an image is in its place; an extra id is an image's or a prompt's."""

    token_id: Annotated[int, msgspec.Meta(ge=0, lt=2**32)] | str
    token_extra_id: int | None = 0


class _Block(msgspec.Struct, frozen=True):
    """Older engines tell a salt as a number, which names no salt of ours; they tell no LoRA."""

    block_hash: Hash
    tokens: Annotated[list[_Token], msgspec.Meta(max_length=MAX_BLOCK_TOKENS)]
    cache_salt: int | str | None = None
    mm_keys: list[Any] | None = None
    lora_id: int | str | None = None
    lora_name: str | None = None

    @property
    def is_scoped(self) -> bool:
        """Whether anything but its tokens and a salt of ours is in its hash."""
        others = (self.mm_keys, self.lora_id, self.lora_name)
        return (
            any(other not in (None, "", []) for other in others)
            or isinstance(self.cache_salt, int)
            or any(t.token_extra_id or isinstance(t.token_id, str) for t in self.tokens)
        )


class _Data(msgspec.Struct, frozen=True):
    type: str
    parent_hash: Hash | None = None
    blocks: list[msgspec.Raw] | None = None
    block_hashes: list[Hash] | None = None
    lora_name: str | None = None


class _Told(msgspec.Struct, frozen=True):
    event_id: Count
    data: _Data
    window_size: Count | None = None
    attention_dp_rank: Rank | None = None
    layer_group_id: Count | None = None


# One by one: whoever decodes in a thread stops all others for as long as one call takes.
_EVENTS = msgspec.json.Decoder(list[msgspec.Raw])
_EVENT = msgspec.json.Decoder(_Told)
_BLOCK = msgspec.json.Decoder(_Block)


def decode_poll(body: bytes, block_tokens: int) -> tuple[PolledEvent, ...]:
    """Every event of one answer, in order. Blocks that are not full are left out.

    Raises:
        ProtocolError: not events, or too many; what the answer told is lost.
    """
    if (values := body.count(b",")) > MAX_POLL_VALUES:
        raise ProtocolError(
            f"kv_cache_events: got {values} values, expected {MAX_POLL_VALUES} at most"
        )
    try:
        told = [_EVENT.decode(event) for event in _EVENTS.decode(body)]
        if (items := sum(map(_items, told))) > MAX_POLL_ITEMS:
            raise ProtocolError(
                f"kv_cache_events: got {items} events and hashes, expected {MAX_POLL_ITEMS} at most"
            )
        return tuple(
            PolledEvent(
                number=event.event_id,
                rank=event.attention_dp_rank or 0,
                window=event.window_size or 0,
                said=tuple(_said(event, block_tokens)),
            )
            for event in told
        )
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"kv_cache_events: {error}") from error


def _items(event: _Told) -> int:
    return 1 + len(event.data.blocks or ()) + len(event.data.block_hashes or ())


def _said(event: _Told, block_tokens: int) -> Iterator[Said]:
    data, medium = event.data, f"rank {event.attention_dp_rank or 0}"
    group = event.layer_group_id or 0
    if data.type == "stored":
        if data.blocks is None:
            raise ProtocolError("kv_cache_events: an event of type stored without blocks")
        blocks = [_BLOCK.decode(block) for block in data.blocks]
        yield from _stored(data, blocks, (medium, group), block_tokens)
    elif data.type == "removed":
        if data.block_hashes is None:
            raise ProtocolError("kv_cache_events: an event of type removed without block_hashes")
        names = tuple(_name(one) for one in data.block_hashes)
        yield BlocksRemoved(hashes=names, medium=medium, group=group)


def _stored(
    data: _Data, told: Sequence[_Block], place: tuple[str, int], block_tokens: int
) -> Iterator[BlocksStored]:
    """The full blocks, cut where one begins that its tokens do not name.

    The last block of a prompt is told before it is full: fewer tokens than the others. More tokens
    than ``block_tokens`` in any, or another number in one that is not the last, is another block
    size, and is told as it is: whoever follows must see that nothing will match.
    """
    above = None if data.parent_hash is None else _name(data.parent_hash)
    size = max((len(block.tokens) for block in told), default=0)
    if size <= block_tokens and all(len(b.tokens) == block_tokens for b in told[:-1]):
        size = block_tokens
    for run, is_scoped in _runs([block for block in told if len(block.tokens) == size]):
        salt = run[0].cache_salt
        yield BlocksStored(
            hashes=tuple(_name(block.block_hash) for block in run),
            parent=above,
            token_ids=tuple(_ids(run)) if not is_scoped else (),
            block_tokens=size,
            medium=place[0],
            group=place[1],
            salt=salt if above is None and isinstance(salt, str) else "",
            scoped=is_scoped or bool(data.lora_name),
        )
        above = _name(run[-1].block_hash)


def _runs(blocks: Sequence[_Block]) -> list[tuple[list[_Block], bool]]:
    """Blocks that follow each other and are all scoped, or all not."""
    runs: list[tuple[list[_Block], bool]] = []
    for block in blocks:
        is_scoped = block.is_scoped
        if runs and runs[-1][1] == is_scoped:
            runs[-1][0].append(block)
        else:
            runs.append(([block], is_scoped))
    return runs


def _ids(run: Sequence[_Block]) -> Iterator[int]:
    """Token ids of blocks that are not scoped, none of which is text."""
    for block in run:
        for token in block.tokens:
            if isinstance(token.token_id, int):
                yield token.token_id


def _name(told: int | str) -> EngineHash:
    """Some write the same 64 bits with a sign."""
    return told % 2**64 if isinstance(told, int) else told.encode("utf-8", "surrogatepass")
