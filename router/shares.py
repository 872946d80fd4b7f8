"""Who of the tenants that wait has had least: fair queueing by tokens, like deficit round robin.

Each tenant has a virtual time, which advances by what it was served over its weight; the one with
the least goes next. Whoever comes back after a pause starts at the present time of the others: idle
time is no credit. Pure bookkeeping.
"""


class Shares:
    """Owned by one queue. Remembers only tenants since the queue was last empty."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}
        self._now = 0.0

    def arrives(self, tenant: str) -> None:
        """A request of ``tenant`` begins to wait."""
        self._times[tenant] = max(self._now, self._times.get(tenant, 0.0))

    def goes(self, tenant: str, tokens: int, weight: float) -> None:
        """A request of ``tokens`` of ``tenant`` is served."""
        started = max(self._now, self._times.get(tenant, 0.0))
        self._now = started
        self._times[tenant] = started + tokens / weight

    def time_of(self, tenant: str) -> float:
        """The tenant's virtual time: the least goes first."""
        return self._times.get(tenant, self._now)

    def clear(self) -> None:
        """Nobody waits any more: all are equal again."""
        self._times.clear()
        self._now = 0.0
