"""`Loops`: what a daemon does all the time, whenever it began; one that breaks is seen at once."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class Loops:
    """Owned by a daemon, on its event loop. Who starts a loop may cancel it."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()
        self._broke = asyncio.Event()
        self._fault: BaseException | None = None

    def start(self, loop: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run it until `end`."""
        task = asyncio.create_task(loop)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    async def wait(self, stop: asyncio.Event) -> None:
        """Return when ``stop`` is set; raises what a loop raised, also one that begins later."""
        ends = [asyncio.create_task(event.wait()) for event in (stop, self._broke)]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._fault is not None:
                raise self._fault
        finally:
            for end in ends:
                end.cancel()

    async def end(self) -> None:
        """Cancel all, and wait for them."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fault = self._fault or error
            self._broke.set()
