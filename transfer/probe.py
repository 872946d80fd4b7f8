"""`Prober`: learns the speed of links that no pull has taken lately, by a small read when idle.

Of every link that pulls may take, also of the only one: routers plan no pull over a link that was
slow for a while, so that nothing else would ever find out that it is well again. A probe is a read
of real blocks that came from the peer before, into memory of its own: it is leased, proved and
bounded like any other, and gives way to every pull.
"""

import asyncio
import logging
import math
import time
from collections.abc import Mapping

from prefixfleet.store.errors import PullFailed
from prefixfleet.store.eviction import LruOrder
from prefixfleet.store.pool import SlotPool
from prefixfleet.store.slot import SlotLayout
from prefixfleet.transfer.assembly import Assembly
from prefixfleet.transfer.flow import Flow
from prefixfleet.transfer.gather import LINK_FAILURES
from prefixfleet.transfer.paths import Acquaintance, Paths
from prefixfleet.transfer.peers import PeerCache
from prefixfleet.transfer.reading import Read, learn
from prefixfleet.transfer.source import Later, Reader

log = logging.getLogger(__name__)

Way = tuple[str, str]
"""A peer, by its name, and a link to it."""

PROBE_BYTES = 4 * 1024 * 1024
PROBE_S = 2.0
"""The longest a probe may take."""
PAUSE_S = 10.0
"""From one probe of this node to the next."""
STALE_S = 600.0
"""A link is probed when nothing was learned of it, or tried, for so long."""
FOUND_FASTER = 2.0
"""A link whose estimate a probe raised so many times is probed again: the estimate is moved by so
much at once at most that one probe does not undo a slump."""


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
        self._layout = layout
        self._pool = SlotPool(slots, LruOrder(), time.monotonic)
        memory = memoryview(bytearray(slots * layout.slot_bytes))
        self._reader = Reader(self._pool, memory, layout, peers=peers, flow=flow, later=later)
        self._tried: dict[Way, float] = {}  # when last
        self._unsettled: Way | None = None  # was found much faster than it was known to be

    async def run(self) -> None:
        """Probe now and then until cancelled."""
        while True:
            await asyncio.sleep(PAUSE_S)
            if not self._flow.bytes and (due := self.due(time.monotonic())) is not None:
                await self.probe(*due)

    def due(self, now: float) -> Way | None:
        """A peer and a link to it of which too little is known, or None; who waited longest."""
        ways = [
            (node, link)
            for node, peer in self._paths.peers.items()
            if peer.layout == self._layout  # else it is the prober's of those blocks
            for link in self._paths.in_use(peer.contacts)
        ]
        known = set(ways)
        self._tried = {way: at for way, at in self._tried.items() if way in known}
        if self._unsettled in ways:
            return self._unsettled
        due = [
            way
            for way in ways
            if self._paths.estimates.age_s(*way) > STALE_S
            and now - self._tried.get(way, -math.inf) >= STALE_S
        ]
        return min(due, key=lambda way: self._tried.get(way, -math.inf), default=None)

    async def probe(self, node: str, link: str) -> None:
        """Read a little from the peer over this link, and learn from it."""
        self._tried[node, link] = time.monotonic()
        self._unsettled = None
        self.probes += 1
        known = self._paths.estimates.speed(node, link)
        peer = self._paths.peers[node]
        read = self._read(peer, link)
        try:
            with self._pool.reserve(b"", read.hashes) as reservation:
                assembly = Assembly(reservation, self._pool, len(read.hashes))
                await self._reader.run(read, assembly)
        except PullFailed as error:
            log.info("probe of %s over %s: %s", node, link, error)
            if error.reason in LINK_FAILURES:  # not when the peer lives another life, say
                self._paths.lost(read.contact)
            return
        finally:
            self._pool.free(self._pool.choose_victims(self._pool.num_slots))
        if read.blocks:
            learn(self._paths, read, self._layout.slot_bytes)
            now = self._paths.estimates.speed(node, link)
            if now.bytes_per_s > FOUND_FASTER * known.bytes_per_s > 0:
                self._unsettled = (node, link)

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
