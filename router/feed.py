"""Keeps the view and the nodes' records up to date from the index, until cancelled.

Two loops: the event stream (blocks, joins, leaves), and once a second the members with their
records (leases that ended, links, addresses). While the index does not answer, the router serves
on with what it knows.
"""

import asyncio
import logging
from collections.abc import Mapping

from prefixfleet.router.degraded import Degraded
from prefixfleet.router.view import View
from prefixfleet.store.errors import IndexUnavailable
from prefixfleet.store.index import Membership, PrefixIndex, StreamGap
from prefixfleet.store.records import NodeRecord

POLL_S = 1.0
RETRY_S = 0.5
EMPTY_ANSWERS = 5  # in a row until an index that knows nobody is believed
ABSENT_ANSWERS = 3
"""In a row in which a life is missing until it is forgotten: if the index has lost its memory, the
event stream has said so by then."""

log = logging.getLogger(__name__)


class Feed:
    """Owned by the router's event loop; the only writer of its view, apart from what it is told
    about requests (`View.assume`, `View.suspect`)."""

    def __init__(
        self, index: PrefixIndex, view: View, degraded: Degraded, name: str = "index"
    ) -> None:
        """``name`` is what the index is called where it is missed."""
        self._name = name
        self._index = index
        self._view = view
        self._degraded = degraded
        self._records: dict[str, NodeRecord] = {}
        self._empty_answers = 0
        self._follows = False  # the view is of the index that answers now, as far as we know
        self._absent: dict[Membership, int] = {}  # answers that lacked it, while the view followed
        self.gaps = 0
        self._answered_s = 0.0  # of the loop's clock
        self.loaded = asyncio.Event()

    @property
    def records(self) -> Mapping[str, NodeRecord]:
        """Latest record of each live or awaited node, by name."""
        return self._records

    @property
    def lag_s(self) -> float:
        """Seconds since the index answered last, while this runs; it is asked every `POLL_S`."""
        return asyncio.get_running_loop().time() - self._answered_s

    @property
    def unpublished_blocks(self) -> int:
        """Blocks that nodes hold and the index does not name yet, by their records."""
        told = (record.stats.get("index") for record in self._records.values())
        counts = (index.get("pending_blocks") for index in told if isinstance(index, dict))
        return sum(count for count in counts if isinstance(count, int))

    async def run(self) -> None:
        """Follow until cancelled."""
        self._answered_s = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_events())
            tasks.create_task(self._follow_members())

    async def _follow_events(self) -> None:
        while True:
            try:
                await self._load_and_follow()
            except StreamGap as gap:
                self._follows = False
                self.gaps += 1
                log.info("events of the index were lost (%s): loading it again", gap)
            except IndexUnavailable as error:
                self._follows = False
                self._degraded.enter(
                    self._name,
                    f"changes of the {self._name} do not arrive ({error}); routing by what was "
                    "known",
                    "check that Redis runs and that PREFIXFLEET_REDIS_URL is right",
                )
                await asyncio.sleep(RETRY_S)

    async def _load_and_follow(self) -> None:
        snapshot = await self._index.snapshot()
        for _ in self._view.load(snapshot):
            await asyncio.sleep(0)
        self.loaded.set()
        self._follows, self._absent = True, {}
        self._degraded.end(self._name)
        async for event in self._index.follow(snapshot.cursor):
            self._view.apply(event)
            self._degraded.end(self._name)
            await asyncio.sleep(0)  # a burst of events lets requests pass between two of them

    async def _follow_members(self) -> None:
        while True:
            try:
                await self._read_members()
            except IndexUnavailable as error:
                log.debug("members not read: %s", error)  # the event loop reports it
            await asyncio.sleep(POLL_S)

    async def _read_members(self) -> None:
        known = set(self._view.members.values())
        listed = await self._index.members()
        self._answered_s = asyncio.get_running_loop().time()
        self._empty_answers = 0 if listed else self._empty_answers + 1
        if known and 0 < self._empty_answers < EMPTY_ANSWERS:
            return  # all at once: rather the index was emptied than every node died
        self._forget_absent(known - {member for member, _ in listed})
        awaited = self._view.awaited
        kept = {node: record for node, record in self._records.items() if node in awaited}
        self._records = kept | {member.node: record for member, record in listed}
        for member, record in listed:
            if has_published_all(member, record):
                self._view.settle(member)

    def _forget_absent(self, absent: set[Membership]) -> None:
        """Forget who is missing again and again, while the view is not to be loaded anew.

        An index that has lost its memory knows nobody either, and may say so here before the
        events do: the view must not lose what it knows before its successor is there.
        """
        counts = {member: self._absent.get(member, 0) + 1 for member in absent}
        self._absent = counts if self._follows else {}
        self._view.forget(m for m, count in self._absent.items() if count >= ABSENT_ANSWERS)


def has_published_all(member: Membership, record: NodeRecord) -> bool:
    """Whether this life of a node says that the index knows all that it holds."""
    told = record.stats.get("index")
    return isinstance(told, dict) and (told.get("epoch"), told.get("pending_blocks")) == (
        member.epoch,
        0,
    )
