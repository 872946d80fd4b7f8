"""`Closing`: connections on their way out, which nobody waits for without a bound.

A peer that closes must first be sure that nothing writes into a target any more; a link that
stands still never is. Then the slots of its last read stay in quarantine, and it shows.
"""

import asyncio
import logging
from collections import Counter

from prefixfleet.store.errors import PeerLost
from prefixfleet.transfer.link import Peer

log = logging.getLogger(__name__)

STUCK_S = 10.0
"""A connection that is not closed after so long counts as stuck."""
MAX_STUCK = 16
"""Stuck connections of a link beyond which it makes no new ones: each may hold slots."""


class Closing:
    """Owned by the daemon's event loop. Connections are counted by link."""

    def __init__(self) -> None:
        self.stuck: Counter[str] = Counter()  # now
        self._under_way: dict[asyncio.Task[None], str] = {}

    def begin(self, link: str, peer: Peer) -> "asyncio.Task[None]":
        """Close ``peer``. The task ends when it is closed, fails if that cannot be known; shield
        it where a wait for it may be cancelled, and bound that wait."""
        task = asyncio.create_task(self._close(link, peer))
        self._under_way[task] = link
        task.add_done_callback(self._forget)
        return task

    def check(self, link: str) -> None:
        """Raises `PeerLost` where the link has too many connections that do not close."""
        if self.stuck[link] >= MAX_STUCK:
            raise PeerLost(f"{link}: {MAX_STUCK} connections do not close; restart this node")

    def degraded(self) -> list[str]:
        """What stands still now, for status; nothing where all is well."""
        return [
            f"{count} connections over {link} do not close: their slots stay in quarantine until "
            f"they do; if it stays so, restart this node"
            for link, count in sorted(self.stuck.items())
            if count
        ]

    async def ended(self) -> None:
        """Wait for what is under way, `STUCK_S` at most."""
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=STUCK_S)

    async def _close(self, link: str, peer: Peer) -> None:
        closing = asyncio.ensure_future(peer.close())
        if not (await asyncio.wait({closing}, timeout=STUCK_S))[0]:
            self.stuck[link] += 1
            log.error("%s: the connection to %s does not close", link, peer.node)
            await asyncio.wait({closing})
            self.stuck[link] -= 1
            log.info("%s: the connection to %s is closed at last", link, peer.node)
        await closing

    def _forget(self, task: "asyncio.Task[None]") -> None:
        link = self._under_way.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.stuck[link] += 1  # it is not known to be closed, and never will be
            log.error("%s: a connection does not close: %s", link, error)
