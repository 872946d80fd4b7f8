"""One known worker and how it stands; and of all of them, who serves a model. Pure."""

import asyncio
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from prefixfleet.router.adapters import Adapters
from prefixfleet.router.worker import Worker
from prefixfleet.store.records import WorkerRecord


@dataclass(frozen=True, slots=True)
class Standing:
    """How one worker stands with this router, for `status`."""

    record: WorkerRecord
    state: str
    reason: str
    adapters: Adapters = field(default_factory=dict)


@dataclass(slots=True)
class Seat:
    """Owned by the `Roster`. ``serves`` has a worker for each model once it was examined."""

    record: WorkerRecord
    adapters: Adapters = field(default_factory=dict)
    state: str = "checking"
    reason: str = ""
    serves: dict[str, Worker] = field(default_factory=dict)
    examination: asyncio.Task[None] | None = field(default=None, repr=False)

    def has(self, model: str) -> bool:
        """Whether it serves ``model``, or will."""
        return model == self.record.model or model in self.adapters

    @property
    def worker(self) -> Worker | None:
        """As it serves its own model; None until it was examined."""
        return self.serves.get(self.record.model)

    def settle(self, worker: Worker | None) -> None:
        """It was examined, and is ``worker``; or is none of ours."""
        self.serves = {worker.record.model: worker} if worker else {}
        self.adapt(self.adapters)

    def adapt(self, adapters: Adapters) -> None:
        """It has these adapters now. Those that stay the same are the same workers: orders that
        were made of them hold."""
        self.adapters, worker = adapters, self.worker
        if worker is None:
            return
        before = self.serves
        self.serves = {worker.record.model: worker}
        for name, lora in adapters.items():
            known = before.get(name)
            same = known if known and known.lora == lora else worker.with_adapter(name, lora)
            self.serves.setdefault(name, same)

    def standing(self) -> Standing:
        """For `status`."""
        return Standing(self.record, self.state, self.reason, self.adapters)

    def stop(self) -> None:
        """Examine it no further."""
        if self.examination:
            self.examination.cancel()
            self.examination = None


def models_of(seats: Iterable[Seat]) -> set[str]:
    """Everything that they serve, or will."""
    return {name for seat in seats for name in (seat.record.model, *seat.adapters)}


def bases_of(seats: Iterable[Seat], model: str) -> set[str]:
    """The models that ``model`` is, or is an adapter of. A model's own name is never an adapter's,
    and an adapter that several models have is that of the first of them: prompts are read
    otherwise for each. Whoever never passed an examination takes a name from nobody."""
    bases = {seat.record.model for seat in seats if seat.serves and seat.has(model)}
    if model in bases:
        return {model}
    return {min(bases)} if bases else bases


def ready_for(seats: Collection[Seat], model: str) -> tuple[Worker, ...]:
    """Workers that may get a request for ``model`` now."""
    bases = bases_of(seats, model)
    return tuple(
        seat.serves[model]
        for seat in seats
        if seat.state == "ready" and seat.record.model in bases and model in seat.serves
    )


def all_drained(
    seats: Mapping[str, Seat], served: Mapping[str, Collection[str]], model: str
) -> bool:
    """Whether nobody is expected: none is examined or ends, none that ``served`` it is missing."""
    missing = {name for name, models in served.items() if model in models} - seats.keys()
    states = {seat.record.state for seat in seats.values() if seat.has(model)}
    return states == {"draining"} and not missing


def claimed_twice(seats: Iterable[Seat]) -> list[str]:
    """Adapters whose name is that of a model, or of an adapter of another model, in order."""
    models: dict[str, set[str]] = {}
    for seat in seats:
        for name in models_of([seat]):
            models.setdefault(name, set()).add(seat.record.model)
    return sorted(name for name, of in models.items() if len(of) > 1)
