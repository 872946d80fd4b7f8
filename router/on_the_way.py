"""What is sent and not waited for: a bounded number to each place, so that one that does not answer
keeps nothing from the others."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any


class OnTheWay:
    """Owned by the router's event loop. At most ``most_to_one`` are on the way to one place."""

    def __init__(self, most_to_one: int) -> None:
        self._most_to_one = most_to_one
        self._tasks: dict[str, set[asyncio.Task[Any]]] = {}

    def start(self, place: str, work: Callable[[], Coroutine[Any, Any, object]]) -> bool:
        """Do ``work``, unless too much is on its way to ``place``: then False."""
        tasks = self._tasks.setdefault(place, set())
        if len(tasks) >= self._most_to_one:
            return False
        task = asyncio.create_task(work())
        tasks.add(task)
        task.add_done_callback(partial(self._done, place))
        return True

    def _done(self, place: str, task: asyncio.Task[Any]) -> None:
        tasks = self._tasks[place]
        tasks.discard(task)
        if not tasks:
            del self._tasks[place]

    async def close(self) -> None:
        """Give up what is on its way."""
        tasks = [task for tasks in self._tasks.values() for task in tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
