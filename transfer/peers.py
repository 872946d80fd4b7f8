"""`PeerCache`: connections to peers that are kept from one pull to the next.

Each pull has a connection of its own while it lasts, so that ending one pull by force harms no
other, and a short pull does not stand behind a long one in the same stream.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from prefixfleet.store.errors import PeerRefused
from prefixfleet.transfer.closing import Closing
from prefixfleet.transfer.deadline import until
from prefixfleet.transfer.link import Deadline, Link, Peer

MAX_PER_PEER = 8
"""Pulls from one peer over one link at once, and as many short ones besides; one more waits, by its
deadline."""
MAX_IDLE = 64
"""Idle connections in all; the one that is idle longest is closed first."""


@dataclass(frozen=True, slots=True)
class Held:
    """A connection that one pull has to itself. ``fresh``: it was made for this pull."""

    peer: Peer
    fresh: bool


@dataclass(slots=True)
class _Places:
    free: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_PER_PEER))
    users: int = 0


class PeerCache:
    """Owned by the daemon's event loop."""

    def __init__(self, links: Mapping[str, Link]) -> None:
        self.closing = Closing()
        self._links = links
        self._idle: dict[Peer, tuple[str, str]] = {}  # to its link and contact; longest idle first
        self._places: dict[tuple[str, bool], _Places] = {}
        self._closed = False

    @property
    def idle(self) -> int:
        """Number of idle connections."""
        return len(self._idle)

    @asynccontextmanager
    async def place(self, contact: str, deadline: Deadline, *, short: bool) -> AsyncIterator[None]:
        """One of the `MAX_PER_PEER` places of a peer: a ``short`` pull does not wait for the end
        of long ones. Raises `DeadlineExceeded`."""
        places = self._places.setdefault((contact, short), _Places())
        places.users += 1
        try:
            async with until(deadline, f"wait for one of {MAX_PER_PEER} pulls from {contact}"):
                await places.free.acquire()
            try:
                yield
            finally:
                places.free.release()
        finally:
            places.users -= 1
            if not places.users:
                del self._places[contact, short]

    async def take(self, link: str, contact: str, deadline: Deadline, *, fresh: bool) -> Held:
        """An idle connection, or a new one. Raises the errors of `Link.connect`, and `PeerLost`
        where the link no longer closes those that it has."""
        if self._closed:
            raise PeerRefused("this node is shutting down")
        if not fresh:
            for peer, (_, where) in reversed(self._idle.items()):
                if where == contact and not peer.broken:
                    del self._idle[peer]
                    return Held(peer, fresh=False)
        self.closing.check(link)
        return Held(await self._links[link].connect(contact, deadline=deadline), fresh=True)

    def give_back(self, link: str, contact: str, peer: Peer) -> None:
        """Keep the connection for the next pull, if it is still good."""
        self._idle[peer] = link, contact
        surplus = [p for p in self._idle if p.broken or self._closed]
        surplus += list(self._idle)[: max(0, len(self._idle) - MAX_IDLE)]
        for old in surplus:
            if (held := self._idle.pop(old, None)) is not None:
                self.drop(held[0], old)

    def drop(self, link: str, peer: Peer) -> "asyncio.Task[None]":
        """Close a connection that a pull had to itself; see `Closing.begin`."""
        return self.closing.begin(link, peer)

    async def close(self) -> None:
        """Close every idle connection; those in use are closed when they come back. Waits for
        what closes, but not for what is stuck."""
        self._closed = True
        idle, self._idle = self._idle, {}
        for peer, (link, _) in idle.items():
            self.drop(link, peer)
        await self.closing.ended()
