"""Responses that engines compute behind their answer (`background`): load until they are done.

The answer comes at once, and says nothing of the prompt's end or the answer's. So the request is
charged on, and its engine asked for the response by and by: whoever does not know it, or does not
say, computes nothing of it. When by the estimates its prefill is over, or a stream's that came
after it, only its decode is load.
Nothing is charged for longer than `MOST_S`, and no more than `MOST_FOLLOWED` are followed: of
more, the oldest count as done.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec

from prefixfleet.router.charge import Charge
from prefixfleet.router.degraded import Degraded

MOST_S = 600.0
MOST_FOLLOWED = 1_000
LOOK_S = 0.5
AT_ONCE, OF_ONE_WORKER = 32, 4
"""Questions that are open; who waits longest is asked first, so of many each is asked seldom."""
ANSWER_S = 5.0
UNTOLD = 3
"""Questions in a row to which an engine does not say: then the response counts as done, though it
may be computed still."""
MAX_BYTES = 16 << 20
RUNNING = ("queued", "in_progress")
MODE = "background responses"

log = logging.getLogger(__name__)

StillRuns = Callable[[str], Coroutine[Any, Any, bool | None]]


class _Told(msgspec.Struct):
    status: str


def response_url(engine: str, response: str) -> str:
    """Where the engine at that URL tells of a response."""
    return f"{engine}/v1/responses/{quote(response, safe='')}"


def asking(session: Callable[[], aiohttp.ClientSession]) -> StillRuns:
    """Asks an engine whether it still computes the response at a URL; None if it does not say."""

    async def still_runs(url: str) -> bool | None:
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        try:
            async with session().get(url, timeout=timeout) as answer:
                if answer.status == 404:
                    return False
                return msgspec.json.decode(await _read(answer), type=_Told).status in RUNNING
        except (TimeoutError, aiohttp.ClientError, OSError):
            return None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None

    return still_runs


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    """Its first `MAX_BYTES`: more is no JSON then."""
    read = bytearray()
    async for part in answer.content.iter_any():
        read += part
        if len(read) > MAX_BYTES:
            break
    return bytes(read[:MAX_BYTES])


class Background:
    """Owned by the router's event loop. ``release`` gets each charge when its response is done;
    ``lost`` is told when an engine did not say whether it is. `run` looks until it is cancelled."""

    def __init__(
        self,
        still_runs: StillRuns,
        release: Callable[[Charge], object],
        lost: Callable[[], object],
        degraded: Degraded,
        clock: Callable[[], float],
    ) -> None:
        self._still_runs = still_runs
        self._release = release
        self._lost = lost
        self._degraded = degraded
        self._clock = clock
        self._untold: dict[Charge, int] = {}  # who was asked for longest ago first
        self._asking: dict[Charge, asyncio.Task[bool | None]] = {}
        self._work = asyncio.Event()

    def __len__(self) -> int:
        """Responses that are followed."""
        return len(self._untold)

    def follow(self, charge: Charge) -> None:
        """Keep ``charge`` until the response at its ``goes_on`` is done."""
        charge.go_on_unheard()
        self._untold[charge] = 0
        self._work.set()
        if len(self._untold) > MOST_FOLLOWED:
            self._degraded.enter(
                MODE,
                f"more than {MOST_FOLLOWED:,}: the oldest count as done while engines compute them",
                "start more routers, or let clients ask for less in the background",
            )
            self._done(min(self._untold, key=lambda other: other.started_s))

    async def run(self) -> None:
        """Look until cancelled."""
        try:
            while True:
                await self._work.wait()
                self._look()
                await asyncio.sleep(LOOK_S)
                if not self._untold and not self._asking:
                    self._work.clear()
        finally:
            for task in self._asking.values():
                task.cancel()
            self._asking.clear()

    def _look(self) -> None:
        for charge in [charge for charge, task in self._asking.items() if task.done()]:
            self._take(charge, self._asking.pop(charge).result())
        late_s = self._clock() - MOST_S
        for charge in [charge for charge in self._untold if charge.started_s <= late_s]:
            self._done(charge)
        self._ask()
        if len(self._untold) <= MOST_FOLLOWED // 2:
            self._degraded.end(MODE)

    def _take(self, charge: Charge, runs: bool | None) -> None:
        if (untold := self._untold.get(charge)) is None:  # its time was over meanwhile
            return
        untold = untold + 1 if runs is None else 0
        if untold >= UNTOLD:
            log.warning(
                "worker %s does not say what it computes: %s", charge.worker, charge.goes_on
            )
            self._lost()
        if runs is False or untold >= UNTOLD:
            return self._done(charge)
        del self._untold[charge]
        self._untold[charge] = untold
        now = self._clock()
        if runs and now - charge.started_s > charge.ahead_s + charge.expected_s:
            charge.decode_unheard(now)
        return None

    def _ask(self) -> None:
        open_at = Counter(charge.worker for charge in self._asking)
        for charge in self._untold:
            if len(self._asking) >= AT_ONCE:
                break
            if charge not in self._asking and open_at[charge.worker] < OF_ONE_WORKER:
                open_at[charge.worker] += 1
                self._asking[charge] = asyncio.create_task(self._still_runs(charge.goes_on))

    def _done(self, charge: Charge) -> None:
        del self._untold[charge]
        self._release(charge)
