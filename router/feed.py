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
from prefixfleet.store.index import PrefixIndex, StreamGap
from prefixfleet.store.records import NodeRecord

POLL_S = 1.0
RETRY_S = 0.5
EMPTY_ANSWERS = 5  # in a row until an index that knows nobody is believed

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
        self.gaps = 0
        self.loaded = asyncio.Event()

    @property
    def records(self) -> Mapping[str, NodeRecord]:
        """Latest record of each live node, by name."""
        return self._records

    async def run(self) -> None:
        """Follow until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_events())
            tasks.create_task(self._follow_members())

    async def _follow_events(self) -> None:
        while True:
            try:
                await self._load_and_follow()
            except StreamGap as gap:
                self.gaps += 1
                log.info("events of the index were lost (%s): loading it again", gap)
            except IndexUnavailable as error:
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
        self._empty_answers = 0 if listed else self._empty_answers + 1
        if known and 0 < self._empty_answers < EMPTY_ANSWERS:
            return  # all at once: rather the index was emptied than every node died
        # A node that joined while we asked is in the view and not in the answer: keep it
        self._view.forget(known - {member for member, _ in listed})
        self._records = {member.node: record for member, record in listed}
