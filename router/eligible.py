"""Which workers may get a request now, and the best of them.

A worker falls out while it is drained, while it computes nothing of what it has (`silence`), and,
for one request, when its tokens would follow each other too slowly.
"""

from collections.abc import Callable, Sequence

from prefixfleet.router.book import Book
from prefixfleet.router.decision import Decision
from prefixfleet.router.dispatch import Chains, Dispatcher
from prefixfleet.router.errors import TooBusy
from prefixfleet.router.prompt import Prompt
from prefixfleet.router.token_times import TokenTimes
from prefixfleet.router.worker import Worker


class Eligible:
    """Owned by the router's event loop; `watch_silence` sets ``shunned``."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        book: Book,
        clock: Callable[[], float],
        token_times: TokenTimes,
        is_open: Callable[[str], bool] = lambda worker: True,
        decided: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        """``is_open`` says whether a worker still gets requests: one may be drained meanwhile.
        ``decided`` is told how long each decision took."""
        self._dispatcher = dispatcher
        self._book = book
        self._clock = clock
        self._token_times = token_times
        self._is_open = is_open
        self._decided = decided
        self.shunned: frozenset[str] = frozenset()
        """Workers that get nothing while others can."""

    def best(self, prompt: Prompt, chains: Chains, workers: Sequence[Worker]) -> Decision:
        """Of those that get requests: one may have been drained since they were read."""
        began_s = self._clock()
        decision = self._dispatcher.decide(prompt, chains, workers)
        name = decision.worker
        if len(workers) > 1 and (name in self.shunned or not self._is_open(name)):
            decision = self._dispatcher.decide(prompt, chains, self._among(workers))
        self._decided(self._clock() - began_s)
        return decision

    def best_in_pace(
        self, prompt: Prompt, chains: Chains, workers: Sequence[Worker], slo_s: float
    ) -> tuple[Decision, Sequence[Worker]]:
        """The best among the workers whose tokens will come at most ``slo_s`` apart, and those
        workers; 0 is no limit.

        Judged at the moment at which this prefill would end (Mooncake, arXiv 2407.00079, 7): the
        decodes of now will partly have ended by then, and those of the prefills before it begun.

        Raises:
            TooBusy: no worker is so fast.
        """
        slowest_s = 0.0
        workers = self._among(workers) if slo_s else workers
        while workers:
            decision = self.best(prompt, chains, workers)
            pace_s = self._pace_s(decision, prompt.outputs) if slo_s else 0.0
            if pace_s <= slo_s:
                return decision, workers
            slowest_s = max(slowest_s, pace_s)
            workers = [worker for worker in workers if worker.name != decision.worker]
        raise TooBusy(
            f"a token would come every {slowest_s:.3f} s, the limit is {slo_s:.3f} s",
            retry_after_s=max(1.0, self._book.decode_s),
        )

    def _among(self, workers: Sequence[Worker]) -> Sequence[Worker]:
        """Those that still get requests, and compute them; all if none of them does."""
        left = [worker for worker in workers if self._is_open(worker.name)] or workers
        if self.shunned:
            left = [worker for worker in left if worker.name not in self.shunned] or left
        return left

    def _pace_s(self, decision: Decision, outputs: int) -> float:
        """Seconds between tokens on the chosen worker when this request begins to decode."""
        at_s = self._clock() + decision.total_s
        sequences = self._book.sequences_at(decision.worker, at_s) + outputs
        return self._token_times.seconds(decision.worker, sequences)
