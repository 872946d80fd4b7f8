"""Asks every ready worker for its health, so that one that died while idle costs no request; and
plain engines for what they serve."""

import asyncio
import logging

import aiohttp

from prefixfleet.router.roster import EXAMINED, Roster
from prefixfleet.router.seat import Standing

FAILURES = 3  # in a row until a worker is down: one slow answer is no fault
ADAPTERS_EVERY = 3  # looks: a plain engine may load adapters while it runs

log = logging.getLogger(__name__)


class HealthChecks:
    """Owned by the router's event loop. ``interval_s`` lies between two looks at a worker; an
    answer may take as long."""

    def __init__(self, roster: Roster, session: aiohttp.ClientSession, interval_s: float) -> None:
        self._roster = roster
        self._session = session
        self._interval_s = interval_s
        self._failures: dict[str, int] = {}
        self._looks = 0

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            asked = [s for s in self._roster.standings() if s.state in EXAMINED]
            self._failures = {
                s.record.worker: self._failures.get(s.record.worker, 0) for s in asked
            }
            self._looks += 1
            await asyncio.gather(*map(self._look_at, asked))

    async def _look_at(self, standing: Standing) -> None:
        name = standing.record.worker
        problem = await self._problem(f"{standing.record.url}/health")
        self._failures[name] = self._failures.get(name, 0) + 1 if problem else 0
        if self._failures[name] >= FAILURES:
            self._failures[name] = 0
            self._roster.lost(name, f"{FAILURES} health checks failed: {problem}")
        if not problem and self._looks % ADAPTERS_EVERY == 0:
            await self._roster.look_for_adapters(name)

    async def _problem(self, url: str) -> str:
        """What is wrong with the answer; empty if it lives: an engine without the route does."""
        timeout = aiohttp.ClientTimeout(total=self._interval_s)
        try:
            async with self._session.get(url, timeout=timeout) as response:
                return f"status {response.status}" if response.status >= 500 else ""
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            return f"{type(error).__name__}: {error}"
