"""Who keeps which response, as one router knows it: so many at most, each for a while, and of too
many the tenant with the most loses its oldest. Pure: the clock is an argument; no step looks at
more than a few.
"""

from collections import OrderedDict
from typing import NamedTuple

from prefixfleet.store.stored_responses import ResponseName

OVER_AT_ONCE = 64
"""Of a tenant's responses whose time is over, so many go in one step."""


class _Kept(NamedTuple):
    worker: str
    until_s: float


class FairlyKept:
    """At most ``most`` responses, each for ``ttl_s``. Owned by `Keepers`."""

    def __init__(self, most: int, ttl_s: float) -> None:
        self._most, self._ttl_s = most, ttl_s
        # a dict's first key is found the more slowly the more went before it
        self._tenants: OrderedDict[bytes, OrderedDict[bytes, _Kept]] = OrderedDict()
        """Of each its responses, the oldest first; whoever was looked through longest ago first."""
        self._with: dict[int, OrderedDict[bytes, None]] = {}  # tenants by how many they have
        self._largest = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def keep(self, name: ResponseName, worker: str, now: float) -> list[ResponseName]:
        """``worker`` keeps it from now on. Those that are forgotten for it."""
        mine = self._tenants.setdefault(name.tenant, OrderedDict())
        before = len(mine)
        mine.pop(name.response, None)
        mine[name.response] = _Kept(worker, now + self._ttl_s)
        self._resized(name.tenant, before)
        gone = self._over(name.tenant, now) + self._over_in_turn(now)
        while self._count > self._most:
            tenant = next(iter(self._with[self._largest]))
            gone += self._forget_oldest(tenant, 1)
        return gone

    def worker_of(self, name: ResponseName, now: float) -> str:
        """Who keeps it; empty if that is not known."""
        mine = self._tenants.get(name.tenant)
        kept = mine.get(name.response) if mine else None
        return kept.worker if kept and kept.until_s > now else ""

    def all(self) -> dict[ResponseName, str]:
        """Every response with its worker."""
        return {
            ResponseName(tenant, response): kept.worker
            for tenant, mine in self._tenants.items()
            for response, kept in mine.items()
        }

    def _over_in_turn(self, now: float) -> list[ResponseName]:
        """One tenant after the other, or who comes no more would keep what is over."""
        tenant = next(iter(self._tenants))
        self._tenants.move_to_end(tenant)
        return self._over(tenant, now)

    def _over(self, tenant: bytes, now: float) -> list[ResponseName]:
        count = 0
        for kept in self._tenants[tenant].values():
            if kept.until_s > now or count == OVER_AT_ONCE:
                break
            count += 1
        return self._forget_oldest(tenant, count)

    def _forget_oldest(self, tenant: bytes, count: int) -> list[ResponseName]:
        mine = self._tenants[tenant]
        before, gone = len(mine), []
        for _ in range(count):
            oldest, _ = mine.popitem(last=False)
            gone.append(ResponseName(tenant, oldest))
        self._resized(tenant, before)
        return gone

    def _resized(self, tenant: bytes, before: int) -> None:
        count = len(self._tenants[tenant])
        self._count += count - before
        if before:
            del self._with[before][tenant]
            if not self._with[before]:
                del self._with[before]
        if count:
            self._with.setdefault(count, OrderedDict())[tenant] = None
        else:
            del self._tenants[tenant]
        self._largest = max(self._largest, count)
        while self._largest and self._largest not in self._with:
            self._largest -= 1
