"""How fast each worker prefills, learned from first tokens. No clock, no I/O."""

from collections.abc import Callable, Mapping

from prefixfleet.router.charge import Charge
from prefixfleet.router.estimate import PrefillModel, Prefills, observe
from prefixfleet.router.guesses import Guesses
from prefixfleet.store.records import WorkerRecord

ROW_S = 0.05
ROW = 16
"""What a worker did in a row is one observation when it took so long, or was so many prefills."""


class Speeds:
    """One learned model a worker. Owned by the router's event loop.

    ``models`` are known from before; ``changed`` is told of whom a model is new.
    """

    def __init__(
        self, models: Mapping[str, PrefillModel] | None, changed: Callable[[str], None]
    ) -> None:
        self._models: dict[str, PrefillModel] = dict(models or {})
        self._guesses = Guesses(self._models)
        self._rows: dict[str, Prefills] = {}
        self._changed = changed

    def of(self, record: WorkerRecord) -> PrefillModel:
        """What is known of the worker's speed, ready or not."""
        return self._models.get(record.worker) or self._guesses.of(record)

    def learn(
        self, record: WorkerRecord, charge: Charge, tokens: int, cached: int, moving_s: float
    ) -> None:
        """Follow what a prefill took, of which ``moving_s`` by the estimate were no computing.

        Not if it came before all was moved: then little was moved, or fast, and what is left would
        be a prefill in no time. Nor if it was moved while others were computed. Short prefills in
        a row are learned together: engines batch them, and answer all at once.
        """
        if (seconds := charge.prefill_s) is None:
            return
        if moving_s:
            seconds -= moving_s
            if seconds <= 0 or not charge.alone:
                return
        row = self._rows.setdefault(record.worker, Prefills())
        row.add(tokens, cached, seconds)
        if charge.alone or row.seconds >= ROW_S or row.count >= ROW:
            del self._rows[record.worker]
            self._models[record.worker] = observe(self.of(record), row)
            for name in (record.worker, *self._guesses.learned(record)):
                self._changed(name)

    def forget(self, name: str) -> None:
        """Drop what was learned of a worker that is gone."""
        self._models.pop(name, None)
        self._guesses.forget(name)
        self._rows.pop(name, None)
