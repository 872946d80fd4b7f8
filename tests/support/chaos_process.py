"""One process of a chaos run, which the run kills, freezes and starts again."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import psutil

from prefixfleet.cluster.leash import leashed

STOP_S = 30.0


class Process:
    """Owned by its fleet, on one event loop. Each life has the command and files of the first."""

    def __init__(self, name: str, command: list[str], environ: dict[str, str], log: Path) -> None:
        self.name = name
        self._command = leashed(command)
        self._environ = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self.lives = 0
        self.unexpected = 0  # ends that nobody asked for

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, env=self._environ, stdout=log, stderr=log
            )
        self.lives += 1

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def send_all(self, number: int) -> None:
        """To it and whatever it started: a real engine is a child of its worker."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.send_signal(number)
        self.send(number)

    async def kill(self) -> None:
        self.send_all(signal.SIGKILL)
        assert self._process is not None
        await self._process.wait()

    async def stop(self) -> int:
        """Ask it to end; its exit status, or -9 if it had to be killed."""
        assert self._process is not None
        self.send_all(signal.SIGCONT)
        self.send(signal.SIGTERM)
        try:
            return await asyncio.wait_for(self._process.wait(), STOP_S)
        except TimeoutError:
            await self.kill()
            return -9
