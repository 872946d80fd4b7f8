"""Operators' orders about workers: drained, taken out, or added without a file.

They are kept in Redis, so that every router and every process of one obeys; without it the last
ones read stay in force. An order about a worker that nobody lists any more is forgotten after a
while: its name may come back as another one.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Literal, Protocol

import msgspec

from prefixfleet.router.degraded import Degraded
from prefixfleet.router.static_workers import StaticWorker
from prefixfleet.store.errors import IndexUnavailable
from prefixfleet.store.records import WorkerRecord

FORGOTTEN_S = 60.0
"""How long an order outlives the last sight of its worker: a restart takes less."""

log = logging.getLogger(__name__)


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """About one worker. ``entry`` is one that was added by order."""

    state: Literal["ready", "draining", "removed"] = "ready"
    entry: StaticWorker | None = None


class OrderStore(Protocol):
    """Where orders are kept: `store.worker_orders.WorkerOrders`."""

    async def give(self, worker: str, order: bytes) -> None:
        """Replace the order about ``worker``."""
        ...

    async def withdraw(self, worker: str) -> None:
        """Forget the order about ``worker``."""
        ...

    async def all(self) -> dict[str, bytes]:
        """Every order that somebody with the cluster secret gave."""
        ...

    @property
    def refused(self) -> Mapping[str, str]:
        """Why others were left out of the last `all`, by worker."""
        ...


class Orders:
    """Owned by the router's event loop; the last orders that were read or given."""

    def __init__(self, store: OrderStore | None, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._orders: dict[str, Order] = {}
        self._unseen_since: dict[str, float] = {}

    def added(self) -> dict[str, StaticWorker]:
        """Workers that were added by order."""
        return {
            name: order.entry
            for name, order in self._orders.items()
            if order.entry and order.state != "removed"
        }

    def of(self, worker: str) -> Order:
        """What holds about ``worker``."""
        return self._orders.get(worker, Order())

    def applied(self, records: Iterable[WorkerRecord]) -> list[WorkerRecord]:
        """``records`` without those taken out; those drained say so."""
        obeyed = []
        for record in records:
            state = self.of(record.worker).state
            if state != "removed":
                drained = state == "draining" and record.state == "ready"
                obeyed.append(replace(record, state=state) if drained else record)
        return obeyed

    @property
    def refused(self) -> Mapping[str, str]:
        """Orders that lie there and are not obeyed, with why."""
        return self._store.refused if self._store is not None else {}

    def say_refused(self, degraded: Degraded) -> None:
        """Make orders that are not obeyed visible."""
        if not self.refused:
            degraded.end("orders")
            return
        degraded.enter(
            "orders",
            f"{len(self.refused)} orders in Redis are not obeyed: "
            f"{next(iter(self.refused.values())):.300}",
            "find out who writes to Redis; an order that is given again replaces such a one",
        )

    async def read(self) -> None:
        """Follow what was ordered anywhere. Raises `IndexUnavailable`."""
        if self._store is not None:
            self._orders = decoded(await self._store.all())

    async def give(self, worker: str, order: Order) -> None:
        """Order it everywhere; nothing to say is no order. Raises `IndexUnavailable`."""
        if self._store is None:
            raise IndexUnavailable("this router has no Redis to keep orders in")
        if order == Order():
            await self._store.withdraw(worker)
            self._orders.pop(worker, None)
        else:
            await self._store.give(worker, msgspec.json.encode(order))
            self._orders[worker] = order

    async def forget_unseen(self, listed: Iterable[str]) -> None:
        """Withdraw orders about workers that none of the lists has had for long."""
        now, seen = self._clock(), set(listed)
        for name, order in list(self._orders.items()):
            if name in seen or order.entry:
                self._unseen_since.pop(name, None)
            elif now - self._unseen_since.setdefault(name, now) > FORGOTTEN_S:
                log.info("order about worker %s forgotten: nobody lists it", name)
                del self._unseen_since[name]
                await self.give(name, Order())


def decoded(orders: Mapping[str, bytes]) -> dict[str, Order]:
    """The orders that can be read; others are logged and left out."""
    found = {}
    for name, data in orders.items():
        try:
            found[name] = msgspec.json.decode(data, type=Order)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.warning("order about worker %.80s ignored: %s", name, error)
    return found
