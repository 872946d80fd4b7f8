"""The router's queue at work: a request waits here for its turn, then it is bound to a worker.

`waiting` decides who goes next, `eligible` where; this file knows when to ask: a request came, a
prefill ended, or the time has come at which a worker should be free by the estimates.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prefixfleet.router.book import Book
from prefixfleet.router.charge import Load
from prefixfleet.router.decision import Decision
from prefixfleet.router.dispatch import Chains, Dispatched, Dispatcher
from prefixfleet.router.eligible import Eligible
from prefixfleet.router.errors import TooBusy
from prefixfleet.router.keys import ANYBODY, Key
from prefixfleet.router.prompt import Prompt
from prefixfleet.router.shares import Shares
from prefixfleet.router.turn import Turn
from prefixfleet.router.waiting import expected_wait, next_by_wish, next_to_go
from prefixfleet.router.worker import Worker

LOOKAHEAD_S = 0.1
"""A worker counts as free so long before its prefills should be done: engines batch short prompts,
and the next one must be there when the last one ends."""
MOST_AHEAD = 16
"""Streams that wait at one worker for their first token, whatever the estimates say: where those
are wrong, or it hangs, it would seem to be free again and again and draw one after the other."""
TICK_S = 0.02
"""Time between two looks at a queue that nothing else woke."""
REST = 4.0
"""After everybody in the queue was judged, so many times the seconds that it took pass before they
are judged again: with hundreds that wait it takes longer than a short prefill."""
MAX_REST_S = 0.5  # however long it took: the process may have been stopped meanwhile


@dataclass(frozen=True, slots=True)
class Slos:
    """Limits in seconds on the time to first token and the time between tokens; 0: none."""

    ttft_s: float = 0.0
    tbt_s: float = 0.0


class Turns:
    """Owned by the router's event loop. ``slos`` limit times where a key says nothing else."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        eligible: Eligible,
        book: Book,
        slos: Slos,
        clock: Callable[[], float],
        at_once: bool = False,
    ) -> None:
        """``at_once``: nobody waits here, for a policy that judges by what workers have in their
        own queues."""
        self._dispatcher = dispatcher
        self._eligible = eligible
        self._book = book
        self._slos = slos
        self._clock = clock
        self._at_once = at_once
        self._queue: list[Turn] = []
        self._shares = Shares()
        self._timer: asyncio.TimerHandle | None = None
        self._rests_until_s = 0.0

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    def load(self) -> Load:
        """What waits: its tokens, requests and seconds of prefill."""
        queue = self._queue
        return Load(
            queued_tokens=sum(turn.prompt.tokens for turn in queue),
            queued_requests=len(queue),
            busy_s=sum(turn.prefill_s for turn in queue),
        )

    async def wait(
        self,
        request: str,
        prompt: Prompt,
        chains: Chains,
        workers: Sequence[Worker],
        arrived_s: float,
        key: Key = ANYBODY,
        deadline_s: float = 0.0,
        more: Callable[[], Sequence[Worker]] = tuple,
    ) -> Dispatched:
        """Where the request goes, when its turn has come. ``workers`` is not empty; ``more`` gives
        those that it could go to now, of which the ones that came meanwhile count.

        ``key`` gives its tenant and priority; ``deadline_s`` is the client's own limit on the time
        to first token, 0 for none.

        Raises:
            TooBusy: it would come, or has come, later than the limit on the first token; or
                tokens would follow each other too slowly on every worker.
        """
        tbt_slo_s = key.tbt_slo_s or self._slos.tbt_s
        decision, workers = self._eligible.best_in_pace(prompt, chains, workers, tbt_slo_s)
        slo_s = key.ttft_slo_s or self._slos.ttft_s
        limit_s = min(slo_s, deadline_s) or slo_s or deadline_s  # 0: no such limit
        self._refuse_if_late(decision, workers, arrived_s, limit_s)
        if self._at_once or (not self._queue and self._is_free(decision.worker)):
            # Whoever called charges the worker before anybody else can look at it: no await between
            return self._dispatcher.bind(request, decision, chains, workers)
        turn = Turn(
            arrived_s, prompt.tokens, decision.prefill_s, request, prompt, chains, workers,
            key.weight, more, tenant=key.tenant, priority=key.priority, wish=decision.worker,
        )  # fmt: skip
        return await self._in_its_turn(turn, limit_s)

    async def _in_its_turn(self, turn: Turn, limit_s: float) -> Dispatched:
        """Wait in the queue, within the limit. Raises `TooBusy`."""
        self._shares.arrives(turn.tenant)
        self._queue.append(turn)
        try:
            self.look()
            async with asyncio.timeout(self._left_s(turn.arrived_s, limit_s)):
                return await turn.go
        except TimeoutError:
            raise _too_late(self._clock() - turn.arrived_s, limit_s) from None
        finally:
            if turn in self._queue:
                self._queue.remove(turn)
            if not self._queue:
                self._shares.clear()

    def _left_s(self, arrived_s: float, limit_s: float) -> float | None:
        """Of the limit, for a request that may have waited before; None without one."""
        return max(0.0, arrived_s + limit_s - self._clock()) if limit_s else None

    def reconsider(self) -> None:
        """A worker has come, or come back: who waits may go there too."""
        for turn in self._queue:
            turn.take_newcomers()
        self.look()

    def look(self) -> None:
        """Let go who can go. Call it when a prefill has ended."""
        while self._queue:
            if (found := self._next()) is None:
                break
            turn, decision = found
            self._queue.remove(turn)
            if not turn.go.done():
                bound = self._dispatcher.bind(turn.request, decision, turn.chains, turn.workers)
                turn.go.set_result(bound)
                self._shares.goes(turn.tenant, turn.prompt_tokens, turn.weight)
                return self._look_soon()  # it is charged first, or the next one sees it free
        if self._queue:
            self._look_later(TICK_S)
        return None

    def _next(self) -> tuple[Turn, Decision] | None:
        """Who goes, and where; everybody is judged only now and then."""
        now, queue = self._clock(), self._queue
        if now < self._rests_until_s:
            return next_by_wish(queue, now, self._decide, self._is_free, self._shares)
        if not (able := self._able()):
            return None
        decide, is_free, shares = self._decide, self._is_free, self._shares
        with self._book.promising() as promise:
            found = next_to_go(queue, now, decide, is_free, promise, shares, able.__contains__)
        done = self._clock()
        self._rests_until_s = done + min(MAX_REST_S, REST * (done - now))
        return found or next_by_wish(queue, now, decide, is_free, shares)

    def _decide(self, turn: Turn) -> Decision:
        return self._eligible.best(turn.prompt, turn.chains, turn.workers)

    def _able(self) -> set[Turn]:
        """Those that could go somewhere: under load that is nobody at most looks, and a decision
        takes longer."""
        names = {worker.name for turn in self._queue for worker in turn.workers}
        free = set(filter(self._is_free, names))
        if len(free) == len(names):
            return set(self._queue)
        return {t for t in self._queue if any(w.name in free for w in t.workers)} if free else set()

    def _is_free(self, worker: str) -> bool:
        load = self._book.load(worker)
        if load.queued_requests == 0:
            return True
        return load.busy_s <= LOOKAHEAD_S and self._book.streams_waiting(worker) < MOST_AHEAD

    def _look_soon(self) -> None:
        if self._queue:
            self._look_later(0.0)

    def _look_later(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay_s, self.look)

    def _refuse_if_late(
        self, decision: Decision, workers: Sequence[Worker], arrived_s: float, limit_s: float
    ) -> None:
        if not limit_s:
            return
        busy = [self._book.load(worker.name).busy_s for worker in workers]
        wait_s = max(
            expected_wait(self._queue, decision.prefill_s, busy),
            decision.total_s - decision.prefill_s,
        )
        total_s = self._clock() - arrived_s + wait_s + decision.prefill_s
        if total_s > limit_s:
            raise _too_late(total_s, limit_s)


def _too_late(total_s: float, limit_s: float) -> TooBusy:
    return TooBusy(
        f"the first token would come after {total_s:.3f} s, the limit is {limit_s:.3f} s",
        retry_after_s=max(1.0, total_s - limit_s),
    )
