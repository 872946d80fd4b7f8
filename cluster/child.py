"""A supervised child process: its own process group, on a leash, its output in a file.

Must not know what it runs.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from prefixfleet.cluster.leash import leashed
from prefixfleet.store.errors import ConfigError

TAIL_BYTES = 4096
SEARCHED_BYTES = 64 << 10
"""Of the end of its output: an engine's processes each print a traceback when one has failed."""


class Child:
    """One running command. Owned by the event loop that started it.

    It ends with its supervisor, whatever ends that, and takes its whole process group along.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, log_file: Path, earlier_bytes: int
    ) -> None:
        """``earlier_bytes`` of the log are the output of others before it."""
        self._process = process
        self.log_file = log_file
        self._earlier_bytes = earlier_bytes

    @classmethod
    async def start(
        cls, command: Sequence[str], *, environ: Mapping[str, str], log_file: Path
    ) -> "Child":
        """Start ``command``; its output is appended to ``log_file``. Raises `ConfigError`."""
        try:
            log_file.parent.mkdir(parents=True, exist_ok=True)
            with log_file.open("ab") as output:
                earlier_bytes = output.tell()
                process = await asyncio.create_subprocess_exec(
                    *leashed(list(command)),
                    env=dict(environ),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # Ctrl-C is for the supervisor, which stops us in order
                )
        except OSError as error:
            raise ConfigError(f"cannot start {command[0]}: {error}") from error
        return cls(process, log_file, earlier_bytes)

    @property
    def pid(self) -> int:
        """Process id, also the id of its process group."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.returncode is None

    async def wait(self) -> int:
        """Exit status; what was left of its group is gone when this returns."""
        status = await self._process.wait()
        self._kill_group()
        return status

    async def stop(self, grace_s: float) -> int:
        """Ask it to end, and end it after ``grace_s``."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
            except TimeoutError:
                self._kill_group()
        return await self.wait()

    def log_tail(self) -> str:
        """The end of its output, for an error message."""
        try:
            return self._end(TAIL_BYTES)
        except OSError as error:
            return f"(no log: {error})"

    def said_after(self, marker: str) -> str:
        """What follows ``marker`` in the last line of its own output that has it; or nothing."""
        with contextlib.suppress(OSError):
            for line in reversed(self._end(SEARCHED_BYTES).splitlines()):
                if marker in line:
                    return line.partition(marker)[2].strip()
        return ""

    def _end(self, most: int) -> str:
        """The last bytes of its own output. Raises `OSError`."""
        with self.log_file.open("rb") as output:
            size = output.seek(0, os.SEEK_END)
            output.seek(max(self._earlier_bytes, size - most))
            return output.read().decode(errors="replace").strip()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
