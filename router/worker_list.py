"""Which workers there are, as registry and files list them; believed with care.

A registry that suddenly knows nobody has rather been emptied than that every worker died, and one
that lost its memory hears of its workers one after another.
"""

import math
from collections.abc import Callable, Iterable
from typing import Protocol

from prefixfleet.router.degraded import Degraded
from prefixfleet.router.orders import Orders
from prefixfleet.store.errors import IndexUnavailable
from prefixfleet.store.records import WorkerRecord

EMPTY_ANSWERS = 5  # in a row until a registry that knows nobody is believed


class Registry(Protocol):
    """Where workers are announced: `store.registry.WorkerRegistry` or a fixed list."""

    async def workers(self) -> list[WorkerRecord]:
        """Every announced worker whose lease holds. Raises `IndexUnavailable`."""
        ...


class WorkerList:
    """Owned by a `Roster`. ``static`` gives the workers that no registry lists; they need none. For
    ``settling_s`` after the registry's first list workers may be missing in it."""

    def __init__(
        self,
        registry: Registry,
        static: Callable[[], Iterable[WorkerRecord]],
        orders: Orders,
        degraded: Degraded,
        clock: Callable[[], float],
        settling_s: float,
    ) -> None:
        self._registry = registry
        self._static = static
        self._orders = orders
        self._degraded = degraded
        self._clock = clock
        self._settling_s = settling_s
        self._whole_s = math.inf
        self._registered: list[WorkerRecord] = []
        self._empty_answers = 0

    @property
    def is_whole(self) -> bool:
        """Whether nobody is missing in it, for all that is known."""
        return not self._registered or self._clock() >= self._whole_s

    def records(self) -> list[WorkerRecord]:
        """As it was read last, without what operators ordered."""
        return [*self._registered, *self._static()]

    async def read(self) -> None:
        """Read the registry, and operators' orders; what cannot be read stays as it was."""
        try:
            records = await self._registry.workers()
            await self._orders.read()
        except IndexUnavailable as error:
            self._degraded.enter(
                "registry",
                f"the list of workers cannot be read ({error}); the last one stays in use",
                "check that Redis runs and that PREFIXFLEET_REDIS_URL is right",
            )
            return
        self._orders.say_refused(self._degraded)
        self._empty_answers = 0 if records else self._empty_answers + 1
        if self._registered and 0 < self._empty_answers < EMPTY_ANSWERS:
            return
        self._degraded.end("registry")
        self._registered = records
        if records:
            self._whole_s = min(self._whole_s, self._clock() + self._settling_s)
