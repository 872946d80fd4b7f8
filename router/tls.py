"""TLS of the router's own port and towards workers, with certificates on both sides if set.

Certificates that are exchanged on disk are used for new connections without a restart.
"""

import logging
import ssl
from pathlib import Path

from prefixfleet.router.settings import RouterSettings
from prefixfleet.store.errors import ConfigError

PREFIX = "PREFIXFLEET_ROUTER_"

log = logging.getLogger(__name__)


class Tls:
    """``listener`` is None for plain HTTP; ``workers`` is used for https workers only.

    Raises:
        ConfigError: a file is absent or wrong, or half of a pair is set.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self._pairs: list[_Pair] = []
        self.listener = self._listener(settings)
        self.workers = self._workers(settings)

    def reload_if_changed(self) -> None:
        """Take the certificates on disk if they are others. Raises `ConfigError`."""
        for pair in self._pairs:
            pair.load_if_changed()

    def _listener(self, settings: RouterSettings) -> ssl.SSLContext | None:
        names = ("TLS_CERT_FILE", "TLS_KEY_FILE")
        pair = _both(names, settings.tls_cert_file, settings.tls_key_file)
        if pair is None:
            if settings.tls_client_ca_file:
                raise ConfigError(f"{PREFIX}TLS_CLIENT_CA_FILE: set {PREFIX}TLS_CERT_FILE too")
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._pairs.append(_Pair(context, names[0], *pair))
        if settings.tls_client_ca_file:
            _trust(context, "TLS_CLIENT_CA_FILE", settings.tls_client_ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _workers(self, settings: RouterSettings) -> ssl.SSLContext:
        context = ssl.create_default_context()
        if settings.worker_ca_file:
            _trust(context, "WORKER_CA_FILE", settings.worker_ca_file)
        names = ("WORKER_CERT_FILE", "WORKER_KEY_FILE")
        pair = _both(names, settings.worker_cert_file, settings.worker_key_file)
        if pair is not None:
            self._pairs.append(_Pair(context, names[0], *pair))
        return context


class _Pair:
    """A certificate with its key, in a context."""

    def __init__(self, context: ssl.SSLContext, name: str, cert: Path, key: Path) -> None:
        self._context = context
        self._name = name
        self._files = (cert, key)
        self._stamp: tuple[int, ...] = ()
        self.load_if_changed()

    def load_if_changed(self) -> None:
        try:
            stamp = tuple(path.stat().st_mtime_ns for path in self._files)
            if stamp == self._stamp:
                return
            self._context.load_cert_chain(*self._files, password=_no_password)
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            raise ConfigError(f"{PREFIX}{self._name}: {self._files[0]}: {error}") from error
        if self._stamp:
            log.info("certificate read again from %s", self._files[0])
        self._stamp = stamp


def _no_password() -> str:
    """Else OpenSSL asks on the terminal for an encrypted key's."""
    raise ValueError("the key is encrypted; give one that is not")


def _trust(context: ssl.SSLContext, name: str, path: Path) -> None:
    try:
        context.load_verify_locations(path)
    except OSError as error:
        raise ConfigError(f"{PREFIX}{name}: {path}: {error}") from error


def _both(names: tuple[str, str], cert: Path | None, key: Path | None) -> tuple[Path, Path] | None:
    if cert and key:
        return cert, key
    if cert or key:
        raise ConfigError(f"{PREFIX}{names[0]} and {PREFIX}{names[1]}: set both or none")
    return None
