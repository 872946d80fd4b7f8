"""What operators ordered about workers, in Redis, so that every router of a fleet obeys.

One hash behind the fleet's prefix: worker_orders, name -> order, sealed (`signed`). What an order
says is the routers' own affair; it holds until it is withdrawn.
"""

import asyncio
import contextlib

from prefixfleet.store.errors import IndexUnavailable
from prefixfleet.store.redis_functions import RedisFunctions
from prefixfleet.store.signed import Seals, Unsigned

MAX_ORDERS = 10_000


class WorkerOrders:
    """Orders of one fleet. Owned by one event loop; connects at the first call.

    Every call raises `IndexUnavailable` instead of waiting past ``timeout_s``.
    """

    def __init__(self, url: str, fleet: str, secret: bytes, *, timeout_s: float = 1.0) -> None:
        self._redis = RedisFunctions(url, fleet, "registry", timeout_s=timeout_s)
        self._key = self._redis.prefix + b"worker_orders"
        self._seals = Seals(secret, fleet, "order about worker")
        self._turn = asyncio.Lock()  # what was read is judged before anything newer is written
        self.refused: dict[str, str] = {}  # of the last reading: why, by worker

    async def give(self, worker: str, order: bytes) -> None:
        """Order something about ``worker``; replaces what was ordered before."""
        async with self._turn:
            before = await self._redis.command("HGET", self._key, worker)
            if isinstance(before, bytes):
                with contextlib.suppress(Unsigned):  # it is replaced
                    self._seals.open(worker, before)
            sealed = self._seals.seal(worker, order)
            await self._redis.command("HSET", self._key, worker, sealed)
            self._seals.wrote(worker, sealed)

    async def withdraw(self, worker: str) -> None:
        """No order about ``worker`` holds any more."""
        await self._redis.command("HDEL", self._key, worker)

    async def all(self) -> dict[str, bytes]:
        """Every order by worker; those that are not of this fleet's operators are in `refused`."""
        async with self._turn:
            reply = await self._redis.command("HGETALL", self._key)
            if not isinstance(reply, list) or len(reply) % 2 or len(reply) > 2 * MAX_ORDERS:
                raise IndexUnavailable(
                    f"worker orders: got {reply!r:.80}, expected names and orders"
                )
            return self._judge(reply)

    def _judge(self, reply: list[bytes]) -> dict[str, bytes]:
        names = [name.decode("utf-8", "replace") for name in reply[::2]]
        self._seals.only(names)
        opened, self.refused = {}, {}
        for name, sealed in zip(names, reply[1::2], strict=True):
            try:
                opened[name] = self._seals.open(name, sealed)
            except Unsigned as error:
                self.refused[name] = str(error)
        return opened

    async def close(self) -> None:
        """Give back connections."""
        await self._redis.close()
