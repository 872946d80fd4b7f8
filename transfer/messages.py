"""Questions of a puller to a source, and its answers: what travels through `Peer.ask`.

Hash lists travel as one ``bytes``. Seconds on the wire are always remaining seconds.
"""

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.errors import (
    EpochChanged,
    LayoutMismatch,
    LeaseExpired,
    PeerBusy,
    PeerRefused,
    ProtocolError,
    PullFailed,
)
from prefixfleet.store.namespace import DIGEST_BYTES
from prefixfleet.transfer import wire

MAX_BLOCKS = 65_536
"""Blocks of one lease."""
MAX_ALONG_BYTES = 1024 * 1024
"""Slots that may travel with an answer."""

Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Hashes = Annotated[bytes, msgspec.Meta(max_length=MAX_BLOCKS * DIGEST_BYTES)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Slot = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
"""As pools number them: its place in the segment always fits a range."""


class Lease(msgspec.Struct, frozen=True, tag_field="ask", tag="lease", forbid_unknown_fields=True):
    """Keep in place, and tell me where, the leading ones of ``hashes`` that you have.

    If they are at most ``along_bytes`` together, send them with the answer instead.
    """

    namespace: Digest
    epoch: Count
    payload_bytes: Annotated[int, msgspec.Meta(ge=1)]
    shards: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
    hashes: Hashes
    budget_s: Annotated[float, msgspec.Meta(gt=0, le=3600)]
    along_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_ALONG_BYTES)] = 0


class Release(
    msgspec.Struct, frozen=True, tag_field="ask", tag="release", forbid_unknown_fields=True
):
    """I am done with the lease (0: had none). ``spoiled`` is a block that did not pass its check
    here, or b""."""

    lease: Count
    spoiled: Annotated[bytes, msgspec.Meta(max_length=DIGEST_BYTES)] = b""


class Join(msgspec.Struct, frozen=True, tag_field="ask", tag="join", forbid_unknown_fields=True):
    """Take part in the broadcast ``group`` of a chain from its root, which I am the source of.

    ``epoch`` is the life of the one asked; who takes part learns it from the store at ``store``.
    """

    namespace: Digest
    epoch: Count
    payload_bytes: Annotated[int, msgspec.Meta(ge=1)]
    shards: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
    hashes: Hashes
    group: wire.Name
    store: Annotated[str, msgspec.Meta(min_length=3, max_length=300)]
    budget_s: Annotated[float, msgspec.Meta(gt=0, le=3600)]


class Leased(
    msgspec.Struct, frozen=True, tag_field="answer", tag="leased", forbid_unknown_fields=True
):
    """Slot numbers of the leading blocks that are here, kept for ``seconds`` from now.

    ``lease`` is 0 when there is none of them, or ``along`` is the slots themselves: nothing to
    release. ``queued_bytes`` are those that other leases still promise: how busy the source is.
    ``read_s`` is how long the question waited for blocks that were not in memory.
    """

    lease: Count
    slots: Annotated[list[Slot], msgspec.Meta(max_length=MAX_BLOCKS)]
    seconds: Annotated[float, msgspec.Meta(ge=0, le=3600)]
    queued_bytes: Count = 0
    along: Annotated[bytes, msgspec.Meta(max_length=MAX_ALONG_BYTES)] = b""
    read_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0


class Released(
    msgspec.Struct, frozen=True, tag_field="answer", tag="released", forbid_unknown_fields=True
):
    """The lease has ended."""


class Joined(
    msgspec.Struct, frozen=True, tag_field="answer", tag="joined", forbid_unknown_fields=True
):
    """I have room for the blocks and wait for them."""


class No(msgspec.Struct, frozen=True, tag_field="answer", tag="no", forbid_unknown_fields=True):
    """The question is understood and refused; ``reason`` says which error that is."""

    reason: wire.Name
    detail: Annotated[str, msgspec.Meta(max_length=400)]


Question: TypeAlias = Lease | Release | Join
Answer: TypeAlias = Leased | Released | Joined | No

_ERRORS: dict[str, type[PullFailed]] = {
    error.reason: error
    for error in (EpochChanged, LayoutMismatch, LeaseExpired, PeerBusy, PeerRefused)
}


def refusal(error: PullFailed) -> No:
    """The answer that makes the asker raise ``error``."""
    return No(error.reason, str(error)[:400])


def decode_answer(body: bytes, node: str) -> Leased | Released | Joined:
    """The answer of ``node``. Raises what it refused with, or `ProtocolError`."""
    answer: Answer = wire.unpack(body, Answer)
    if isinstance(answer, No):
        raise _ERRORS.get(answer.reason, PeerRefused)(f"{node}: {answer.detail}")
    return answer


def join_hashes(hashes: Sequence[BlockHash]) -> bytes:
    """Hash list to wire form."""
    return b"".join(hashes)


def split_hashes(joined: bytes) -> list[BlockHash]:
    """Wire form to hash list. Raises `ProtocolError` if it is no whole number of hashes."""
    if len(joined) % DIGEST_BYTES:
        raise ProtocolError(f"hash list: got {len(joined)} bytes, expected n x {DIGEST_BYTES}")
    return [joined[i : i + DIGEST_BYTES] for i in range(0, len(joined), DIGEST_BYTES)]
