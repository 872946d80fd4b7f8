"""The parent's hand on `collective_child`: one command at a time, and an end by its deadline."""

import asyncio
import contextlib
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from prefixfleet.store.errors import DeadlineExceeded, PeerBusy, PeerLost
from prefixfleet.transfer.link import Deadline

log = logging.getLogger(__name__)

START_S = 120.0
"""Importing torch on a busy machine."""


class CollectiveWorker:
    """One child at a time over one segment. Owned by one event loop.

    ``device`` names a GPU ("cuda:0") for broadcasts over NCCL, "" none; ``fault`` says why the
    child does not use it.
    """

    def __init__(self, segment_path: Path, device: str = "") -> None:
        self._path = segment_path
        self._device = device
        self.fault = ""
        self._child: asyncio.subprocess.Process | None = None
        self._busy = False
        self.starts = 0

    @property
    def ready(self) -> bool:
        """Whether a command can be given now."""
        return self._child is not None and self._child.returncode is None and not self._busy

    @property
    def pid(self) -> int:
        """Of the child; 0 for none."""
        return self._child.pid if self._child is not None else 0

    async def start(self) -> None:
        """A fresh child. Raises `PeerLost` or `DeadlineExceeded` if it does not come up."""
        await self.kill()
        self._child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "prefixfleet.transfer.collective_child", str(self._path)),
            *([self._device] if self._device else []),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.starts += 1
        self._busy = True
        told = await self._answer(time.monotonic() + START_S)
        self.fault = told["fault"]

    async def call(self, command: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
        """The child's answer to one command.

        When this raises or is cancelled, nothing writes into the segment any more: a child that
        reports a failure has torn its group down, any other is dead.

        Raises:
            PeerBusy: another command is under way, or there is no child.
            PeerLost: the child reports a failure, or is gone.
            DeadlineExceeded: it was killed at the deadline.
        """
        if not self.ready or self._child is None or self._child.stdin is None:
            raise PeerBusy("this node's part in collectives is busy or not up")
        self._busy = True
        self._child.stdin.write(json.dumps(command).encode() + b"\n")
        reply = await self._answer(deadline)
        if "failed" in reply:
            raise PeerLost(f"collective: {reply['failed']}")
        return reply

    async def kill(self) -> None:
        """End the child, whatever it does."""
        child, self._child = self._child, None
        if child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await asyncio.shield(child.wait())  # SIGKILL cannot be held off
        if child.stdin is not None:
            child.stdin.close()

    async def _answer(self, deadline: Deadline) -> dict[str, Any]:
        assert self._child is not None
        assert self._child.stdout is not None
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                line = await self._child.stdout.readline()
            reply: dict[str, Any] = json.loads(line) if line else {}
        except TimeoutError:
            await self.kill()
            raise DeadlineExceeded("collective: not done by its deadline") from None
        except BaseException:
            await self.kill()
            raise
        finally:
            self._busy = False
        if not reply:
            await self.kill()
            raise PeerLost("collective: the child process ended")
        return reply
