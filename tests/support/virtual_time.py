"""An event loop whose clock jumps: waiting takes no time, and the order of things is exact."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only when nobody has anything to do. For code without threads and sockets.

    A loop in which nothing will ever happen again is a hang: it raises `AssertionError`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 1000.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        loop: Any = self
        if not loop._ready:
            assert loop._scheduled, "everything waits, and nothing will ever wake it"
            self._now = max(self._now, loop._scheduled[0]._when)
        loop_base: Any = super()
        loop_base._run_once()

    def steps(self, count: int) -> None:
        """Let everybody who can do so take ``count`` steps; no time passes."""

        async def pause() -> None:
            for _ in range(count):
                await asyncio.sleep(0)

        self.run_until_complete(pause())

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass."""
        self.run_until_complete(asyncio.sleep(seconds))

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Result of a coroutine."""
        return self.run_until_complete(work)


@contextmanager
def virtual_time() -> Iterator[VirtualLoop]:
    """A loop, and `time.monotonic` that shows its time."""
    loop = VirtualLoop()
    with patch("time.monotonic", loop.time):
        yield loop
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.steps(20)
    loop.close()
