"""Who else holds the blocks of a pull: asked of the index when a pull needs more sources.

The index only hints; the holder itself decides. Must not connect to anybody.
"""

import logging
import zlib
from collections.abc import Awaitable, Callable, Sequence

from prefixfleet.cluster.peer_book import PeerBook
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.errors import IndexUnavailable
from prefixfleet.transfer.gather import Source

log = logging.getLogger(__name__)

MAX_HOLDERS = 4
"""Sources besides the planned one that a pull may turn to."""

Match = Callable[[Sequence[BlockHash]], Awaitable[dict[str, int]]]
"""`PrefixIndex.match`."""


class Holders:
    """Owned by the daemon's event loop. ``me`` is this node's own name."""

    def __init__(self, match: Match, peers: PeerBook, me: str) -> None:
        self._match = match
        self._peers = peers
        self._me = me

    async def of(
        self, chain: Sequence[BlockHash], *, beyond: int, but: tuple[str, int]
    ) -> list[Source]:
        """Nodes that hold more than ``beyond`` leading blocks of ``chain``, those with most first;
        of equal ones each asking node prefers others, so that not all turn to the same.

        ``but`` is a node and its epoch that is asked already. Without an answer of the index,
        nobody: then the pull has its planned source only.
        """
        try:
            held = await self._match(chain)
        except IndexUnavailable as error:
            log.info("no other sources: %s", error)
            return []
        names = [name for name in held if held[name] > beyond and name != self._me]
        found = []
        for name in sorted(names, key=lambda name: (-held[name], self._turn(name))):
            latest = await self._peers.latest(name)
            if latest is not None and (name, latest[0]) != but:
                found.append(Source(latest[1], latest[0]))
        return found[:MAX_HOLDERS]

    def _turn(self, name: str) -> int:
        return zlib.crc32(f"{self._me}/{name}".encode())
