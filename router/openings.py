"""Who may get a request for a model now; and if nobody may, whether that will pass."""

from collections.abc import Callable, Collection, Mapping, Sequence

from prefixfleet.router.adapter_notices import some
from prefixfleet.router.errors import AllDrained, NoWorker, UnknownModel
from prefixfleet.router.examiner import LAST_RETRY_S
from prefixfleet.router.seat import Seat, all_drained, models_of, ready_for
from prefixfleet.router.worker import Worker


class Openings:
    """Owned by the `Roster`, whose ``seats`` it reads and which says when one has changed.

    ``is_whole`` says whether no worker is missing in the list that may be announcing itself still.
    """

    def __init__(self, seats: Mapping[str, Seat], is_whole: Callable[[], bool]) -> None:
        self._seats = seats
        self._is_whole = is_whole
        self._ready: dict[str, Sequence[Worker]] = {}  # by model; empty after each change
        self._told = ""  # the models there are, for who asks for another one; likewise
        self._served: dict[str, Collection[str]] = {}  # models of workers that were ready

    def ready(self, model: str) -> Sequence[Worker]:
        """Workers that may get a request for ``model``; at least one.

        Raises:
            UnknownModel: other models are served, not this one.
            AllDrained: an operator drained all of them.
            NoWorker: none is ready at the moment, or the list may not be whole yet.
        """
        if ready := self._ready.get(model):
            return ready
        if ready := ready_for(self._seats.values(), model):
            self._ready[model] = ready
            return ready
        if self._is_whole() and self._seats and not self._expects(model):
            told = self._told = self._told or some(models_of(self._seats.values()))
            raise UnknownModel(
                f"the model {model!r:.200} does not exist; this fleet serves {told}",
                param="model",
            )
        if self._is_whole() and all_drained(self._seats, self._served, model):
            raise AllDrained(
                f"every worker of the model {model!r:.200} is drained; `prefixfleet resume` gives "
                "them back",
                retry_after_s=LAST_RETRY_S,
            )
        raise NoWorker(
            "no worker is ready; `prefixfleet status` says why", retry_after_s=LAST_RETRY_S
        )

    def changed(self) -> None:
        """What was worked out for requests does not hold any more."""
        self._ready.clear()
        self._told = ""

    def opened(self, seat: Seat) -> None:
        """Its worker is ready: what it serves is waited for if it goes."""
        self._served[seat.record.worker] = models_of([seat])

    def forget(self, name: str) -> None:
        """A worker is gone for good: its model is not waited for on its account any more."""
        self._served.pop(name, None)

    def _expects(self, model: str) -> bool:
        """Whether anybody serves ``model``, or did and may be back."""
        known = any(seat.has(model) for seat in self._seats.values())
        return known or any(model in models for models in self._served.values())
