"""`Crew`: a few threads that block in system calls in place of the event loop.

A blocking socket call that fills a whole buffer costs half as much as the same bytes in many
wakes of the loop, and leaves the loop to the engines' questions.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

MAX_THREADS = 16


class Crew:
    """Owned by one link. Threads start when they are first needed, never more than ``size``.

    What they do must end by itself: the interpreter waits for it at its exit.
    """

    def __init__(self, name: str, size: int = MAX_THREADS) -> None:
        self._executor = ThreadPoolExecutor(size, thread_name_prefix=f"prefixfleet-{name}")
        self._free = threading.BoundedSemaphore(size)

    def start(
        self, call: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> "Future[Result] | None":
        """``call`` in a thread, or None when all are busy: then do without."""
        if not self._free.acquire(blocking=False):
            return None
        future = self._executor.submit(call, *args, **kwargs)
        future.add_done_callback(lambda _: self._free.release())
        return future

    def close(self) -> None:
        """Start nothing more."""
        self._executor.shutdown(wait=False)
