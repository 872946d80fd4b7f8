"""The hint a router sends to a node at the moment it decides, so that the pull overlaps the queue.

``POST {NodeRecord.http}/prefetch`` with the body of `encode_prefetch` and its `sign` in the header
`SIGNATURE_HEADER`. Fire and forget: a hint that is lost, late or sent twice costs time only,
since the engine hands the same plan to the same node again. Must not know HTTP servers or clients.
"""

import hashlib
import hmac
from dataclasses import dataclass

import msgpack

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.errors import ConfigError, PeerRefused, ProtocolError
from prefixfleet.store.namespace import DIGEST_BYTES
from prefixfleet.store.records import VERSION, PullPlan

PREFETCH_PATH = "/prefetch"
SIGNATURE_HEADER = "x-prefixfleet-signature"
MAX_PREFETCH_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch:
    """A plan, the leading hashes it wants (``plan.blocks`` of them) and their namespace digest."""

    plan: PullPlan
    namespace: bytes
    chain: tuple[BlockHash, ...]


def prefetch_key(secret: bytes) -> bytes:
    """Key of `sign`, derived from the cluster secret for this use only."""
    return hashlib.blake2b(secret, digest_size=32, person=b"pf-prefetch").digest()


def sign(body: bytes, key: bytes) -> str:
    """Hex HMAC-SHA256 of ``body``, the value of `SIGNATURE_HEADER`."""
    return hmac.new(key, body, hashlib.sha256).hexdigest()


def is_signed(body: bytes, signature: str, key: bytes) -> bool:
    """Whether ``signature``, a header of any bytes, is that of `sign`."""
    given = signature.encode("utf-8", "surrogateescape")
    return hmac.compare_digest(sign(body, key).encode(), given)


def encode_prefetch(prefetch: Prefetch) -> bytes:
    """MessagePack body of the request; `open_prefetch` is its inverse."""
    body: bytes = msgpack.packb(
        {
            "version": VERSION,
            "plan": prefetch.plan.encode(),
            "namespace": prefetch.namespace,
            "chain": b"".join(prefetch.chain),
        },
        use_bin_type=True,
    )
    return body


def open_prefetch(body: bytes, signature: str, key: bytes) -> Prefetch:
    """The hint in ``body``, read only after its signature held.

    Raises:
        PeerRefused: the sender does not know the cluster secret.
        ProtocolError: signed, but not a hint of this version.
    """
    if not is_signed(body, signature, key):
        raise PeerRefused("prefetch: wrong signature; do all hosts have the same cluster secret?")
    try:
        values = msgpack.unpackb(body, raw=False, strict_map_key=True)
        if values["version"] != VERSION:
            raise ProtocolError(f"prefetch: got version {values['version']!r}, expected {VERSION}")
        plan = PullPlan.decode(values["plan"])
        namespace = _expect_bytes(values["namespace"])
        return Prefetch(
            plan=plan, namespace=namespace, chain=_split(_expect_bytes(values["chain"]))
        )
    except (ValueError, TypeError, KeyError, msgpack.UnpackException, ConfigError) as error:
        raise ProtocolError(f"prefetch: {type(error).__name__}: {error}") from error


def _expect_bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"got {type(value).__name__}, expected bytes")
    return value


def _split(joined: bytes) -> tuple[BlockHash, ...]:
    if len(joined) % DIGEST_BYTES:
        raise ProtocolError(f"prefetch: chain is no whole number of {DIGEST_BYTES}-byte hashes")
    return tuple(joined[i : i + DIGEST_BYTES] for i in range(0, len(joined), DIGEST_BYTES))
