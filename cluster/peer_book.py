"""Where the other nodes are: their epochs and contacts, kept from the index.

Outlives a loss of the index: a pull by plan still finds its source. Must not connect to anybody.
"""

import asyncio
from collections.abc import Awaitable, Callable

from prefixfleet.store.errors import EpochChanged, IndexUnavailable, PeerLost
from prefixfleet.store.index import Membership
from prefixfleet.store.records import NodeRecord

Members = Callable[[], Awaitable[list[tuple[Membership, NodeRecord]]]]
"""`PrefixIndex.members`."""

MIN_AGE_S = 0.2
"""The index is asked for its members at most so often, however many plans name unknown nodes."""


class PeerBook:
    """Latest known (epoch, record) of each node. Owned by the daemon's event loop."""

    def __init__(self, members: Members, *, clock: Callable[[], float]) -> None:
        self._members = members
        self._clock = clock
        self._known: dict[str, tuple[int, NodeRecord]] = {}
        self._asked_at = float("-inf")
        self._lock = asyncio.Lock()

    async def contacts(self, node: str, epoch: int) -> dict[str, str]:
        """Addresses of that life of the node, by link name.

        Raises:
            PeerLost: nobody of that name is known.
            EpochChanged: the node is known, but in another life.
        """
        known = self._known.get(node)
        if known is None or known[0] != epoch or not known[1].contacts:
            await self.refresh()
            known = self._known.get(node)
        if known is None:
            raise PeerLost(f"source {node!r} is not a live node of this fleet")
        if known[0] != epoch:
            raise EpochChanged(f"source {node!r}: plan says epoch {epoch}, it lives in {known[0]}")
        return known[1].contacts

    async def latest(self, node: str) -> tuple[int, dict[str, str]] | None:
        """Epoch and addresses of the node's latest life that is known; None: it has none."""
        if node not in self._known:
            await self.refresh()
        known = self._known.get(node)
        return (known[0], known[1].contacts) if known and known[1].contacts else None

    def known(self) -> list[tuple[str, int, dict[str, str]]]:
        """Node, epoch and addresses of every life that is known."""
        return [(node, epoch, record.contacts) for node, (epoch, record) in self._known.items()]

    async def refresh(self) -> None:
        """Ask the index who lives; without an answer, what is known stays.

        Whoever calls while another call is under way shares its answer or waits for the next.
        """
        called_at = self._clock()
        async with self._lock:
            if self._asked_at >= called_at:
                return
            await asyncio.sleep(max(0.0, self._asked_at + MIN_AGE_S - self._clock()))
            self._asked_at = self._clock()
            try:
                members = await self._members()
            except IndexUnavailable:
                return
            self._known = {m.node: (m.epoch, record) for m, record in members}
