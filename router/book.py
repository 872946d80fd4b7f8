"""Load that this router has put on each worker, in tokens in flight.

A request is charged before it is sent, not when it answers, and is released on every way out:
`Book.charged` is a context manager. What is charged is what the worker must compute: the prompt's
uncached tokens until the first byte comes back, the sequences it generates from then on.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Load:
    """Requests in flight on one worker: prefills that wait for their first byte, and decodes."""

    queued_tokens: int = 0
    queued_requests: int = 0
    decoding: int = 0  # sequences being generated
    busy_s: float = 0.0  # until the prefills in flight are done, by their estimates


@dataclass(slots=True, eq=False)
class Charge:
    """One request's part in a worker's load. Owned by the task that serves the request."""

    tokens: int
    sequences: int
    started_s: float
    alone: bool  # no other prefill was in flight on the worker while this one was
    expected_s: float  # of its prefill, as estimated when it was sent
    _page: "_Page"
    first_byte_s: float | None = field(default=None, init=False)

    def first_byte(self, now: float) -> None:
        """The prefill is over; from here the request only decodes. Repeated calls do nothing."""
        if self.first_byte_s is None:
            self.first_byte_s = now
            self._page.waiting.discard(self)
            self._page.answering.add(self)
            self._page.since_s = now


@dataclass(slots=True)
class _Page:
    waiting: set[Charge] = field(default_factory=set)
    answering: set[Charge] = field(default_factory=set)
    since_s: float = 0.0  # when the prefill that runs now began: the last one's first byte

    def load(self, now: float) -> Load:
        expected = sum(charge.expected_s for charge in self.waiting)
        return Load(
            sum(charge.tokens for charge in self.waiting),
            len(self.waiting),
            sum(charge.sequences for charge in self.answering),
            max(0.0, expected - (now - self.since_s)) if self.waiting else 0.0,
        )


class Book:
    """Owned by the router's event loop; not thread-safe. ``clock`` is monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pages: dict[str, _Page] = {}

    def load(self, worker: str) -> Load:
        """Present load of ``worker``."""
        page = self._pages.get(worker)
        return page.load(self._clock()) if page else Load()

    @contextmanager
    def charged(
        self, worker: str, *, tokens: int, sequences: int, expected_s: float
    ) -> Iterator[Charge]:
        """Charge ``worker`` while the block runs, however it ends.

        ``expected_s`` is the estimate of the prefill alone, without the queue before it.
        """
        page = self._pages.setdefault(worker, _Page())
        for other in page.waiting:
            other.alone = False
        now = self._clock()
        charge = Charge(
            tokens, sequences, now, alone=not page.waiting, expected_s=expected_s, _page=page
        )
        if not page.waiting:
            page.since_s = now
        page.waiting.add(charge)
        try:
            yield charge
        finally:
            page.waiting.discard(charge)
            page.answering.discard(charge)
            if not page.waiting and not page.answering and self._pages.get(worker) is page:
                del self._pages[worker]

    def workers(self) -> list[str]:
        """Workers with requests in flight."""
        return list(self._pages)
