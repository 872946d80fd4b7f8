"""How much each API key may ask for: requests and prompt tokens a second, requests in flight."""

from collections.abc import Callable
from dataclasses import dataclass

from prefixfleet.router.errors import TooBusy
from prefixfleet.router.keys import Key

BURST_S = 2.0
"""A bucket holds what flows in during this time: clients come in bursts."""


@dataclass(slots=True)
class Bucket:
    """A token bucket. May go below zero: what was admitted is charged as it turns out to be."""

    rate_per_s: float
    level: float
    at_s: float

    def wait_s(self, now: float) -> float:
        """Seconds until at least one may be taken; 0 if now."""
        self._fill(now)
        return max(0.0, 1.0 - self.level) / self.rate_per_s

    def take(self, amount: float, now: float) -> None:
        """Take ``amount``, whether or not it is there."""
        self._fill(now)
        self.level -= amount

    def _fill(self, now: float) -> None:
        most = max(1.0, self.rate_per_s * BURST_S)
        self.level = min(most, self.level + (now - self.at_s) * self.rate_per_s)
        self.at_s = now


@dataclass(slots=True)
class _Account:
    in_flight: int = 0
    requests: Bucket | None = None
    tokens: Bucket | None = None


class Limits:
    """Owned by the router's event loop; ``clock`` is monotonic seconds. An account a key."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def admit(self, key: Key) -> None:
        """Count one request of ``key``; whoever does so calls `leave` however the request ends.

        Raises:
            TooBusy: the key has its limit in flight, or asks too often.
        """
        now = self._clock()
        account = self._account(key, now)
        self._refuse_over_limit(key, account, now)
        account.in_flight += 1
        if account.requests:
            account.requests.take(1.0, now)

    def leave(self, key: Key) -> None:
        """A request that was admitted has ended."""
        account = self._accounts[key.name]
        account.in_flight -= 1
        if not account.in_flight and not account.requests and not account.tokens:
            del self._accounts[key.name]

    def charge_tokens(self, key: Key, tokens: int) -> None:
        """Charge a prompt that was admitted, once its length is known."""
        account = self._accounts.get(key.name)
        if account and account.tokens:
            account.tokens.take(tokens, self._clock())

    def _account(self, key: Key, now: float) -> _Account:
        account = self._accounts.get(key.name)
        if account is None:
            account = self._accounts[key.name] = _Account()
        account.requests = _bucket(account.requests, key.requests_per_s, now)
        account.tokens = _bucket(account.tokens, key.tokens_per_s, now)
        return account

    @staticmethod
    def _refuse_over_limit(key: Key, account: _Account, now: float) -> None:
        if key.max_in_flight is not None and account.in_flight >= key.max_in_flight:
            raise TooBusy(
                f"this API key may have {key.max_in_flight} requests in flight",
                retry_after_s=1.0,
            )
        for bucket, what in ((account.requests, "requests"), (account.tokens, "tokens")):
            if bucket and (wait_s := bucket.wait_s(now)) > 0:
                raise TooBusy(
                    f"this API key may ask for {bucket.rate_per_s:g} {what} a second",
                    retry_after_s=wait_s,
                )


def _bucket(known: Bucket | None, rate_per_s: float | None, now: float) -> Bucket | None:
    """The bucket for a rate, as full as it was; a new one is full."""
    if rate_per_s is None:
        return None
    if known is not None and known.rate_per_s == rate_per_s:
        return known
    return Bucket(rate_per_s, max(1.0, rate_per_s * BURST_S), now)
