"""What operators ordered about workers, in Redis, so that every router of a fleet obeys.

One hash behind the fleet's prefix: worker_orders, name -> order, sealed (`signed`). What an order
says is the routers' own affair; it holds until it is withdrawn. Changes are counted beside it: a
server that counts fewer than were seen has lost its memory, or part of it, and is told again.
"""

import asyncio
import contextlib
import logging

from prefixfleet.store.errors import IndexUnavailable
from prefixfleet.store.redis_functions import RedisFunctions
from prefixfleet.store.signed import Outdated, Seals, Unsigned

MAX_ORDERS = 10_000
MAX_TRIES = 3
"""How often what was forgotten is put back, where others change orders meanwhile."""

log = logging.getLogger(__name__)


class WorkerOrders:
    """Orders of one fleet. Owned by one event loop; connects at the first call.

    Every call raises `IndexUnavailable` instead of waiting past ``timeout_s`` for one answer.
    """

    def __init__(self, url: str, fleet: str, secret: bytes, *, timeout_s: float = 1.0) -> None:
        self._redis = RedisFunctions(url, fleet, "registry", timeout_s=timeout_s)
        self._seals = Seals(secret, fleet, "order about worker")
        self._turn = asyncio.Lock()  # what was read is judged before anything newer is written
        self._changes = 0  # as the server counted when it was last read
        self._kept: dict[str, bytes] = {}  # the sound orders of that reading, sealed
        self.refused: dict[str, str] = {}  # of the last reading: why, by worker

    async def give(self, worker: str, order: bytes) -> None:
        """Order something about ``worker``; replaces what was ordered before."""
        async with self._turn:
            before = (await self._current()).get(worker)
            if before is not None:
                with contextlib.suppress(Unsigned):  # it is replaced
                    self._seals.open(worker, before)
            sealed = self._seals.seal(worker, order)
            self._changes = _count(await self._redis.call("give_order", worker, sealed))
            self._seals.wrote(worker, sealed)
            self._kept[worker] = sealed

    async def withdraw(self, worker: str) -> None:
        """No order about ``worker`` holds any more."""
        async with self._turn:
            stored = await self._current()
            self._changes = _count(await self._redis.call("withdraw_order", worker))
            self._kept.pop(worker, None)
            self._seals.only(stored.keys() - {worker})

    async def all(self) -> dict[str, bytes]:
        """Every order by worker; those that are not of this fleet's operators are in `refused`."""
        async with self._turn:
            return self._judge(await self._current())

    async def _current(self) -> dict[str, bytes]:
        """What is stored, sealed; put back first where the server has forgotten of it."""
        for _ in range(MAX_TRIES):
            changes, stored = await self._stored()
            if changes >= self._changes:
                self._changes = changes
                return stored
            back = self._forgotten(stored)
            words = [word for name, sealed in back.items() for word in (name, sealed)]
            if await self._redis.call("restore_orders", changes, self._changes, *words):
                log.warning("Redis has forgotten orders about workers: %d put back", len(back))
        raise IndexUnavailable("worker orders change while forgotten ones are put back")

    def _forgotten(self, stored: dict[str, bytes]) -> dict[str, bytes]:
        """What brings ``stored`` up to date: by worker the newer order, b"" for one taken back."""
        back = {name: sealed for name, sealed in self._kept.items() if name not in stored}
        for name, sealed in stored.items():
            try:
                self._seals.open(name, sealed)
            except Outdated:
                back[name] = self._kept.get(name, b"")
            except Unsigned:
                if name in self._kept:
                    back[name] = self._kept[name]
        return back

    async def _stored(self) -> tuple[int, dict[str, bytes]]:
        reply = await self._redis.ask("orders")
        match reply:
            case [bytes(changes), list(words)] if changes.isdigit():
                if not len(words) % 2 and len(words) <= 2 * MAX_ORDERS:
                    names = [name.decode("utf-8", "replace") for name in words[::2]]
                    return int(changes), dict(zip(names, words[1::2], strict=True))
        raise IndexUnavailable(f"worker orders: got {reply!r:.80}, expected names and orders")

    def _judge(self, stored: dict[str, bytes]) -> dict[str, bytes]:
        self._seals.only(stored)
        opened, self.refused = {}, {}
        for name, sealed in stored.items():
            try:
                opened[name] = self._seals.open(name, sealed)
            except Unsigned as error:
                self.refused[name] = str(error)
            else:
                self._kept[name] = sealed
        self._kept = {name: sealed for name, sealed in self._kept.items() if name in stored}
        return opened

    async def close(self) -> None:
        """Give back connections."""
        await self._redis.close()


def _count(reply: object) -> int:
    if not isinstance(reply, int):
        raise IndexUnavailable(f"worker orders: got {reply!r:.80}, expected a count")
    return reply
