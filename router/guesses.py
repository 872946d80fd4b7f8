"""How fast a worker is taken to be that nobody has seen compute: as those of its kind that were
learned. Pure: no clock, no I/O.

Its own figure is one prompt's tokens a second. It says nothing of a step's overhead, which learned
workers have, so that by it alone a newcomer would seem to win wherever little is to be computed;
and it was measured while the machine may have been starting others. So a guess is the law of a
learned worker, that in the middle of the few whose own figures lie nearest to the newcomer's:
hardware that is as fast first, and no single odd one decides. A learned law is shrunk towards its
worker's figure by least squares (`estimate`), hence so is the guess. Where all figures are far
from the newcomer's, only the form of the law is taken, and it takes as long as its figure says.

Of one kind are workers that differ in nothing that decides what a token costs, as far as they say:
all of their `Namespace` but the weights.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from prefixfleet.router.estimate import KILO, PrefillModel, first_guess
from prefixfleet.store.records import WorkerRecord

NEAREST = 5
"""So many learned workers are compared."""
ALIKE = 4.0
"""Figures that differ by less may be of the same hardware, measured while it did other things."""
AT_ONCE = 16
"""Guesses that one observation may change: the others follow with the next ones."""


@dataclass(slots=True)
class _Kind:
    learned: list[tuple[float, str]] = field(default_factory=list)  # by their own figures
    unlearned: dict[str, None] = field(default_factory=dict)  # the oldest guess first


@dataclass(slots=True)
class _Member:
    """What a worker was when it was asked for last."""

    kind: str
    figure: float
    namespace: dict[str, Any]
    guess: PrefillModel | None = None  # None of one that is learned

    def is_still(self, record: WorkerRecord) -> bool:
        if record.prefill_tokens_per_s != self.figure:
            return False
        return record.namespace is self.namespace or record.namespace == self.namespace


class Guesses:
    """Owned by `Speeds`, whose ``models`` these are of workers that were learned."""

    def __init__(self, models: Mapping[str, PrefillModel]) -> None:
        self._models = models
        self._kinds: dict[str, _Kind] = {}
        self._members: dict[str, _Member] = {}

    def of(self, record: WorkerRecord) -> PrefillModel:
        """What a worker that was not learned is taken for; the same until `learned` names it."""
        if not record.prefill_tokens_per_s:
            return first_guess(0.0)  # it will have measured something before it gets requests
        member = self._members.get(record.worker)
        if member and member.guess and member.is_still(record):
            return member.guess
        member = self._enter(record)
        self._kinds[member.kind].unlearned[record.worker] = None
        member.guess = self._guess(member)
        return member.guess

    def learned(self, record: WorkerRecord) -> list[str]:
        """More is known of this worker. Whose guesses are others now: `AT_ONCE` at most."""
        member = self._members.get(record.worker)
        if member is None or member.guess or not member.is_still(record):
            member = self._enter(record)
            insort(self._kinds[member.kind].learned, (member.figure, record.worker))
        unlearned, changed = self._kinds[member.kind].unlearned, []
        for name in list(islice(unlearned, AT_ONCE)):
            unlearned[name] = unlearned.pop(name)
            other = self._members[name]
            before, other.guess = other.guess, self._guess(other)
            if other.guess != before:
                changed.append(name)
        return changed

    def forget(self, name: str) -> None:
        """Drop what is known of a worker that is gone."""
        if member := self._members.pop(name, None):
            kind = self._kinds[member.kind]
            if member.guess:
                del kind.unlearned[name]
            else:
                del kind.learned[bisect_left(kind.learned, (member.figure, name))]
            if not kind.learned and not kind.unlearned:
                del self._kinds[member.kind]

    def _enter(self, record: WorkerRecord) -> _Member:
        """The worker as it is now, whatever it was."""
        self.forget(record.worker)
        member = _Member(_kind_of(record), record.prefill_tokens_per_s, record.namespace)
        self._kinds.setdefault(member.kind, _Kind())
        self._members[record.worker] = member
        return member

    def _guess(self, member: _Member) -> PrefillModel:
        own, peers = first_guess(member.figure), self._nearest(member)
        if not peers:
            return own
        alike = [name for ratio, name in peers if ratio < ALIKE]
        laws = [self._models[name] for name in alike or [name for _, name in peers]]
        laws.sort(key=_of_a_thousand)
        law = laws[(len(laws) - 1) // 2]
        return PrefillModel(law.coefficients if alike else _as_long(law, own))

    def _nearest(self, member: _Member) -> list[tuple[float, str]]:
        """Learned workers of its kind by how many times its figure is theirs, or theirs its."""
        learned = self._kinds[member.kind].learned
        at = bisect_left(learned, (member.figure, ""))
        around = learned[max(0, at - NEAREST) : at + NEAREST]
        return sorted((_ratio(member.figure, figure), name) for figure, name in around)[:NEAREST]


def _kind_of(record: WorkerRecord) -> str:
    named = {name: value for name, value in record.namespace.items() if name != "weights"}
    return repr(sorted(named.items(), key=lambda item: item[0]))


def _ratio(one: float, other: float) -> float:
    return max(one, other) / max(min(one, other), 1.0)


def _of_a_thousand(law: PrefillModel) -> float:
    return law.seconds(int(KILO), 0)


def _as_long(law: PrefillModel, own: PrefillModel) -> tuple[float, float, float]:
    factor = _of_a_thousand(own) / _of_a_thousand(law)
    c0, c1, c2 = law.coefficients
    return (c0 * factor, c1 * factor, c2 * factor)
