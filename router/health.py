"""Asks every ready worker for its health, so that one that died while idle costs no request; and
plain engines for what they serve."""

import asyncio
import random

import aiohttp

from prefixfleet.router.roster import EXAMINED, Roster

FAILURES = 3  # in a row until a worker is down: one slow answer is no fault
ADAPTERS_EVERY = 3  # looks: a plain engine may load adapters while it runs


class HealthChecks:
    """Owned by the router's event loop. ``interval_s`` lies between the beginnings of two looks at
    a worker; an answer may take as long. Each worker is looked at by a task of its own, so who does
    not answer holds up nobody else's look."""

    def __init__(self, roster: Roster, session: aiohttp.ClientSession, interval_s: float) -> None:
        """``session`` has no limit on its connections: of a worker one look is open, no more."""
        self._roster = roster
        self._session = session
        self._interval_s = interval_s
        self._urls: dict[str, str] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Look until cancelled."""
        async with asyncio.TaskGroup() as watches:
            while True:
                self._follow(watches)
                await asyncio.sleep(self._interval_s)

    def _follow(self, watches: asyncio.TaskGroup) -> None:
        """Begin with who came, and look no more at who left."""
        standings = self._roster.standings()
        self._urls = {s.record.worker: s.record.url for s in standings if s.state in EXAMINED}
        for name in self._watches.keys() - self._urls.keys():
            self._watches.pop(name).cancel()
        for name in self._urls.keys() - self._watches.keys():
            self._watches[name] = watches.create_task(self._watch(name))

    async def _watch(self, name: str) -> None:
        clock = asyncio.get_running_loop().time
        looks = failures = 0
        next_s = clock() + random.random() * self._interval_s  # not all in one turn of the loop
        while True:
            await asyncio.sleep(next_s - clock())
            next_s = clock() + self._interval_s
            problem = await self._problem(f"{self._urls[name]}/health")
            looks, failures = looks + 1, failures + 1 if problem else 0
            if failures >= FAILURES:
                failures = 0
                self._roster.lost(name, f"{FAILURES} health checks failed: {problem}")
            if not problem and looks % ADAPTERS_EVERY == 0:
                await self._roster.look_for_adapters(name)

    async def _problem(self, url: str) -> str:
        """What is wrong with the answer; empty if it lives: an engine without the route does."""
        timeout = aiohttp.ClientTimeout(total=self._interval_s)
        try:
            async with self._session.get(url, timeout=timeout) as response:
                return f"status {response.status}" if response.status >= 500 else ""
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            return f"{type(error).__name__}: {error}"
