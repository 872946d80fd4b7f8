"""Records in Redis that only who knows the cluster secret can have written: what operators order.

A sealed record is a mark, a number, an HMAC-SHA256 and the record. The HMAC is over the fleet, what
the record is about, the number and the record, by a key derived for this use only. Numbers rise, so
that an older record that is put back is refused by whoever has seen a newer one; they begin at the
time in milliseconds, so that they go on rising when Redis has forgotten them. What a seal cannot
tell: that a record was deleted, and an older one to somebody who never saw the newer.
"""

import hashlib
import hmac
import struct
import time
from collections.abc import Callable, Collection

import msgpack

from prefixfleet.store.errors import ConfigError

_HEAD = struct.Struct(">4sQ32s")
_MARK = b"pfs1"
MAX_NUMBER = 1 << 62


class Unsigned(ConfigError):
    """Not written by anybody who knows the cluster secret, or an older record again."""


class Outdated(Unsigned):
    """Written by somebody who knows it, and older than one that was seen, or taken back."""


class Seals:
    """Seals and opens the records of one ``kind``. Owned by one event loop.

    ``clock`` is the wall clock in seconds.
    """

    def __init__(
        self, secret: bytes, fleet: str, kind: str, clock: Callable[[], float] = time.time
    ) -> None:
        self._key = hashlib.blake2b(secret, digest_size=32, person=b"pf-orders").digest()
        self._about = (fleet, kind)
        self._clock = clock
        self._newest: dict[str, int] = {}
        self._there: set[str] = set()

    def seal(self, name: str, record: bytes) -> bytes:
        """``record`` about ``name``, newer than every one that was opened here."""
        number = max(self._newest.get(name, 0) + 1, int(self._clock() * 1000))
        return _HEAD.pack(_MARK, number, self._mac(name, number, record)) + record

    def open(self, name: str, data: bytes) -> bytes:
        """The record in ``data``. Raises `Unsigned`, or `Outdated`, which says why."""
        if len(data) < _HEAD.size or not data.startswith(_MARK):
            raise Unsigned(f"{self._of(name)} is not signed; order it again")
        _, number, mac = _HEAD.unpack_from(data)
        record = data[_HEAD.size :]
        if not hmac.compare_digest(mac, self._mac(name, number, record)) or number > MAX_NUMBER:
            raise Unsigned(
                f"{self._of(name)} is not signed with this cluster's secret; is "
                "PREFIXFLEET_SECRET_FILE the same everywhere?"
            )
        if number < self._newest.get(name, 0):
            raise Outdated(f"{self._of(name)} is an older one than was seen before; order it again")
        self._newest[name] = number
        self._there.add(name)
        return record

    def wrote(self, name: str, sealed: bytes) -> None:
        """This one of `seal` is there now: an older one that is put back is none."""
        _, number, _ = _HEAD.unpack_from(sealed)
        self._newest[name] = max(number, self._newest.get(name, 0))
        self._there.add(name)

    def only(self, names: Collection[str]) -> None:
        """No other names have a record now: those that went may not come back as they were."""
        for name in self._there.difference(names):
            self._newest[name] += 1
        self._there.intersection_update(names)

    def _mac(self, name: str, number: int, record: bytes) -> bytes:
        signed = msgpack.packb([*self._about, name, number, record], use_bin_type=True)
        return hmac.digest(self._key, signed, hashlib.sha256)

    def _of(self, name: str) -> str:
        fleet, kind = self._about
        # whoever writes to Redis chose the name: it shall not write lines into logs
        return f"the {kind}{f' {name!a:.80}' if name else ''} of fleet {fleet}"
