"""Which worker keeps a stored response in its memory: no other one has it.

What this router saw it knows itself; what others saw it asks of Redis, where each tells the others,
and tells all of it again when Redis was away.
A response is known by its tenant and id together: another tenant's is looked for, and not found,
like one that never was.
"""

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Protocol

from prefixfleet.router.degraded import Degraded
from prefixfleet.router.fairly_kept import FairlyKept
from prefixfleet.store.errors import IndexUnavailable
from prefixfleet.store.stored_responses import MOST_RESPONSES, RESPONSE_TTL_S, ResponseName

BATCH = 500  # told in one call
AGAIN_S = 1.0
LATE_S = 0.1
"""Who does not find a response looks once more after this: a client may ask another router for it
before the one that saw it has told."""


class SharedKeepers(Protocol):
    """Where routers tell each other: `store.stored_responses.StoredResponses`."""

    async def note(self, workers: Mapping[ResponseName, str]) -> None:
        """Each response is kept by its worker. Raises `IndexUnavailable`."""
        ...

    async def worker_of(self, name: ResponseName) -> str:
        """Who keeps it; empty if nobody. Raises `IndexUnavailable`."""
        ...


class Keepers:
    """Owned by the router's event loop. `run` tells the others until it is cancelled."""

    def __init__(
        self,
        shared: SharedKeepers | None,
        secret: bytes,
        degraded: Degraded,
        clock: Callable[[], float],
        *,
        most: int = MOST_RESPONSES,
        ttl_s: float = RESPONSE_TTL_S,
    ) -> None:
        """At most ``most`` responses are known, each for ``ttl_s``; of too many the oldest of the
        tenant with the most go."""
        self.shared = shared
        self._secret = hashlib.blake2b(secret, digest_size=32, person=b"pf-responses").digest()
        self._degraded = degraded
        self._clock = clock
        self._kept = FairlyKept(most, ttl_s)
        self._untold: dict[ResponseName, str] = {}  # some of them
        self._work = asyncio.Event()
        self._away = False  # whether Redis was, since it was told last

    def __len__(self) -> int:
        """Responses of which this router knows the worker."""
        return len(self._kept)

    @property
    def untold(self) -> int:
        """Those of which the other routers do not know yet."""
        return len(self._untold)

    def note(self, tenant: str, response: str, worker: str) -> None:
        """``worker`` keeps the response with that id for ``tenant``."""
        name = self._name(tenant, response)
        self._keep(name, worker)
        if self.shared is not None:
            self._untold[name] = worker
            self._work.set()

    async def worker_of(self, tenant: str, response: str) -> str:
        """Who keeps it; empty if nobody keeps one with that id for this tenant.

        Raises:
            IndexUnavailable: this router does not know, and cannot ask.
        """
        name = self._name(tenant, response)
        worker = self._kept.worker_of(name, self._clock())
        if worker or self.shared is None:
            return worker
        if not (worker := await self._ask(self.shared, name)):
            await asyncio.sleep(LATE_S)
            worker = self._kept.worker_of(name, self._clock()) or await self._ask(self.shared, name)
        if worker:
            self._keep(name, worker)
        return worker

    async def run(self) -> None:
        """Tell the others what they do not know, until cancelled; try again where that fails."""
        assert self.shared is not None
        while True:
            await self._work.wait()
            if not await self._tell(self.shared):
                await asyncio.sleep(AGAIN_S)
            elif not self._untold:
                self._work.clear()

    async def _tell(self, shared: SharedKeepers) -> bool:
        batch = dict(islice(self._untold.items(), BATCH))
        try:
            await shared.note(batch)
        except IndexUnavailable as error:
            self._lost(error)
            return False
        self._degraded.end("responses")
        for name, worker in batch.items():
            if self._untold.get(name) == worker:
                del self._untold[name]
        if self._away:  # it may have come back without its memory
            self._away = False
            self._untold = self._kept.all()
        return True

    async def _ask(self, shared: SharedKeepers, name: ResponseName) -> str:
        try:
            return await shared.worker_of(name)
        except IndexUnavailable as error:
            self._lost(error)
            raise

    def _lost(self, error: IndexUnavailable) -> None:
        self._degraded.enter(
            "responses",
            f"stored responses that other routers saw are not found ({error})",
            "check that Redis runs and that PREFIXFLEET_REDIS_URL is right",
        )
        self._away = True
        self._work.set()  # the next call that succeeds ends it

    def _keep(self, name: ResponseName, worker: str) -> None:
        for gone in self._kept.keep(name, worker, self._clock()):
            self._untold.pop(gone, None)

    def _name(self, tenant: str, response: str) -> ResponseName:
        return ResponseName(
            self._digest(tenant, 8), self._digest(f"{len(tenant)}:{tenant}{response}", 16)
        )

    def _digest(self, words: str, size: int) -> bytes:
        data = words.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(data, digest_size=size, key=self._secret).digest()
