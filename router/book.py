"""Load on each worker, in tokens in flight: what this router has put there, and what it heard of
others.

A request is charged before it is sent, not when it answers, and is released on every way out. What
is charged is what the worker must compute: the prompt's uncached tokens until the first byte comes
back, the sequences it generates from then on.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from prefixfleet.router.charge import NEVER, NO_LOAD, Charge, Load, Page
from prefixfleet.router.journal import Journal

SILENT_S = 5.0
SILENT = 4.0  # times the estimates; see `Book.silent`
DECODE_GAIN = 0.05  # the mean of the last 20 requests or so


class Book:
    """Owned by the router's event loop; not thread-safe. ``clock`` is monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pages: dict[str, Page] = {}
        self._others: Mapping[str, Load] = {}
        self._heard_s = 0.0
        self._promised: dict[str, float] = {}
        self.journal = Journal()
        self.decode_s = 0.0  # how long a request decodes, on average; 0 before the first ended

    def load(self, worker: str) -> Load:
        """Present load of ``worker``, by all routers."""
        page, others = self._pages.get(worker), self._others.get(worker)
        if page is None and others is None:
            return NO_LOAD
        now = self._clock()
        own = page.load(now) if page else NO_LOAD
        if promised_s := self._promised.get(worker):
            busy = self._prefills_end_s(worker) > NEVER
            own += Load(busy_s=promised_s if busy else 0.0)
        if others:
            left_s = max(0.0, others.busy_s - (now - self._heard_s))
            return own + Load(others.queued_tokens, others.queued_requests, others.decoding, left_s)
        return own

    def free_at_s(self, worker: str) -> float:
        """When the prefills on ``worker`` are done by their estimates, or later: the same until
        its load changes. `NEVER` if there are none."""
        free_at_s = self._prefills_end_s(worker)
        if (promised_s := self._promised.get(worker)) and free_at_s > NEVER:
            return max(free_at_s, self._clock()) + promised_s
        return free_at_s

    def _prefills_end_s(self, worker: str) -> float:
        page, others = self._pages.get(worker), self._others.get(worker)
        own_s = page.since_s + page.expected_s if page and page.waiting else NEVER
        theirs_s = self._heard_s + others.busy_s if others and others.busy_s else NEVER
        return max(own_s, theirs_s)

    @contextmanager
    def promising(self) -> Iterator[Callable[[str, float], None]]:
        """A way to say, until the block ends, that a busy worker is wanted for so many seconds
        more by requests that wait for it: whoever is judged next finds it so much busier. For
        one moment of the clock; no two at once."""

        def promise(worker: str, seconds: float) -> None:
            self._promised[worker] = self._promised.get(worker, 0.0) + seconds
            self.journal.note(worker)

        try:
            yield promise
        finally:
            for worker in self._promised:
                self.journal.note(worker)
            self._promised = {}

    def sequences_at(self, worker: str, at_s: float) -> int:
        """Sequences that ``worker`` will generate at ``at_s``, if prefills in flight are over then.

        Those that will have been generated for longer than `decode_s` count as ended; of other
        routers' all count, since their age is not known here.
        """
        page = self._pages.get(worker)
        others = self._others.get(worker, Load())
        count = others.decoding + others.queued_requests
        if page is None:
            return count
        count += sum(charge.sequences for charge in page.waiting)
        return count + sum(
            charge.sequences
            for charge in page.decodes
            if charge.first_byte_s is not None and at_s - charge.first_byte_s < self.decode_s
        )

    def streams_waiting(self, worker: str) -> int:
        """This router's streams that wait for their first token there."""
        page = self._pages.get(worker)
        return len(page.waiting) - page.whole_answers if page else 0

    def silent(self) -> dict[str, float]:
        """Workers that are far behind with what this router sent, with the seconds in which they
        have computed nothing of it: far more than all of it should take."""
        now, found = self._clock(), {}
        for worker, page in self._pages.items():
            since_s = page.silent_s()
            if since_s > NEVER and now - since_s > SILENT_S + SILENT * (
                page.expected_s + page.others.busy_s
            ):
                found[worker] = now - since_s
        return found

    def own(self) -> dict[str, Load]:
        """What this router has put on each worker that has any."""
        now = self._clock()
        return {worker: page.load(now) for worker, page in self._pages.items()}

    def hear(self, others: Mapping[str, Load]) -> None:
        """What all other routers have in flight on each worker at this moment."""
        for worker in self._others.keys() | others.keys():
            self.journal.note(worker)
        self._others, self._heard_s = others, self._clock()
        for worker, page in self._pages.items():
            page.others = others.get(worker, NO_LOAD)

    @contextmanager
    def charged(
        self, worker: str, *, tokens: int, sequences: int, expected_s: float, streamed: bool = True
    ) -> Iterator[Charge]:
        """`charge` and `release` around a block."""
        charge = self.charge(
            worker, tokens=tokens, sequences=sequences, expected_s=expected_s, streamed=streamed
        )
        try:
            yield charge
        finally:
            self.release(charge)

    def charge(
        self, worker: str, *, tokens: int, sequences: int, expected_s: float, streamed: bool = True
    ) -> Charge:
        """Charge ``worker``; whoever does so calls `release` however the request ends.

        ``expected_s`` is the estimate of the prefill alone, without the queue before it;
        ``streamed`` says whether the first byte of the answer comes with its first token.
        """
        page = self._pages.get(worker)
        if page is None:
            page = self._pages[worker] = Page(self.journal.note)
            page.others = self._others.get(worker, NO_LOAD)
        now = self._clock()
        charge = Charge(worker, tokens, sequences, now, expected_s, streamed, page=page)
        if not page.waiting:
            page.since_s = now
        page.begin_prefill(charge)
        return charge

    def release(self, charge: Charge) -> None:
        """The request has ended, well or not."""
        page, now = charge.page, self._clock()
        if charge.first_byte_s is None:
            page.end_prefill(charge, now)
        else:
            page.end_decode(charge)
            if charge.streamed and not charge.refused:  # else it has no decode of its own
                self._learn_decode(now - charge.first_byte_s)
        if not page.waiting and not page.decoding and self._pages.get(charge.worker) is page:
            del self._pages[charge.worker]

    def _learn_decode(self, seconds: float) -> None:
        self.decode_s += (seconds - self.decode_s) * DECODE_GAIN if self.decode_s else seconds

    def workers(self) -> list[str]:
        """Workers with requests in flight."""
        return list(self._pages)
