"""CUDA's order of streams and events without a GPU: work runs later, streams in any order."""

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prefixfleet.kernels.pipeline import Event, Stream


class SimulatedEvent:
    """Done once the stream has come to it."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


class SimulatedStream:
    """A queue of work; an event at its head holds up what follows."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], bool]] = deque()

    def enqueue(self, work: Callable[[], object]) -> None:
        self.queue.append(lambda: (work(), True)[1])

    def wait_event(self, event: Event) -> None:
        self.queue.append(event.query)

    def record_event(self) -> SimulatedEvent:
        event = SimulatedEvent()
        self.enqueue(lambda: setattr(event, "done", True))
        return event

    def step(self) -> bool:
        """Run the head; False if it waits or there is none."""
        if not self.queue or not self.queue[0]():
            return False
        self.queue.popleft()
        return True


class SimulatedDevice:
    """Streams that advance one item at a time, in an order drawn from ``seed``."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._compute = SimulatedStream()
        self._streams = [self._compute]
        self.current = self._compute

    def compute(self) -> SimulatedStream:
        return self._compute

    def new_stream(self) -> SimulatedStream:
        self._streams.append(SimulatedStream())
        return self._streams[-1]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        assert isinstance(stream, SimulatedStream)
        before, self.current = self.current, stream
        yield
        self.current = before

    def advance(self, steps: int) -> None:
        """Run up to ``steps`` items, any stream's turn."""
        for _ in range(steps):
            self._random.choice(self._streams).step()

    def drain(self) -> None:
        """Run everything. Raises `RuntimeError` if streams wait for each other."""
        while any(stream.queue for stream in self._streams):
            turns = self._random.sample(self._streams, len(self._streams))
            if not any(stream.step() for stream in turns):
                raise RuntimeError("streams wait for each other")
