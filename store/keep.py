"""An operator's wish that a prefix stays on a node: what a router or a command sends to the node.

``POST {NodeRecord.http}/keep`` with the body of `encode_keep` and its `sign` in the header
`SIGNATURE_HEADER`, under `keep_key`; the answer's JSON says how many leading blocks are ``covered``
(a quota may end before the chain does). Must not know HTTP servers or clients.
"""

import hashlib
from dataclasses import dataclass
from typing import Annotated

import msgspec

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.errors import PeerRefused, ProtocolError
from prefixfleet.store.namespace import DIGEST_BYTES
from prefixfleet.store.prefetch import is_signed
from prefixfleet.store.records import VERSION
from prefixfleet.store.retention import MAX_PRIORITY, MAX_TTL_S

KEEP_PATH = "/keep"

Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Keep ``chain``, from its root, for ``ttl_s`` seconds from now; 0 ends an earlier wish.

    ``namespace`` is the digest that the node's blocks bear. Where the node's quota is full, the
    wish takes the place of those of a lower ``priority``.
    """

    namespace: bytes
    chain: tuple[BlockHash, ...]
    ttl_s: float
    priority: int = 0


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    namespace: Digest
    chain: list[Digest]
    ttl_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_TTL_S)]
    priority: Annotated[int, msgspec.Meta(ge=0, le=MAX_PRIORITY)] = 0


def keep_key(secret: bytes) -> bytes:
    """Key of `sign`, derived from the cluster secret for this use only: a prefetch hint cannot
    be sent here again as a wish."""
    return hashlib.blake2b(secret, digest_size=32, person=b"pf-keep").digest()


def encode_keep(keep: Keep) -> bytes:
    """MessagePack body of the request; `open_keep` is its inverse."""
    return msgspec.msgpack.encode(
        _Body(VERSION, keep.namespace, list(keep.chain), float(keep.ttl_s), keep.priority)
    )


def open_keep(body: bytes, signature: str, key: bytes) -> Keep:
    """The wish in ``body``, read only after its signature held.

    Raises:
        PeerRefused: the sender does not know the cluster secret.
        ProtocolError: signed, but not a wish of this version.
    """
    if not is_signed(body, signature, key):
        raise PeerRefused("keep: wrong signature; do all hosts have the same cluster secret?")
    try:
        wish = msgspec.msgpack.decode(body, type=_Body)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise ProtocolError(f"keep: {error}") from error
    if wish.version != VERSION:
        raise ProtocolError(f"keep: got version {wish.version}, expected {VERSION}")
    return Keep(
        namespace=wish.namespace,
        chain=tuple(wish.chain),
        ttl_s=wish.ttl_s,
        priority=wish.priority,
    )
