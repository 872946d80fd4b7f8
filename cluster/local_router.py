"""The router of a fleet on this machine: a child that is started again when it ends."""

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from prefixfleet.cluster.child import Child
from prefixfleet.cluster.kept import keep
from prefixfleet.store.errors import ConfigError

READY_S = 120.0
"""The longest it may take until it has examined its workers."""
LOOK_S = 0.2


class LocalRouter:
    """Owned by the supervisor's loop. ``environ`` holds its settings, ``endpoint`` its address."""

    def __init__(self, endpoint: str, environ: Mapping[str, str], log_file: Path) -> None:
        self.endpoint = endpoint
        self._environ = environ
        self._log_file = log_file
        self._child: Child

    async def start(self) -> None:
        """Start it; it may not serve yet. Raises `ConfigError`."""
        self._child = await Child.start(
            [sys.executable, "-m", "prefixfleet.router"],
            environ=self._environ,
            log_file=self._log_file,
        )

    async def wait_ready(self, workers: int) -> None:
        """Wait until so many workers are ready. Raises `ConfigError`: one is refused, it ended, or
        its time is over."""
        try:
            async with asyncio.timeout(READY_S), aiohttp.ClientSession() as session:
                while await self._ready_workers(session) != workers:  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            raise ConfigError(
                f"the router has not {workers} ready workers after {READY_S:g} s; its last words:\n"
                f"{self._child.log_tail()}"
            ) from None

    async def keep(self) -> None:
        """Start it again whenever it ends, until cancelled."""

        async def ended() -> str:
            return f"status {await self._child.wait()}; see {self._log_file}"

        await keep("the router", ended, self.start)

    async def stop(self, grace_s: float) -> None:
        """End it."""
        await self._child.stop(grace_s)

    async def _ready_workers(self, session: aiohttp.ClientSession) -> int:
        if not self._child.running:
            raise ConfigError(f"the router ended: {self._child.log_tail()}")
        try:
            async with session.get(f"{self.endpoint}/status") as response:
                workers: list[dict[str, Any]] = (await response.json())["workers"]
        except aiohttp.ClientError:
            return 0
        for worker in workers:
            if worker["state"] == "refused":
                raise ConfigError(f"worker {worker['worker']}: {worker['reason']}")
        return sum(worker["state"] == "ready" for worker in workers)
