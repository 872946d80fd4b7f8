"""One request in the router's queue: what it takes to bind it, and to whom it may go."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prefixfleet.router.dispatch import Chains, Dispatched
from prefixfleet.router.prompt import Prompt
from prefixfleet.router.waiting import Waiting
from prefixfleet.router.worker import Worker


@dataclass(slots=True, eq=False)
class Turn(Waiting):
    """Owned by the queue; ``go`` is awaited by who asked. ``more`` gives the workers to which it
    could go now."""

    request: str
    prompt: Prompt
    chains: Chains
    workers: Sequence[Worker]
    weight: float
    more: Callable[[], Sequence[Worker]]
    known: set[str] = field(init=False)  # those that were there when it was judged first
    go: asyncio.Future[Dispatched] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def __post_init__(self) -> None:
        self.known = {worker.name for worker in self.more()}

    def take_newcomers(self) -> None:
        """May go to workers that were not there before."""
        new = [worker for worker in self.more() if worker.name not in self.known]
        self.known |= {worker.name for worker in new}
        names = {worker.name for worker in self.workers}
        self.workers = [*self.workers, *(worker for worker in new if worker.name not in names)]
