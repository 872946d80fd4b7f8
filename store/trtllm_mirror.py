"""What a TensorRT-LLM engine holds, by the events of its polls: which of them may be believed.

The engine tells each event once, to whoever polls first, and keeps none. So a number that is
missing is lost for good: another poller took it, or the engine's buffer was full. Then everything
that was known is dropped, since a block may have been removed unheard; what stays in the engine is
told again only when it is stored again. A number that goes back is another life of the engine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from prefixfleet.store.engine_events import EventBatch
from prefixfleet.store.engine_mirror import Change, EngineMirror
from prefixfleet.store.event_slices import TURN, slices, turns
from prefixfleet.store.following import Losses
from prefixfleet.store.trtllm_events import PolledEvent, Said

QUIET_EVENTS = 1_000
"""So many events in a row without a loss, and a loss is the past."""


@dataclass(slots=True)
class PolledMirror:
    """Judges polls for ``mirror``, which it owns. One engine; one thread.

    ``whole`` says whether the engine's first event was heard: if not, what it stored before is
    unknown. ``window`` is the widest attention window: only such layers need a whole prefix, and
    what narrower ones hold is not followed.
    """

    mirror: EngineMirror
    losses: Losses = field(default_factory=Losses)
    batches: int = 0
    whole: bool = False
    window: int = 0
    _expected: dict[int, int] = field(default_factory=dict)
    _since_loss: int = QUIET_EVENTS

    @property
    def is_losing(self) -> bool:
        """Whether events were lost lately."""
        return self._since_loss < QUIET_EVENTS

    def take(self, events: Sequence[PolledEvent]) -> Iterator[Change]:
        """What one poll told, in changes of at most `TURN` blocks; exhaust it.

        However often the events say that all is lost, what was known is dropped once: nothing
        that an earlier event said is applied before the last one was judged.
        """
        is_lost, said = False, list[Said]()
        for number, event in enumerate(events, 1):
            if not self._is_next(event):
                is_lost, self.whole = True, False
                said.clear()
            elif event.window > self.window:
                is_lost = True
                said.clear()
            self._note(event)
            if event.window == self.window:
                said.extend(event.said)
            if number % TURN == 0:
                yield Change()
        self.batches += bool(events)
        if is_lost:
            yield from self._dropped()
        for piece in slices(said):
            batch = EventBatch(self.mirror.expected or 0, piece)
            yield self.mirror.follow(batch)[1]
            if self.mirror.is_full:
                self.losses.overflows += 1
                self._since_loss, self.whole = 0, False
                yield from self._dropped()
        yield Change()

    def lost(self) -> Iterator[Change]:
        """An answer could not be read: what it told is lost. As `take`."""
        self.losses.malformed += 1
        self._since_loss = 0
        yield from self.ended()

    def ended(self) -> Iterator[Change]:
        """Nobody listens at the engine's port: this life of it is over. As `take`."""
        self._expected.clear()
        self.window = 0
        self.whole = False
        yield from self._dropped()

    def _is_next(self, event: PolledEvent) -> bool:
        expected = self._expected.get(event.rank)
        if expected is None or event.number == expected:
            return True
        if event.number < expected:
            self.losses.restarts += 1
            self._expected.clear()
            self.window = 0
        else:
            self.losses.gaps += 1
            self._since_loss = 0
        return False

    def _note(self, event: PolledEvent) -> None:
        if not self._expected and event.number == 0:
            self.whole = True
        self._expected[event.rank] = event.number + 1
        self._since_loss += 1
        self.window = max(self.window, event.window)

    def _dropped(self) -> Iterator[Change]:
        yield from turns(self.mirror.forget())
