"""`Prober`: learns the speed of links that no pull has taken lately, by a small read when idle.

Only where measuring decides between links. A probe is a read of real blocks that came from the
peer before, into memory of its own: it is leased, proved and bounded like any other, and gives
way to every pull.
"""

import asyncio
import logging
import time
from collections.abc import Mapping

from prefixfleet.store.errors import PullFailed
from prefixfleet.store.eviction import LruOrder
from prefixfleet.store.pool import SlotPool
from prefixfleet.store.slot import SlotLayout
from prefixfleet.transfer.assembly import Assembly
from prefixfleet.transfer.flow import Flow
from prefixfleet.transfer.paths import Acquaintance, Paths
from prefixfleet.transfer.peers import PeerCache
from prefixfleet.transfer.reading import Read, learn
from prefixfleet.transfer.source import Later, Reader

log = logging.getLogger(__name__)

PROBE_BYTES = 4 * 1024 * 1024
PROBE_S = 2.0
"""The longest a probe may take."""
PAUSE_S = 10.0
"""From one probe of this node to the next."""
STALE_S = 600.0
"""A link is probed when nothing was learned of it, or tried, for so long."""


class Prober:
    """Owned by the daemon's event loop. Takes connections from ``peers`` and room from ``flow``,
    both the puller's; ``later`` runs what may outlast a probe."""

    def __init__(
        self, layout: SlotLayout, *, paths: Paths, peers: PeerCache, flow: Flow, later: Later
    ) -> None:
        slots = max(1, PROBE_BYTES // layout.slot_bytes)
        self.probes = 0
        self._paths = paths
        self._flow = flow
        self._slot_bytes = layout.slot_bytes
        self._pool = SlotPool(slots, LruOrder(), time.monotonic)
        memory = memoryview(bytearray(slots * layout.slot_bytes))
        self._reader = Reader(self._pool, memory, layout, peers=peers, flow=flow, later=later)
        self._tried: dict[tuple[str, str], float] = {}

    async def run(self) -> None:
        """Probe now and then until cancelled."""
        while True:
            await asyncio.sleep(PAUSE_S)
            if not self._flow.bytes and (due := self.due(time.monotonic())) is not None:
                await self.probe(*due)

    def due(self, now: float) -> tuple[str, str] | None:
        """A peer and a link to it of which too little is known, or None."""
        self._tried = {way: at for way, at in self._tried.items() if now - at < STALE_S}
        for node, peer in self._paths.peers.items():
            for link in self._paths.rivals(peer.contacts):
                known_s = self._paths.estimates.age_s(node, link)
                if known_s > STALE_S and (node, link) not in self._tried:
                    return node, link
        return None

    async def probe(self, node: str, link: str) -> None:
        """Read a little from the peer over this link, and learn from it."""
        self._tried[node, link] = time.monotonic()
        self.probes += 1
        peer = self._paths.peers[node]
        read = self._read(peer, link)
        try:
            with self._pool.reserve(b"", read.hashes) as reservation:
                assembly = Assembly(reservation, self._pool, len(read.hashes))
                await self._reader.run(read, assembly)
        except PullFailed as error:
            log.info("probe of %s over %s: %s", node, link, error)
            self._paths.lost(read.contact)
            return
        finally:
            self._pool.free(self._pool.choose_victims(self._pool.num_slots))
        if read.blocks:
            learn(self._paths, read, self._slot_bytes)

    def _read(self, peer: Acquaintance, link: str) -> Read:
        contacts: Mapping[str, str] = {link: peer.contacts[link]}
        return Read(
            contacts=contacts,
            epoch=peer.epoch,
            namespace=peer.namespace,
            hashes=peer.hashes[: self._pool.num_slots],
            deadline=time.monotonic() + PROBE_S,
            forced=link,
            background=True,
            link=link,
            contact=peer.contacts[link],
        )
