"""What a request costs a worker: its charge, and the page of all that are in flight there."""

from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import Struct

NEVER = float("-inf")


class Load(Struct, frozen=True):
    """Requests in flight on one worker: prefills that wait for their first byte, and decodes."""

    queued_tokens: int = 0
    queued_requests: int = 0
    decoding: int = 0  # sequences being generated
    busy_s: float = 0.0  # until the prefills in flight are done, by their estimates

    def __add__(self, other: "Load") -> "Load":
        """Both together: an engine computes prefills one after the other."""
        return Load(
            self.queued_tokens + other.queued_tokens,
            self.queued_requests + other.queued_requests,
            self.decoding + other.decoding,
            self.busy_s + other.busy_s,
        )


NO_LOAD = Load()


class Charge(Struct, eq=False):
    """One request's part in a worker's load. Owned by the task that serves the request,
    then by `Background` where it goes on."""

    worker: str
    tokens: int
    sequences: int
    started_s: float
    expected_s: float  # of its prefill, as estimated when it was sent
    streamed: bool  # its first byte is its first token, not its whole answer
    page: "Page"
    ahead_s: float = 0.0  # expected of those of this router that were there before it
    first_byte_s: float | None = None
    prefill_s: float | None = None  # what it took, see `Page.spent_on`
    alone: bool = True  # no other prefill of this router was in flight there while this one was
    refused: bool = False  # nothing was computed
    goes_on: str = ""  # URL where its engine says whether it computes it still, behind its answer

    def first_byte(self, now: float, *, refused: bool = False) -> None:
        """The prefill is over, or the worker ``refused`` it; from here the request only decodes.
        Repeated calls, or one after `decode_unheard`, say only that the worker computes."""
        if not refused:
            self.page.heard_s = now
        if self.first_byte_s is None:
            self.first_byte_s, self.refused = now, refused
            self.prefill_s = None if refused else self.page.spent_on(self, now)
            self.page.end_prefill(self, now)
            self.page.begin_decode(self)
            if self.streamed and not refused:
                self.page.pass_whole_answers(self, now)

    def decode_unheard(self, now: float) -> None:
        """By the estimates its prefill, whose end nobody hears, is over: only its decode is load
        from here on. Says nothing of how long either takes."""
        if self.first_byte_s is None:
            self.first_byte_s = now
            self.page.end_prefill_unheard(self, now)
            self.page.begin_decode(self)

    def go_on_unheard(self) -> None:
        """It is computed on where nobody hears its first byte: as an answer that comes whole."""
        if self.streamed and self.first_byte_s is None:
            self.streamed = False
            self.page.whole_answers += 1


@dataclass(slots=True)
class Page:
    """Running sums, so that a look at the load costs the same whatever is in flight."""

    note: Callable[[str], None]  # told of every change
    waiting: set[Charge] = field(default_factory=set)
    queued_tokens: int = 0
    expected_s: float = 0.0
    decoding: int = 0
    decodes: set[Charge] = field(default_factory=set)
    since_s: float = 0.0  # when the prefill that runs now began: the last one's first byte
    whole_answers: int = 0  # that wait, whose first byte does not tell when their prefill ended
    heard_s: float = NEVER  # when something was computed last
    unclear_s: float = NEVER  # until then nobody knows which prefill ran when
    others: Load = NO_LOAD  # what other routers have there

    def begin_prefill(self, charge: Charge) -> None:
        if self.waiting:
            charge.alone = False
            if len(self.waiting) == 1:  # of several, none is alone already
                next(iter(self.waiting)).alone = False
        self.waiting.add(charge)
        self.queued_tokens += charge.tokens
        charge.ahead_s = self.expected_s
        self.expected_s += charge.expected_s
        self.whole_answers += not charge.streamed
        self.note(charge.worker)

    def spent_on(self, charge: Charge, now: float) -> float | None:
        """Seconds of the worker for a prefill that ends now: since it came or the last one ended,
        whichever is later; at least so many where that is not known, None if that says nothing.

        Of the time in which other routers' prefills wait there too, this router's have a part by
        their tokens.
        """
        part = self.queued_tokens / max(1, self.queued_tokens + self.others.queued_tokens)
        if not self.whole_answers and charge.started_s >= self.unclear_s:
            return part * (now - max(charge.started_s, self.since_s))
        # first come, first served: all that was there took until now, or some of it went unserved.
        # Else an estimate that is far too low would fill a worker, and be unclear for ever
        waited_s, expected_s = part * (now - charge.started_s), charge.ahead_s + charge.expected_s
        return charge.expected_s * waited_s / expected_s if waited_s > expected_s > 0.0 else None

    def end_prefill(self, charge: Charge, now: float) -> None:
        """However it ended: with its first byte, refused, or given up by its client."""
        self.waiting.discard(charge)
        if charge.refused:  # it took no time of those that are computed
            began_s = min((other.started_s for other in self.waiting), default=now)
            self.since_s = max(self.since_s, began_s)
        else:
            self.since_s = now  # the next one begins; else the worker would look free too early
            if charge.first_byte_s is None or not charge.streamed:
                self.unclear_s = now
        self._leave(charge)

    def end_prefill_unheard(self, charge: Charge, now: float) -> None:
        """It ended some time before ``now``, of which it took what was expected: else that would
        count as time of those behind it, and the worker look free too early."""
        self.waiting.discard(charge)
        began_s = min((other.started_s for other in self.waiting), default=now)
        self.since_s = min(now, max(self.since_s + charge.expected_s, began_s))
        self.unclear_s = now
        self._leave(charge)

    def pass_whole_answers(self, stream: Charge, now: float) -> None:
        """Those that came before ``stream`` are prefilled when it is: first come, first served.
        Who waits behind it began now, so what he takes is clear."""
        if self.whole_answers:
            for charge in [c for c in self.waiting if c.started_s < stream.started_s]:
                if not charge.streamed:
                    charge.first_byte_s = now
                    self.waiting.discard(charge)
                    self._leave(charge)
                    self.begin_decode(charge)

    def _leave(self, charge: Charge) -> None:
        self.whole_answers -= not charge.streamed
        self.queued_tokens -= charge.tokens
        # Sums of floats drift: an empty page is exactly zero
        self.expected_s = self.expected_s - charge.expected_s if self.waiting else 0.0
        self.note(charge.worker)

    def silent_s(self) -> float:
        """Since when nothing was computed that somebody waits for; `NEVER` if nobody does, whose
        first byte would tell."""
        if len(self.waiting) == self.whole_answers:
            return NEVER
        return max(self.heard_s, min(c.started_s for c in self.waiting if c.streamed))

    def begin_decode(self, charge: Charge) -> None:
        self.decoding += charge.sequences
        self.decodes.add(charge)
        self.note(charge.worker)

    def end_decode(self, charge: Charge) -> None:
        self.decoding -= charge.sequences
        self.decodes.discard(charge)
        self.note(charge.worker)

    def load(self, now: float) -> Load:
        busy_s = self.expected_s - (now - self.since_s) if self.waiting else 0.0
        return Load(self.queued_tokens, len(self.waiting), self.decoding, max(0.0, busy_s))
