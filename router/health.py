"""Asks every ready worker for its health, so that one that died while idle costs no request; and
plain engines for what they serve."""

import asyncio
from dataclasses import dataclass

import aiohttp

from prefixfleet.router.roster import EXAMINED, Roster

FAILURES = 3  # in a row until a worker is down: one slow answer is no fault
ADAPTERS_EVERY = 3  # looks: a plain engine may load adapters while it runs
AT_ONCE = 64
"""Workers that are asked at one time: fewer than the session's connections."""


@dataclass(slots=True)
class _Watched:
    """One worker, as long as it is examined."""

    look: asyncio.Task[None] | None = None
    looks: int = 0
    failures: int = 0


class HealthChecks:
    """Owned by the router's event loop. ``interval_s`` lies between two looks at a worker; an
    answer may take as long. Who does not answer holds up nobody else's look."""

    def __init__(self, roster: Roster, session: aiohttp.ClientSession, interval_s: float) -> None:
        self._roster = roster
        self._session = session
        self._interval_s = interval_s
        self._watched: dict[str, _Watched] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def run(self) -> None:
        """Look until cancelled."""
        async with asyncio.TaskGroup() as looks:
            while True:
                await asyncio.sleep(self._interval_s)
                self._follow(looks)

    def _follow(self, looks: asyncio.TaskGroup) -> None:
        """Look at each whose last look is over, and no more at who left."""
        standings = self._roster.standings()
        urls = {s.record.worker: s.record.url for s in standings if s.state in EXAMINED}
        for name in self._watched.keys() - urls.keys():
            if look := self._watched.pop(name).look:
                look.cancel()
        for name, url in urls.items():
            watched = self._watched.setdefault(name, _Watched())
            if watched.look is None or watched.look.done():
                watched.look = looks.create_task(self._look_at(name, url, watched))

    async def _look_at(self, name: str, url: str, watched: _Watched) -> None:
        async with self._slots:
            problem = await self._problem(f"{url}/health")
            watched.looks += 1
            watched.failures = watched.failures + 1 if problem else 0
            if watched.failures >= FAILURES:
                watched.failures = 0
                self._roster.lost(name, f"{FAILURES} health checks failed: {problem}")
            if not problem and watched.looks % ADAPTERS_EVERY == 0:
                await self._roster.look_for_adapters(name)

    async def _problem(self, url: str) -> str:
        """What is wrong with the answer; empty if it lives: an engine without the route does."""
        timeout = aiohttp.ClientTimeout(total=self._interval_s)
        try:
            async with self._session.get(url, timeout=timeout) as response:
                return f"status {response.status}" if response.status >= 500 else ""
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            return f"{type(error).__name__}: {error}"
