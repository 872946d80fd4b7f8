"""The operators' key, read again when its file changes: one that leaked can be exchanged."""

import hashlib
import hmac
import logging
from pathlib import Path

from prefixfleet.router.errors import Forbidden, Unauthorized
from prefixfleet.router.watched_file import WatchedFile

MIN_KEY_BYTES = 16
SETTING = "PREFIXFLEET_ROUTER_ADMIN_KEY_FILE"

log = logging.getLogger(__name__)


class AdminKey:
    """Owned by the router's event loop. Only a digest is kept, not the key."""

    def __init__(self, path: Path | None) -> None:
        """Without a ``path`` nobody is admitted."""
        self._file = WatchedFile(SETTING, path) if path else None
        self._digest = b""

    def load(self) -> None:
        """Read the file. Raises `ConfigError` if it cannot be used; what was read stays."""
        if self._file is None:
            return
        key = self._file.read_bytes().strip()
        if len(key) < MIN_KEY_BYTES:
            raise self._file.error(f"it holds {len(key)} bytes, expected at least {MIN_KEY_BYTES}")
        self._digest = hashlib.sha256(key).digest()
        self._file.accept()

    def reload_if_changed(self) -> None:
        """Read the file again if it is another one. Raises `ConfigError`, see `load`."""
        if self._file is not None and self._file.changed():
            self.load()
            log.info("the admin key was read again")

    def admit(self, authorization: str) -> None:
        """Returns for who has the key. Raises `Forbidden`, `Unauthorized`."""
        if self._file is None:
            raise Forbidden(f"the admin API is off: set {SETTING} to a file with its key")
        scheme, _, token = authorization.partition(" ")
        digest = hashlib.sha256(token.strip().encode("utf-8", "surrogateescape")).digest()
        if scheme.lower() != "bearer" or not hmac.compare_digest(digest, self._digest):
            raise Unauthorized("wrong or missing admin key; send it as 'Authorization: Bearer KEY'")
