"""The files that an operator may change while a router runs: keys, static workers, certificates.

A wrong file never replaces a right one: what was read before holds, and `Degraded` says so until
the file is corrected.
"""

from prefixfleet.router.admin_key import AdminKey
from prefixfleet.router.degraded import Degraded
from prefixfleet.router.keys import Keys
from prefixfleet.router.settings import RouterSettings
from prefixfleet.router.static_workers import StaticWorkers
from prefixfleet.router.tls import Tls
from prefixfleet.store.errors import ConfigError


class OperatorFiles:
    """Owned by its router, on its event loop. Raises `ConfigError` for wrong certificates; the
    other files are not read before `load`."""

    def __init__(self, settings: RouterSettings, degraded: Degraded) -> None:
        self._degraded = degraded
        self.keys = Keys(settings.keys_file)
        self.admin_key = AdminKey(settings.admin_key_file)
        self.static = StaticWorkers(settings.workers_file)
        self.tls = Tls(settings)

    def load(self) -> None:
        """Read them for the first time. Raises `ConfigError`."""
        self.keys.load()
        self.admin_key.load()
        self.static.load()

    def reload(self) -> None:
        """Read again what has changed; what is wrong leaves the old."""
        files = (
            ("keys", self.keys),
            ("admin key", self.admin_key),
            ("static workers", self.static),
            ("certificates", self.tls),
        )
        for mode, file in files:
            try:
                file.reload_if_changed()
            except ConfigError as error:
                self._degraded.enter(
                    mode, str(error), "correct the file; what was read before holds"
                )
            else:
                self._degraded.end(mode)
