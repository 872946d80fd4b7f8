"""A device that does nothing before it must, for the order of copies on any machine.

What nobody waits for stays undone, so an order that is not asked for shows as wrong bytes.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from prefixfleet.cluster.connector_staging import Moment


@dataclass(frozen=True)
class LazyMoment:
    """After so many pieces of work of a stream."""

    stream: "LazyStream"
    done: int

    def synchronize(self) -> None:
        self.stream.waits.append(self.done)
        self.stream.run_to(self.done)


class LazyStream:
    """``engine`` is the stream on which the engine computes."""

    def __init__(self, engine: "LazyStream | None" = None) -> None:
        self.waits: list[int] = []  # of the host: pieces of work that had to be done
        self._engine = engine or self
        self._work: deque[Callable[[], object]] = deque()
        self._done = 0

    @property
    def undone(self) -> int:
        return len(self._work)

    def enqueue(self, work: Callable[[], object]) -> None:
        self._work.append(work)

    def wait_event(self, moment: Moment) -> None:
        assert isinstance(moment, LazyMoment)
        self._work.append(lambda: moment.stream.run_to(moment.done))

    def mark(self) -> LazyMoment:
        return LazyMoment(self, self._done + len(self._work))

    def mark_engine(self) -> LazyMoment:
        return self._engine.mark()

    def run_to(self, done: int) -> None:
        while self._done < done:
            self._done += 1
            self._work.popleft()()
