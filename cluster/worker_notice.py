"""What the fleet is told of a worker while its engine answers: its record, and its state."""

import contextlib
import logging
from dataclasses import replace

from prefixfleet.cluster.settings import WorkerSettings
from prefixfleet.store.errors import ConfigError, IndexUnavailable
from prefixfleet.store.records import FleetWish, WorkerRecord
from prefixfleet.store.registry import WorkerRegistry

log = logging.getLogger(__name__)

LEASE_S = 3.0


class WorkerNotice:
    """Owned by the `Worker`, on its event loop. The state is what an operator wishes, until the
    worker is ``leaving``."""

    def __init__(self, settings: WorkerSettings, registry: WorkerRegistry) -> None:
        self._settings = settings
        self._registry = registry
        self._wished = "ready"
        self._said = ""
        self.leaving = False

    async def renew(self, record: WorkerRecord) -> None:
        """Say it again, for `LEASE_S`; without the registry, nothing is said."""
        try:
            self._wished = self._state_in(await self._registry.wish())
        except (IndexUnavailable, ConfigError) as error:
            self._say_once(f"worker {record.worker}: the wish cannot be read: {error}")
        else:
            self._said = ""
        state = "leaving" if self.leaving else self._wished
        try:
            await self._registry.announce(replace(record, state=state), ttl_s=LEASE_S)
        except IndexUnavailable as error:
            log.debug("worker %s not announced: %s", record.worker, error)

    async def withdraw(self) -> None:
        """It is gone."""
        with contextlib.suppress(IndexUnavailable):  # then its lease ends by itself
            await self._registry.withdraw(self._settings.name)

    def _say_once(self, what: str) -> None:
        if what != self._said:
            self._said = what
            log.warning("%s", what)

    def _state_in(self, wish: FleetWish) -> str:
        mine = {self._settings.name, self._settings.node, self._settings.host}
        return "draining" if mine & set(wish.draining) else "ready"
