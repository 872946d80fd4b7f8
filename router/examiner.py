"""Examines workers until each is settled: it agrees with this router, or is refused.

What may be wrong says `parity`. A worker that does not answer is asked again, ever more seldom.
All are examined at once, for one that hangs must not keep another from its traffic; they begin one
after the other, so that a thousand that come together do not hold up the event loop.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from prefixfleet.router.adapter_notices import unread
from prefixfleet.router.adapters import Adapters, AdaptersUnknown
from prefixfleet.router.degraded import Degraded
from prefixfleet.router.parity import ParityFailed, WorkerSilent
from prefixfleet.router.seat import Seat
from prefixfleet.router.worker import Worker
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.records import WorkerRecord

FIRST_RETRY_S = 0.25
LAST_RETRY_S = 5.0

log = logging.getLogger(__name__)

Examine = Callable[[WorkerRecord], Awaitable[Worker]]
"""The worker, once it agrees with this router.

Raises `ParityFailed`, `WorkerSilent`, `ConfigError`.
"""

Ask = Callable[[Worker], Awaitable[Adapters]]
"""Adapters that a plain engine has now. Raises `AdaptersUnknown`."""

Passed = Callable[[Seat, Worker, Adapters | None], None]
"""Told of a worker that agrees, and of its adapters if it is a plain engine that was asked."""


class Examiner:
    """Owned by a `Roster`."""

    def __init__(self, examine: Examine, ask: Ask, degraded: Degraded) -> None:
        self._examine = examine
        self._ask = ask
        self._degraded = degraded
        self._entrance = asyncio.Lock()

    def start(self, seat: Seat, passed: Passed, refused: Callable[[Seat, str], None]) -> None:
        """Examine who sits there, again if need be; ``refused`` is told why it is."""
        seat.stop()
        seat.examination = asyncio.create_task(self._until_settled(seat, passed, refused))

    async def adapters(self, worker: Worker) -> Adapters | None:
        """Those of a plain engine now; None if they cannot be told."""
        mode = unread(worker.name)
        try:
            found = await self._ask(worker)
        except AdaptersUnknown as error:
            remedy = "see that the engine answers it; what was known before stays in use"
            self._degraded.enter(mode, f"{error}", remedy)
            return None
        self._degraded.end(mode)
        return found

    async def _until_settled(
        self, seat: Seat, passed: Passed, refused: Callable[[Seat, str], None]
    ) -> None:
        retry_s = FIRST_RETRY_S
        while True:
            try:
                async with self._entrance:
                    await asyncio.sleep(0)  # one in each turn of the loop
                worker = await self._examine(seat.record)
                adapters = await self.adapters(worker) if worker.static else None
            except WorkerSilent as error:
                seat.reason = str(error)
            except (ParityFailed, ConfigError) as error:
                log.error("worker %s is refused: %s", seat.record.worker, error)
                return refused(seat, str(error))
            except Exception as error:  # the top of a task: its fault must be seen
                log.exception("worker %s is refused: a fault of the router", seat.record.worker)
                what = f"{type(error).__name__}: {error}"
                return refused(seat, f"the router failed to examine it: {what}")
            else:
                return passed(seat, worker, adapters)
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, LAST_RETRY_S)
