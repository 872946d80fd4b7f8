"""Workers in a standing order: who is alike in one group, in each group the soonest free first.

A decision must not look at every worker of a big fleet. Between two changes of its load a worker's
place does not move: free ones are equal, those that only generate have a step to end, and those
that compute prompts are free at a moment that stays. So the order is kept from decision to
decision, and only what the book says has changed is put in its place again.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefixfleet.router.book import Book
from prefixfleet.router.charge import NEVER
from prefixfleet.router.estimate import PrefillModel
from prefixfleet.router.worker import Worker

Links = dict[str, Any] | None
"""What a worker's node has measured of its links, as its record says; None for nothing."""


@dataclass(slots=True, eq=False)
class Group:
    """Workers that differ in name and load only. Owned by its `Lineup`."""

    prefill: PrefillModel
    links: Links
    worker: Worker  # any of them
    free: list[str] = field(default_factory=list)  # in no order; all equal
    generating: list[tuple[float, str]] = field(default_factory=list)  # by seconds of a step
    computing: list[tuple[float, str]] = field(default_factory=list)  # by when they are free

    def __len__(self) -> int:
        return len(self.free) + len(self.generating) + len(self.computing)


@dataclass(slots=True)
class _Place:
    """Where a worker stands: in which group, and with what."""

    group: Group
    index: int = -1  # in `free`
    step_s: float = 0.0
    free_at_s: float = NEVER


class Lineup:
    """Owned by one `Dispatcher`. ``kind_of`` says how fast a worker is and how it is linked."""

    def __init__(
        self,
        workers: Sequence[Worker],
        book: Book,
        step_s: Callable[[str, int], float],
        kind_of: Callable[[Worker], tuple[PrefillModel, Links]],
    ) -> None:
        self.workers = {worker.name: worker for worker in workers}
        self.single = [worker for worker in workers if worker.static]
        """Those that are in no group: who may pull from whom is a matter of each of them."""
        self.on_node: dict[str, list[Worker]] = {}
        for worker in workers:
            self.on_node.setdefault(worker.record.node, []).append(worker)
        self._book, self._step_s, self._kind_of = book, step_s, kind_of
        self._groups: dict[tuple[object, ...], Group] = {}
        self._places: dict[str, _Place] = {}
        self._read_to = book.journal.end
        self._stand(worker for worker in workers if not worker.static)

    def __len__(self) -> int:
        return len(self.workers)

    @property
    def groups(self) -> Iterable[Group]:
        """Every group; none is empty."""
        return self._groups.values()

    def refresh(self) -> None:
        """Put those whose load has changed in their places. Call it before a decision."""
        changed = self._book.journal.since(self._read_to)
        self._read_to = self._book.journal.end
        for name in self._places if changed is None else changed:
            if place := self._places.get(name):
                self._step_out(place, name)
                self._step_in(place, name)

    def regroup(self, name: str) -> None:
        """Worker ``name`` is found to be faster or slower than was known."""
        if place := self._places.pop(name, None):
            self._step_out(place, name)
            if not place.group:
                del self._groups[_key(place.group)]
            self._stand([self.workers[name]])

    def prefill(self, worker: Worker) -> PrefillModel:
        """How fast ``worker`` is, by what was known when it was put in its group."""
        place = self._places.get(worker.name)
        return place.group.prefill if place else self._kind_of(worker)[0]

    def step_s(self, name: str) -> float:
        """Seconds until the step ends in which worker ``name`` generates, as it stands."""
        if place := self._places.get(name):
            return place.step_s
        return self._step_of(name)

    def busy_s(self, name: str) -> float:
        """Seconds until worker ``name`` can begin."""
        place = self._places.get(name)
        if place is not None and place.free_at_s == NEVER:
            return place.step_s
        return self._book.load(name).busy_s + self.step_s(name)

    def positions(self, group: Group, names: Iterable[str]) -> tuple[list[int], list[int]]:
        """Where those of ``names`` that are in ``group`` stand: in `free` and in `generating`."""
        free, generating = [], []
        for name in names:
            place = self._places.get(name)
            if place is None or place.group is not group:
                continue
            if place.index >= 0:
                free.append(place.index)
            elif place.free_at_s == NEVER:
                generating.append(bisect_left(group.generating, (place.step_s, name)))
        return sorted(free), sorted(generating)

    def _stand(self, workers: Iterable[Worker]) -> None:
        for worker in workers:
            prefill, links = self._kind_of(worker)
            new = Group(prefill, links, worker)
            place = _Place(self._groups.setdefault(_key(new), new))
            self._places[worker.name] = place
            self._step_in(place, worker.name)

    def _step_in(self, place: _Place, name: str) -> None:
        place.free_at_s = self._book.free_at_s(name)
        place.step_s = self._step_of(name)
        if place.free_at_s != NEVER:
            insort(place.group.computing, (place.free_at_s, name))
        elif place.step_s:
            insort(place.group.generating, (place.step_s, name))
        else:
            place.index = len(place.group.free)
            place.group.free.append(name)

    def _step_out(self, place: _Place, name: str) -> None:
        group = place.group
        if place.index >= 0:
            last = group.free.pop()
            if last != name:
                group.free[place.index] = last
                self._places[last].index = place.index
            place.index = -1
        elif place.free_at_s != NEVER:
            del group.computing[bisect_left(group.computing, (place.free_at_s, name))]
        else:
            del group.generating[bisect_left(group.generating, (place.step_s, name))]

    def _step_of(self, name: str) -> float:
        load = self._book.load(name)
        return self._step_s(name, load.decoding) if load.decoding else 0.0


def _key(group: Group) -> tuple[object, ...]:
    """What makes two groups one. Links that a group holds have an id that is nobody else's."""
    worker = group.worker
    kind = (worker.kind, worker.block_tokens, worker.record.block_bytes)
    return (group.prefill.coefficients, id(group.links), *kind)
