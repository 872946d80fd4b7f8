"""A request's JSON body: read the few fields that routing needs, leave every other byte alone.

The engine validates requests, not the router: a field of an odd type reads as absent here and
goes on to the engine, which says in its own words what is wrong with it.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from prefixfleet.router.errors import BadRequest

T = TypeVar("T")
TRANSFER_KEY = "kv_transfer_params"
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class Body:
    """A JSON object as it arrived, and its top-level fields, still encoded."""

    raw: bytes
    fields: dict[str, msgspec.Raw]

    def get(self, name: str, kind: type[T]) -> T | None:
        """Field ``name`` if it is there, not null and of type ``kind``; else None."""
        raw = self.fields.get(name)
        if raw is None:
            return None
        try:
            return msgspec.json.decode(raw, type=kind)
        except _UNREADABLE:
            return None

    def is_set(self, name: str) -> bool:
        """Whether field ``name`` is there and not null, of whatever type."""
        raw = self.fields.get(name)
        return raw is not None and bytes(raw) != b"null"


def read_body(raw: bytes) -> Body:
    """Raises `BadRequest` if ``raw`` is not one JSON object."""
    try:
        return Body(raw, _FIELDS.decode(raw))
    except _UNREADABLE as error:
        raise BadRequest(f"the body is not a JSON object: {error}") from None


def with_fields(body: Body, fields: dict[str, Any]) -> bytes:
    """The body with ``fields`` set; what a client said in their place is dropped.

    Every other byte stays as it came. With an ordinary body this is one copy, no encoding.
    """
    if not fields.keys().isdisjoint(body.fields):
        return msgspec.json.encode({**body.fields, **fields})
    end = body.raw.rindex(b"}")
    comma = b"," if body.fields else b""
    # what is encoded here without its first brace ends with the brace that the body had
    return b"%b%b%b" % (body.raw[:end], comma, msgspec.json.encode(fields)[1:])
