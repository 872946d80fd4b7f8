"""The questions of `engine_channel` as checked, frozen values: the server's side of its table.

Must not know sockets or pools. Every field is checked for its type and range here, so that what
comes after can trust it.
"""

import reprlib
from dataclasses import fields
from typing import Annotated, Any, TypeAlias

import msgspec

from prefixfleet.cluster.engine_channel import CHANNEL_VERSION
from prefixfleet.store.errors import ConfigError, ProtocolError
from prefixfleet.store.namespace import DIGEST_BYTES, Namespace
from prefixfleet.store.records import Outcome, PullPlan
from prefixfleet.store.slot import SlotLayout

Id = Annotated[int, msgspec.Meta(ge=0)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Endpoint = Annotated[str, msgspec.Meta(max_length=256, pattern=r"^((tcp|ipc)://\S+)?$")]
Budget = Annotated[float, msgspec.Meta(ge=0, le=600)]


class Hello(msgspec.Struct, frozen=True, tag_field="op", tag="hello", kw_only=True):
    """First question of a connection: what the engine is."""

    id: Id
    version: int
    engine: str
    role: str
    rank: Rank
    namespace: dict[str, Any]
    payload_bytes: int
    shards: int
    events: Endpoint = ""  # ZeroMQ, of the engine's own KV events; empty: it tells none
    replay: Endpoint = ""

    def identity(self) -> Namespace:
        """The engine's namespace. Raises `ConfigError`."""
        if self.version != CHANNEL_VERSION:
            raise ConfigError(
                f"engine channel: got version {self.version}, expected {CHANNEL_VERSION}; "
                "install the same prefixfleet for the engine and the node daemon"
            )
        return _namespace(self.namespace)

    def layout(self) -> SlotLayout:
        """Size of the slots that the engine needs. Raises `ConfigError`."""
        return SlotLayout(payload_bytes=self.payload_bytes, shards=self.shards)


class Prepare(msgspec.Struct, frozen=True, tag_field="op", tag="prepare", kw_only=True):
    """Pin what is here of a chain, and pull more of it if the plan says so."""

    id: Id
    request: RequestId
    chain: bytes
    plan: dict[str, Any] | None
    budget_s: Budget

    def pull_plan(self) -> PullPlan | None:
        """The router's plan. Raises `ConfigError`."""
        return None if self.plan is None else PullPlan.from_map(self.plan)


class Release(msgspec.Struct, frozen=True, tag_field="op", tag="release", kw_only=True):
    """Unpin what `Prepare` pinned for this request; ``copied`` blocks of it were read meanwhile."""

    id: Id
    request: RequestId
    copied: Annotated[int, msgspec.Meta(ge=0)] = 0
    copy_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 0.0


class Reserve(msgspec.Struct, frozen=True, tag_field="op", tag="reserve", kw_only=True):
    """Slots to write the blocks that follow ``parent``."""

    id: Id
    parent: bytes
    hashes: bytes
    rank: Rank

    def parent_hash(self) -> bytes:
        """The block before the first one; empty at the root. Raises `ProtocolError`."""
        if len(self.parent) not in (0, DIGEST_BYTES):
            raise ProtocolError(
                f"reserve: parent of {len(self.parent)} bytes, expected 0 or {DIGEST_BYTES}"
            )
        return self.parent


class Commit(msgspec.Struct, frozen=True, tag_field="op", tag="commit", kw_only=True):
    """This rank's shards of these blocks are written and sealed."""

    id: Id
    hashes: bytes
    rank: Rank


class Abandon(msgspec.Struct, frozen=True, tag_field="op", tag="abandon", kw_only=True):
    """This rank will not write these blocks."""

    id: Id
    hashes: bytes
    rank: Rank


class Discard(msgspec.Struct, frozen=True, tag_field="op", tag="discard", kw_only=True):
    """An engine found these blocks damaged."""

    id: Id
    hashes: bytes


class Report(msgspec.Struct, frozen=True, tag_field="op", tag="outcome", kw_only=True):
    """What really happened to one request's prefix."""

    id: Id
    outcome: dict[str, Any]

    def record(self) -> Outcome:
        """The outcome. Raises `ConfigError`."""
        return Outcome.from_map(self.outcome)


Question: TypeAlias = Hello | Prepare | Release | Reserve | Commit | Abandon | Discard | Report


def parse_question(message: dict[str, Any]) -> Question:
    """The question in a frame. Raises `ProtocolError` on anything else."""
    try:
        question: Question = msgspec.convert(message, Question, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise ProtocolError(
            f"engine question {reprlib.repr(message.get('op')):.40}: {error}"
        ) from error
    return question


def _namespace(values: dict[str, Any]) -> Namespace:
    expected = {f.name for f in fields(Namespace)}
    if set(values) != expected:
        raise ConfigError(
            f"engine's namespace: got fields {sorted(values)}, expected {sorted(expected)}"
        )
    try:
        return msgspec.convert(values, Namespace)
    except msgspec.ValidationError as error:
        raise ConfigError(f"engine's namespace: {error}") from error
