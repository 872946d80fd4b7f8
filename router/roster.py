"""The workers that this router knows, and which of them may get traffic.

A worker that the registry lists is examined (`parity`) before it counts as ready, again when its
record changes, and again after it failed before our eyes. States: "checking", "ready", "refused"
(it computes something else; the reason says what), "down" (it does not answer), "draining"
(an operator's order), "leaving" (it ends soon).
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace

from prefixfleet.router.adapter_notices import bounded, forget, say_change, say_claims
from prefixfleet.router.adapters import Adapters, registered
from prefixfleet.router.degraded import Degraded
from prefixfleet.router.examiner import Ask, Examine, Examiner
from prefixfleet.router.openings import Openings
from prefixfleet.router.orders import Orders
from prefixfleet.router.seat import Seat, Standing
from prefixfleet.router.worker import Worker
from prefixfleet.router.worker_list import WorkerList
from prefixfleet.store.errors import IndexUnavailable
from prefixfleet.store.records import WorkerRecord

POLL_S = 1.0
EXAMINED = ("ready", "draining", "leaving")
STATES = ("checking", "refused", "down", *EXAMINED)

log = logging.getLogger(__name__)


class Roster:
    """Owned by the router's event loop. `run` keeps it up to date until it is cancelled."""

    def __init__(
        self,
        examine: Examine,
        ask: Ask,
        workers: WorkerList,
        orders: Orders,
        degraded: Degraded,
        joined: Callable[[str], None],
    ) -> None:
        """``ask`` gives the adapters of plain engines, those of others are in their records.
        ``joined`` is told of a worker that gets ready while others are."""
        self._examiner = Examiner(examine, ask, degraded)
        self._workers = workers
        self._orders = orders
        self._degraded = degraded
        self._joined = joined
        self._seats: dict[str, Seat] = {}
        self.openings = Openings(self._seats, self.is_whole)
        self._arrival = asyncio.Event()

    def is_whole(self) -> bool:
        """Whether no worker is missing in the list that may be announcing itself still."""
        return self._workers.is_whole

    def next_arrival(self) -> asyncio.Event:
        """Set when the next worker gets ready."""
        return self._arrival

    def is_ready(self, name: str) -> bool:
        """Whether worker ``name`` may get a request now."""
        seat = self._seats.get(name)
        return seat is not None and seat.state == "ready"

    def seated(self, name: str) -> tuple[str, Worker | None]:
        """State of worker ``name``, empty if nobody lists it, and itself if it was examined."""
        seat = self._seats.get(name)
        return (seat.state, seat.worker) if seat else ("", None)

    def serving(self, name: str, model: str) -> Worker | None:
        """Worker ``name`` as it serves ``model``; None if it does not, or was not examined."""
        seat = self._seats.get(name)
        return seat.serves.get(model) if seat else None

    def names(self) -> frozenset[str]:
        """Of every known worker."""
        return frozenset(self._seats)

    def standings(self) -> list[Standing]:
        """Every known worker with its state."""
        return [seat.standing() for seat in self._seats.values()]

    def lost(self, name: str, reason: str) -> None:
        """A connection to worker ``name`` failed: no traffic until it was examined again."""
        seat = self._seats.get(name)
        if seat and seat.state in EXAMINED:
            log.warning("worker %s is down: %s", name, reason)
            seat.state, seat.reason = "down", reason
            self.openings.changed()
            self._start_examination(seat)

    async def look_for_adapters(self, name: str) -> None:
        """Ask plain engine ``name`` which adapters it has now; nothing for others."""
        seat = self._seats.get(name)
        worker = seat.worker if seat else None
        if worker is None or not worker.static:
            return
        adapters = await self._examiner.adapters(worker)
        if adapters is not None and (seat := self._seats.get(name)) and seat.worker is worker:
            self._adapt(seat, adapters)

    def _adapt(self, seat: Seat, adapters: Adapters) -> None:
        name = seat.record.worker
        adapters = bounded(name, adapters, self._degraded)
        if adapters == seat.adapters:
            return
        say_change(name, seat.adapters, adapters, self._degraded)
        seat.adapt(adapters)
        if seat.state == "ready":
            self._settle(seat)  # requests may be waiting for what came
        self.openings.changed()
        say_claims(self._seats.values(), self._degraded)

    async def run(self) -> None:
        """Follow the registry until cancelled."""
        try:
            while True:
                await self._refresh()
                await asyncio.sleep(POLL_S)
        finally:
            for seat in self._seats.values():
                seat.stop()

    async def _refresh(self) -> None:
        await self._workers.read()
        self.look_again()
        with contextlib.suppress(IndexUnavailable):  # the registry says so
            await self._orders.forget_unseen(r.worker for r in self._workers.records())

    def look_again(self) -> None:
        """Follow the lists and orders as they are known here now."""
        self.take(self._orders.applied(self._workers.records()))

    def take(self, records: list[WorkerRecord]) -> None:
        """Make the seats agree with ``records``: new and changed ones are examined."""
        listed = {record.worker: record for record in records}
        moved = gone = self._seats.keys() - listed.keys()
        for name in gone:
            log.info("worker %s left", name)
            left = self._seats.pop(name)
            left.stop()
            forget(name, left.adapters, self._degraded)
            self.openings.changed()
        for name, record in listed.items():
            seat = self._seats.get(name)
            if seat is None or _differs(seat.record, record):
                self._seat(record, seat)
                moved = moved | {name}
            elif seat.record != record:
                self._change(seat, record)
        if moved:
            say_claims(self._seats.values(), self._degraded)

    def _seat(self, record: WorkerRecord, before: Seat | None) -> None:
        if before:
            log.info("worker %s changed its record", record.worker)
            before.stop()
        adapters = bounded(record.worker, registered(record), self._degraded)
        seat = self._seats[record.worker] = Seat(record, adapters)
        self.openings.changed()
        self._start_examination(seat)

    def _change(self, seat: Seat, record: WorkerRecord) -> None:
        """Its state, or its adapters, or both."""
        before, seat.record = seat.record, record
        if before.state != record.state:
            log.info("worker %s is %s", record.worker, record.state)
            if seat.state in EXAMINED:
                self._settle(seat)
        if before.adapters != record.adapters:
            self._adapt(seat, registered(record))

    def _settle(self, seat: Seat) -> None:
        """An examined worker is what its record says."""
        seat.state, seat.reason = seat.record.state, ""
        self.openings.changed()
        if seat.state == "ready":
            self.openings.opened(seat)
            self._arrival.set()
            self._arrival = asyncio.Event()

    def _start_examination(self, seat: Seat) -> None:
        self._examiner.start(seat, self._passed, self._refuse)

    def _passed(self, seat: Seat, worker: Worker, adapters: Adapters | None) -> None:
        if any(other.state == "ready" for other in self._seats.values()):
            self._joined(worker.name)
        seat.settle(worker)
        self._settle(seat)
        if adapters is not None:
            self._adapt(seat, adapters)
        log.info("worker %s is %s", worker.name, seat.state)

    def _refuse(self, seat: Seat, reason: str) -> None:
        seat.state, seat.reason = "refused", reason
        seat.settle(None)
        self.openings.changed()


def _differs(before: WorkerRecord, after: WorkerRecord) -> bool:
    """Whether anything changed that the examination depends on."""
    return replace(before, state="", adapters={}) != replace(after, state="", adapters={})
