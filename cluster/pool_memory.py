"""`PoolMemory`: the one segment of a node, with its listeners, that all its pools lie in.

Registered with every link once, and mapped by every engine alike, whatever its blocks are.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

from prefixfleet.cluster.segment import Segment
from prefixfleet.store.populate import Populating
from prefixfleet.store.slabs import Slabs
from prefixfleet.store.slot import ALIGN_BYTES
from prefixfleet.transfer.link import Link, Listener
from prefixfleet.transfer.serve_several import Servers


class PoolMemory:
    """Owned by the daemon's event loop; `close` removes it. ``lease_ids`` numbers the read leases
    of all its pools, whose servers are ``servers``."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.slabs = Slabs.of(segment.view.nbytes)
        self.servers = Servers()
        self.lease_ids = itertools.count(1)
        self.listeners: dict[str, Listener] = {}
        self._populating = Populating(segment.view, huge=True)

    @classmethod
    def create(cls, path: Path, pool_bytes: int) -> "PoolMemory":
        """A segment of as many whole pages. Raises `ConfigError`, see `Segment.create`."""
        return cls(Segment.create(path, pool_bytes // ALIGN_BYTES * ALIGN_BYTES))

    async def listen(self, links: Sequence[Link], host: str) -> None:
        """Serve the pools over every link. Raises `ConfigError` if an address cannot be used."""
        for link in links:
            self.listeners[link.name] = await link.listen(host, self.segment.view, self.servers)

    @property
    def huge_bytes(self) -> int:
        """What of it lies in huge pages so far."""
        return self._populating.huge_bytes

    def contacts(self) -> dict[str, str]:
        """Where peers connect, by link."""
        return {name: listener.contact for name, listener in self.listeners.items()}

    async def close(self) -> None:
        """Stop serving, then remove the memory."""
        for listener in self.listeners.values():
            await listener.close()
        self._populating.stop()
        self.segment.close()
