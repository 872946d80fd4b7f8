"""API keys: who a client is, whose cache it may reuse, how much it may ask for.

The file holds SHA-256 digests, never keys; it is read again when it changes. A tenant's prefixes
are its own: its salt becomes part of every chain it computes, so nobody else can match them or see
by the time of an answer that they exist. Tenants that say ``shared_cache`` share with everybody.
"""

import hashlib
import hmac
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec

from prefixfleet.router.errors import Unauthorized
from prefixfleet.router.watched_file import WatchedFile

log = logging.getLogger(__name__)

Positive = Annotated[float, msgspec.Meta(gt=0)]


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One entry of the file. Limits that are absent do not limit.

    ``may_keep`` lets it ask that a prompt's prefix stays on its node (within the node's quota);
    ``dashboard`` lets it watch the whole fleet, every tenant's traffic included.
    ``tier`` labels metrics and may be shared by tenants. Higher ``priority`` goes first;
    among equals, ``weight`` divides the fleet between tenants that wait. The two SLOs stand in the
    place of the router's own: time to first token, and time between tokens.
    """

    name: Annotated[str, msgspec.Meta(min_length=1)]
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    tenant: Annotated[str, msgspec.Meta(min_length=1)]
    tier: Annotated[str, msgspec.Meta(pattern="^[a-z0-9_]{1,20}$")] = "default"
    shared_cache: bool = False
    may_keep: bool = False
    dashboard: bool = False
    priority: int = 0
    weight: Positive = 1.0
    max_in_flight: Annotated[int, msgspec.Meta(ge=1)] | None = None
    requests_per_s: Positive | None = None
    tokens_per_s: Positive | None = None
    ttft_slo_s: Positive | None = None
    tbt_slo_s: Positive | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[Key]


ANYBODY = Key(name="anybody", sha256="0" * 64, tenant="default", shared_cache=True, may_keep=True)
"""Whoever asks a router without a key file."""


@dataclass(slots=True)
class Keys:
    """Owned by the router's event loop. Without a file everybody is `ANYBODY`."""

    path: Path | None
    _by_digest: dict[str, Key] = field(default_factory=dict)
    _file: WatchedFile | None = field(init=False)

    def __post_init__(self) -> None:
        self._file = WatchedFile("PREFIXFLEET_ROUTER_KEYS_FILE", self.path) if self.path else None

    def load(self) -> None:
        """Read the file. Raises `ConfigError` if it is absent or wrong; what was read stays."""
        if self._file is None:
            return
        keys = self._file.read(_File).keys
        by_digest = {key.sha256: key for key in keys}
        if len(by_digest) != len(keys) or len({key.name for key in keys}) != len(keys):
            raise self._file.error("a key or name is there twice")
        self._by_digest = by_digest
        self._file.accept()

    def reload_if_changed(self) -> None:
        """Read the file again if it is another one. Raises `ConfigError`, see `load`."""
        if self._file is not None and self._file.changed():
            self.load()
            log.info("%d API keys read from %s", len(self._by_digest), self.path)

    def named(self, name: str) -> Key | None:
        """The key of that name, if there is one."""
        return next((key for key in self._by_digest.values() if key.name == name), None)

    def check(self, authorization: str | None) -> Key:
        """Whose the ``Authorization`` header is. Raises `Unauthorized`."""
        if self.path is None:
            return ANYBODY
        scheme, _, token = (authorization or "").partition(" ")
        digest = hashlib.sha256(token.strip().encode("utf-8", "surrogateescape")).hexdigest()
        key = self._by_digest.get(digest) if scheme.lower() == "bearer" else None
        if key is None:
            raise Unauthorized("wrong or missing API key; send it as 'Authorization: Bearer KEY'")
        return key


def tenant_salt(key: Key, asked: str, secret: bytes) -> str:
    """Salt of a request's chains: the tenant's own, whatever ``asked`` says; or what was asked.

    Derived from the cluster secret, so that no tenant can name another one's salt.
    """
    if key.shared_cache:
        return asked
    words = f"{key.tenant}\0{asked}".encode("utf-8", "surrogatepass")
    return hmac.new(secret, b"tenant salt\0" + words, hashlib.sha256).hexdigest()
