"""Which of the ready workers get a request: not those that fail again and again, and few at first
for one that has just come. Pure decisions; the clock and the dice are arguments.

An answer of 5xx may be the worker's fault or the request's, and one client can send many requests.
So a worker is never ejected for such answers alone: before it would be, the request is asked of
another worker, and only if that one serves it was it the first one's fault. Ejecting is bounded
too: of a model's workers at most half are out at once.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prefixfleet.router.worker import Worker

FAILURES = 5  # in a row
FIRST_EJECTION_S = 10.0
LAST_EJECTION_S = 300.0
MAX_EJECTED = 0.5
FIRST_SHARE = 0.1  # of the requests that a new worker may be chosen for, at once


@dataclass(slots=True)
class _Conduct:
    failures: int = 0
    ejections: int = 0
    out_until_s: float = 0.0
    joined_s: float | None = None


class Traffic:
    """Owned by the router's event loop. ``dice()`` is a random number of 0 to 1."""

    def __init__(
        self, slow_start_s: float, clock: Callable[[], float], dice: Callable[[], float]
    ) -> None:
        self._slow_start_s = slow_start_s
        self._clock = clock
        self._dice = dice
        self._conducts: dict[str, _Conduct] = {}

    def joined(self, name: str) -> None:
        """A worker came, or came back, while others were at work."""
        self._of(name).joined_s = self._clock()

    def forget(self, name: str) -> None:
        """A worker is gone for good."""
        self._conducts.pop(name, None)

    def failed(self, name: str) -> None:
        """A request to worker ``name`` failed by its fault."""
        conduct = self._of(name)
        conduct.failures += 1
        if conduct.failures >= FAILURES and not self.is_ejected(name):
            out_s = min(LAST_EJECTION_S, FIRST_EJECTION_S * 2**conduct.ejections)
            conduct.out_until_s = self._clock() + out_s
            conduct.ejections += 1
            conduct.failures = 0

    def succeeded(self, name: str) -> None:
        """A request to worker ``name`` was answered."""
        if conduct := self._conducts.get(name):
            conduct.failures = 0
            if not self.is_ejected(name):
                conduct.ejections = 0
                if conduct.joined_s is None:
                    del self._conducts[name]  # nothing is left to say of it

    def doubts(self, name: str) -> bool:
        """Whether one more failure ejects ``name``: then another worker shall say whose it is."""
        conduct = self._conducts.get(name)
        return conduct is not None and conduct.failures >= FAILURES - 1

    def answered(self, name: str, status: int, unwilling: Iterable[str]) -> None:
        """Worker ``name`` answered a request to which ``unwilling`` had answered 5xx before it."""
        if status < 500:
            self.succeeded(name)
            for other in unwilling:
                self.failed(other)
            return
        conduct = self._of(name)
        conduct.failures = min(conduct.failures + 1, FAILURES - 1)
        for other in unwilling:  # two workers say so: it follows the request
            self._of(other).failures = conduct.failures = 0

    def is_ejected(self, name: str) -> bool:
        """Whether ``name`` failed too often a short while ago."""
        conduct = self._conducts.get(name)
        return conduct is not None and self._clock() < conduct.out_until_s

    def allowed(self, workers: Sequence[Worker]) -> Sequence[Worker]:
        """Those of ``workers`` that this request may go to; at least one."""
        if not self._conducts:
            return workers
        out = {w.name for w in workers if self.is_ejected(w.name)}
        if len(out) > MAX_EJECTED * len(workers):
            first_back = sorted(out, key=lambda name: self._conducts[name].out_until_s)
            out = set(first_back[-int(MAX_EJECTED * len(workers)) :] if len(workers) > 1 else ())
        left = [w for w in workers if w.name not in out]
        return [w for w in left if self._starts(w.name)] or left

    def _starts(self, name: str) -> bool:
        """Whether a worker that came a while ago takes part in this choice."""
        conduct = self._conducts.get(name)
        if conduct is None or conduct.joined_s is None:
            return True
        age_s = self._clock() - conduct.joined_s
        if age_s >= self._slow_start_s:
            conduct.joined_s = None
            return True
        return self._dice() < max(FIRST_SHARE, age_s / self._slow_start_s)

    def _of(self, name: str) -> _Conduct:
        return self._conducts.setdefault(name, _Conduct())
