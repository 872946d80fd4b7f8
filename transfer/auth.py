"""Mutual proof that both ends know the cluster secret, before anything else is said. No I/O.

HMAC-SHA-256 over everything the two said, with a key derived from the secret and a different
label for each role: a proof is of no use to the other role, for another connection, another
version or other names. The secret itself, or anything that depends on it alone, is never sent.
"""

import hashlib
import hmac
import secrets

import msgpack

from prefixfleet.store.errors import PeerRefused
from prefixfleet.transfer.wire import WIRE_VERSION, Challenge, Hello

NONCE_BYTES = 32


class Handshake:
    """What one end knows of one handshake. Owned by the connection."""

    def __init__(self, secret: bytes, hello: Hello, challenge: Challenge) -> None:
        self._key = hashlib.blake2b(secret, digest_size=32, person=b"pf-peer-auth").digest()
        self._said = (WIRE_VERSION, hello.link, hello.node, hello.nonce)
        self._answered = (challenge.node, challenge.nonce)

    def proof(self, role: str, attachment: bytes = b"") -> bytes:
        """Proof of the end that has ``role``: "caller" or "listener", and that it sent the
        attachment."""
        packed = msgpack.packb(("prefixfleet", role, *self._said, *self._answered, attachment))
        return hmac.digest(self._key, packed, "sha256")

    def check(self, role: str, proof: bytes, attachment: bytes = b"") -> None:
        """Raises `PeerRefused` if ``proof`` is not that of an end with ``role`` and our secret."""
        if not hmac.compare_digest(self.proof(role, attachment), proof):
            raise PeerRefused(
                f"the {role} does not know this fleet's secret: set PREFIXFLEET_SECRET_FILE to "
                "a file with the same bytes on every host"
            )


def nonce() -> bytes:
    """A fresh random nonce."""
    return secrets.token_bytes(NONCE_BYTES)
