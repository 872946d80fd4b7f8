"""Tells the other routers what this one has in flight, and learns what they have.

Routers of one fleet need not talk to each other: each writes its loads to the board many times a
second and adds the others' to its own. A request that another router sends meanwhile is seen one
period late.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Protocol

from prefixfleet.router.book import Book
from prefixfleet.router.charge import Load
from prefixfleet.router.degraded import Degraded
from prefixfleet.store.errors import IndexUnavailable
from prefixfleet.store.load_board import WAITING, SharedLoad

PERIOD_S = 0.1  # shorter than any prefill that is worth balancing


class Board(Protocol):
    """Where loads are exchanged: `store.load_board.LoadBoard`."""

    async def exchange(self, mine: Mapping[str, SharedLoad]) -> list[Mapping[str, SharedLoad]]:
        """Write ours, get the others'. Raises `IndexUnavailable`."""
        ...

    async def leave(self) -> None:
        """Take ours off. Raises `IndexUnavailable`."""
        ...


class Exchange:
    """Owned by the router's event loop; the only one who tells the book of others. ``waiting`` is
    what waits for a worker: whoever scales the fleet reads it."""

    def __init__(
        self, board: Board, book: Book, waiting: Callable[[], Load], degraded: Degraded
    ) -> None:
        self._board = board
        self._book = book
        self._waiting = waiting
        self._degraded = degraded

    async def run(self) -> None:
        """Exchange until cancelled, then leave."""
        try:
            while True:
                await self._exchange()
                await asyncio.sleep(PERIOD_S)
        finally:
            with contextlib.suppress(IndexUnavailable):  # what was written expires
                await self._board.leave()

    async def _exchange(self) -> None:
        mine = {
            worker: SharedLoad(
                load.queued_tokens, load.queued_requests, load.decoding, min(load.busy_s, 86_400.0)
            )
            for worker, load in {**self._book.own(), WAITING: self._waiting()}.items()
        }
        try:
            others = await self._board.exchange(mine)
        except IndexUnavailable as error:
            self._book.hear({})
            self._degraded.enter(
                "loads",
                f"other routers' loads are not known ({error}); this one counts its own only",
                "check that Redis runs and that PREFIXFLEET_REDIS_URL is right",
            )
            return
        self._degraded.end("loads")
        total: defaultdict[str, Load] = defaultdict(Load)
        for loads in others:
            for worker, load in loads.items():
                total[worker] += Load(
                    load.queued_tokens, load.queued_requests, load.decoding, load.busy_s
                )
        self._book.hear(total)
