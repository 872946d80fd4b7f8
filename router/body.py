"""A request's JSON body: read the few fields that routing needs, leave every other byte alone.

The engine validates requests, not the router: a field of an odd type reads as absent here and
goes on to the engine, which says in its own words what is wrong with it.
"""

import re
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET

from prefixfleet.router.errors import BadRequest

T = TypeVar("T")
TRANSFER_KEY = "kv_transfer_params"
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class _Usual(msgspec.Struct):
    """What nearly every request is asked for, read in one pass; each field of one type."""

    model: str | None = None
    messages: list[Any] | None = None
    stream: bool | None = None
    n: int | None = None
    cache_salt: str | msgspec.UnsetType | None = UNSET
    tools: list[Any] | None = None
    documents: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: Any = None
    truncate_prompt_tokens: Any = None
    prompt_embeds: Any = None
    mm_processor_kwargs: Any = None
    kv_transfer_params: Any = UNSET


_UNKNOWN: Any = object()
_HALF = re.compile(rb"\\u[dD][89aAbB][\da-fA-F]{2}(?!\\u[dD][c-fC-F])")  # a text was cut there
_USUAL = msgspec.json.Decoder(_Usual)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Body:
    """A JSON object as it arrived."""

    __slots__ = ("_fields", "_usual", "raw")

    def __init__(self, raw: bytes) -> None:
        """Raises `BadRequest` if ``raw`` is not one JSON object."""
        self.raw = raw
        self._usual: _Usual | None = None
        self._fields: dict[str, msgspec.Raw] | None = None
        try:
            self._usual = _USUAL.decode(raw)
        except _UNREADABLE:  # perhaps one field only: each is read on its own
            self._fields = _decoded(raw)

    @property
    def fields(self) -> dict[str, msgspec.Raw]:
        """The top-level fields, still encoded."""
        if self._fields is None:
            self._fields = _decoded(self.raw)
        return self._fields

    def get(self, name: str, kind: type[T]) -> T | None:
        """Field ``name`` if it is there, not null and of type ``kind``; else None."""
        value = getattr(self._usual, name, _UNKNOWN)
        if value is not _UNKNOWN:
            return None if value is UNSET else value
        raw = self.fields.get(name)
        if raw is None:
            return None
        try:
            return msgspec.json.decode(raw, type=kind)
        except _UNREADABLE:
            return None

    def has(self, name: str) -> bool:
        """Whether field ``name`` is there, and be it null."""
        if self._usual is not None and name in (TRANSFER_KEY, "cache_salt"):
            return getattr(self._usual, name) is not UNSET
        return name in self.fields

    def is_set(self, name: str) -> bool:
        """Whether field ``name`` is there and not null, of whatever type."""
        value = getattr(self._usual, name, _UNKNOWN)
        if value is not _UNKNOWN:
            return value is not None and value is not UNSET
        raw = self.fields.get(name)
        return raw is not None and bytes(raw) != b"null"


def read_body(raw: bytes) -> Body:
    """Raises `BadRequest` if ``raw`` is not one JSON object."""
    return Body(raw)


def _decoded(raw: bytes) -> dict[str, msgspec.Raw]:
    try:
        return _FIELDS.decode(raw)
    except _UNREADABLE as error:
        half = _HALF.search(raw)
        cut = f"; half of a character: {half[0].decode()} without its second part" if half else ""
        raise BadRequest(f"the body is not a JSON object: {error}{cut}") from None


def with_fields(body: Body, fields: dict[str, Any]) -> bytes:
    """The body with ``fields`` set; what a client said in their place is dropped.

    Every other byte stays as it came. With an ordinary body this is one copy, no encoding.
    """
    if any(map(body.has, fields)):
        return msgspec.json.encode({**body.fields, **fields})
    end = body.raw.rindex(b"}")
    head = body.raw[:end]
    comma = b"" if head.rstrip().endswith(b"{") else b","
    # what is encoded here without its first brace ends with the brace that the body had
    return b"%b%b%b" % (head, comma, msgspec.json.encode(fields)[1:])
