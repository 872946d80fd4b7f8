"""The workers that this router knows, and which of them may get traffic.

A worker that the registry lists is examined (`parity`) before it counts as ready, again when its
record changes, and again after it failed before our eyes. States: "checking", "ready", "refused"
(it computes something else; the reason says what), "down" (it does not answer), "draining"
(an operator's order), "leaving" (it ends soon).
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from prefixfleet.router.degraded import Degraded
from prefixfleet.router.errors import AllDrained, NoWorker, UnknownModel
from prefixfleet.router.orders import Orders
from prefixfleet.router.parity import ParityFailed, WorkerSilent
from prefixfleet.router.worker import Worker
from prefixfleet.store.errors import ConfigError, IndexUnavailable
from prefixfleet.store.records import WorkerRecord

POLL_S = 1.0
FIRST_RETRY_S = 0.25
LAST_RETRY_S = 5.0
MAX_EXAMINED_AT_ONCE = 8
EMPTY_ANSWERS = 5  # in a row until a registry that knows nobody is believed
EXAMINED = ("ready", "draining", "leaving")
STATES = ("checking", "refused", "down", *EXAMINED)

log = logging.getLogger(__name__)

Examine = Callable[[WorkerRecord], Awaitable[Worker]]
"""The worker, once it agrees with this router.

Raises `ParityFailed`, `WorkerSilent`, `ConfigError`.
"""


class Registry(Protocol):
    """Where workers are announced: `store.registry.WorkerRegistry` or a fixed list."""

    async def workers(self) -> list[WorkerRecord]:
        """Every announced worker whose lease holds. Raises `IndexUnavailable`."""
        ...


@dataclass(frozen=True, slots=True)
class Standing:
    """How one worker stands with this router, for `status`."""

    record: WorkerRecord
    state: str
    reason: str


@dataclass(slots=True)
class _Seat:
    record: WorkerRecord
    state: str = "checking"
    reason: str = ""
    worker: Worker | None = None
    examination: asyncio.Task[None] | None = field(default=None, repr=False)


class Roster:
    """Owned by the router's event loop. `run` keeps it up to date until it is cancelled."""

    def __init__(
        self,
        registry: Registry,
        examine: Examine,
        degraded: Degraded,
        orders: Orders,
        static: Callable[[], list[WorkerRecord]],
        joined: Callable[[str], None],
        clock: Callable[[], float],
        settling_s: float,
    ) -> None:
        """``static`` gives the workers that no registry lists; they need none. ``joined`` is told
        of a worker that gets ready while others are. For ``settling_s`` after the registry's first
        list workers may be missing in it: a Redis that lost its memory hears of one after another.
        """
        self._registry = registry
        self._examine = examine
        self._degraded = degraded
        self._orders = orders
        self._static = static
        self._joined = joined
        self._clock = clock
        self._settling_s = settling_s
        self._whole_s = math.inf  # when the registry's list may be taken for whole
        self._registered: list[WorkerRecord] = []
        self._seats: dict[str, _Seat] = {}
        self._served: dict[str, str] = {}  # models of workers that were ready, by worker
        self._arrival = asyncio.Event()
        self._empty_answers = 0
        self._slots = asyncio.Semaphore(MAX_EXAMINED_AT_ONCE)

    def ready(self, model: str) -> list[Worker]:
        """Workers that may get a request for ``model``; at least one.

        Raises:
            UnknownModel: other models are served, not this one.
            AllDrained: an operator drained all of them.
            NoWorker: none is ready at the moment, or the list may not be whole yet.
        """
        ready = [
            seat.worker
            for seat in self._seats.values()
            if seat.worker and seat.state == "ready" and seat.record.model == model
        ]
        if ready:
            return ready
        models = {seat.record.model for seat in self._seats.values()}
        if self.is_whole() and models and model not in models | set(self._served.values()):
            raise UnknownModel(
                f"the model {model!r:.200} does not exist; this fleet serves {sorted(models)}",
                param="model",
            )
        if self.is_whole() and self._all_drained(model):
            raise AllDrained(
                f"every worker of the model {model!r:.200} is drained; `prefixfleet resume` gives "
                "them back",
                retry_after_s=LAST_RETRY_S,
            )
        raise NoWorker(
            "no worker is ready; `prefixfleet status` says why", retry_after_s=LAST_RETRY_S
        )

    def _all_drained(self, model: str) -> bool:
        """Whether nobody is expected: none is examined or ends, none that served is missing."""
        served = {name for name, of in self._served.items() if of == model}
        seats = {name: seat for name, seat in self._seats.items() if seat.record.model == model}
        drained = all(seat.record.state == "draining" for seat in seats.values())
        return bool(seats) and drained and served <= seats.keys()

    def is_whole(self) -> bool:
        """Whether no worker is missing in the list that may be announcing itself still."""
        return not self._registered or self._clock() >= self._whole_s

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

    def names(self) -> frozenset[str]:
        """Of every known worker."""
        return frozenset(self._seats)

    def forget(self, name: str) -> None:
        """A worker is gone for good: its model is not waited for on its account any more."""
        self._served.pop(name, None)

    def standings(self) -> list[Standing]:
        """Every known worker with its state."""
        return [Standing(s.record, s.state, s.reason) for s in self._seats.values()]

    def lost(self, name: str, reason: str) -> None:
        """A connection to worker ``name`` failed: no traffic until it was examined again."""
        seat = self._seats.get(name)
        if seat and seat.state in EXAMINED:
            log.warning("worker %s is down: %s", name, reason)
            seat.state, seat.reason = "down", reason
            self._start_examination(seat)

    async def run(self) -> None:
        """Follow the registry until cancelled."""
        try:
            while True:
                await self._refresh()
                await asyncio.sleep(POLL_S)
        finally:
            for seat in self._seats.values():
                _stop(seat)

    async def _refresh(self) -> None:
        await self._read_registry()
        self.look_again()
        with contextlib.suppress(IndexUnavailable):  # the registry says so
            await self._orders.forget_unseen(r.worker for r in self._listed())

    def look_again(self) -> None:
        """Follow the lists and orders as they are known here now."""
        self.take(self._orders.applied(self._listed()))

    def _listed(self) -> list[WorkerRecord]:
        return [*self._registered, *self._static()]

    async def _read_registry(self) -> None:
        try:
            records = await self._registry.workers()
            await self._orders.read()
        except IndexUnavailable as error:
            self._degraded.enter(
                "registry",
                f"the list of workers cannot be read ({error}); the last one stays in use",
                "check that Redis runs and that PREFIXFLEET_REDIS_URL is right",
            )
            return
        self._orders.say_refused(self._degraded)
        self._empty_answers = 0 if records else self._empty_answers + 1
        if self._registered and 0 < self._empty_answers < EMPTY_ANSWERS:
            return  # all at once: rather the registry was emptied than every worker died
        self._degraded.end("registry")
        self._registered = records
        if records:
            self._whole_s = min(self._whole_s, self._clock() + self._settling_s)

    def take(self, records: list[WorkerRecord]) -> None:
        """Make the seats agree with ``records``: new and changed ones are examined."""
        listed = {record.worker: record for record in records}
        for name in self._seats.keys() - listed.keys():
            log.info("worker %s left", name)
            _stop(self._seats.pop(name))
        for name, record in listed.items():
            seat = self._seats.get(name)
            if seat is None or _differs(seat.record, record):
                self._seat(record, seat)
            elif seat.record.state != record.state:
                self._change_state(seat, record)

    def _seat(self, record: WorkerRecord, before: _Seat | None) -> None:
        if before:
            log.info("worker %s changed its record", record.worker)
            _stop(before)
        seat = self._seats[record.worker] = _Seat(record)
        self._start_examination(seat)

    def _change_state(self, seat: _Seat, record: WorkerRecord) -> None:
        log.info("worker %s is %s", record.worker, record.state)
        seat.record = record
        if seat.state in EXAMINED:
            self._settle(seat)

    def _settle(self, seat: _Seat) -> None:
        """An examined worker is what its record says."""
        seat.state, seat.reason = seat.record.state, ""
        if seat.state == "ready":
            self._served[seat.record.worker] = seat.record.model
            self._arrival.set()
            self._arrival = asyncio.Event()

    def _start_examination(self, seat: _Seat) -> None:
        _stop(seat)
        seat.examination = asyncio.create_task(self._examine_until_settled(seat))

    async def _examine_until_settled(self, seat: _Seat) -> None:
        retry_s = FIRST_RETRY_S
        while True:
            try:
                async with self._slots:
                    seat.worker = await self._examine(seat.record)
            except WorkerSilent as error:
                seat.reason = str(error)
            except (ParityFailed, ConfigError) as error:
                seat.state, seat.reason, seat.worker = "refused", str(error), None
                log.error("worker %s is refused: %s", seat.record.worker, error)
                return
            except Exception as error:  # the top of a task: its fault must be seen
                reason = f"the router failed to examine it: {type(error).__name__}: {error}"
                seat.state, seat.reason, seat.worker = "refused", reason, None
                log.exception("worker %s is refused: a fault of the router", seat.record.worker)
                return
            else:
                if any(other.state == "ready" for other in self._seats.values()):
                    self._joined(seat.record.worker)
                self._settle(seat)
                log.info("worker %s is %s", seat.record.worker, seat.state)
                return
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, LAST_RETRY_S)


def _differs(before: WorkerRecord, after: WorkerRecord) -> bool:
    """Whether anything changed that the examination depends on."""
    return replace(before, state="") != replace(after, state="")


def _stop(seat: _Seat) -> None:
    if seat.examination:
        seat.examination.cancel()
        seat.examination = None
