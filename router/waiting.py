"""Requests that wait in the router for a worker, and which of them goes next. Pure.

A request that is sent to a busy worker is bound: it waits in that engine's queue, first come
first served, behind prompts of 100,000 tokens. Here it stays unbound until the worker that is best
for it is about to be free, and the next to go is the one with the highest response ratio,
(waited + own prefill) / own prefill (Brinch Hansen, "Short-term scheduling in multiprogramming
systems", 1971): short prefills pass long ones, and whoever waits long gets its turn without a
parameter to tune.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from prefixfleet.router.decision import Decision
from prefixfleet.router.shares import Shares

MAX_CONSIDERED = 64
"""Requests looked at for one that can go, the most urgent first: a bound on the work of a turn."""


@dataclass(slots=True, eq=False)
class Waiting:
    """One request that is not bound yet. Owned by the queue it waits in.

    ``prefill_s`` is the last estimate of its own prefill at the best worker, ``wish`` the name of
    that worker. Higher ``priority`` goes first.
    """

    arrived_s: float
    prompt_tokens: int
    prefill_s: float
    tenant: str = field(default="", kw_only=True)
    priority: int = field(default=0, kw_only=True)
    wish: str = field(default="", kw_only=True)


W = TypeVar("W", bound=Waiting)


def response_ratio(waiting: Waiting, now: float) -> float:
    """How much longer than its own work a request will have taken if it goes now; 1 or more."""
    own = max(waiting.prefill_s, 1e-3)
    return (max(0.0, now - waiting.arrived_s) + own) / own


def most_urgent(queue: Sequence[W], now: float, shares: Shares | None = None) -> list[W]:
    """The queue in the order in which it is served.

    By priority, then the tenant that has had least of what was ``shares``-d, then the response
    ratio; equals in order of arrival.
    """
    time_of = shares.time_of if shares else lambda tenant: 0.0
    return sorted(
        queue,
        key=lambda w: (-w.priority, time_of(w.tenant), -response_ratio(w, now), w.arrived_s),
    )


def next_to_go(
    queue: Sequence[W],
    now: float,
    decide: Callable[[W], Decision],
    free: Callable[[str], bool],
    promise: Callable[[str, float], None],
    shares: Shares | None = None,
    able: Callable[[W], bool] = lambda waiting: True,
) -> tuple[W, Decision] | None:
    """The most urgent request whose best worker is free, with its decision; None if there is none.

    A request whose best worker is busy waits on for it: elsewhere it would take longer. ``decide``
    is asked for the best over all workers, and refreshes the request's estimate. Who is not
    ``able`` to go, since no worker of its own is free, is not judged: hundreds of one model would
    keep those of another from being considered. Where nobody wants the free ones, see
    `_nobody_wants`.
    """
    waits: list[tuple[W, Decision | None]] = []
    judged = 0
    for waiting in most_urgent(queue, now, shares):
        if not able(waiting):
            waits.append((waiting, None))
            continue
        decision = _judge(waiting, decide)
        if free(decision.worker):
            return waiting, decision
        waits.append((waiting, decision))
        if (judged := judged + 1) >= MAX_CONSIDERED:
            break
    return _nobody_wants(waits, decide, free, promise) if judged and len(waits) > 1 else None


def next_by_wish(
    queue: Sequence[W],
    now: float,
    decide: Callable[[W], Decision],
    free: Callable[[str], bool],
    shares: Shares | None = None,
) -> tuple[W, Decision] | None:
    """As `next_to_go`, of those whose last wish is free: the others are not judged again.

    Between two rounds of `next_to_go`, which judges everybody: with many that wait that takes
    longer than a short prefill, and would be all that a router does.
    """
    wished = {wish for wish in {waiting.wish for waiting in queue} if free(wish)}
    able = [waiting for waiting in queue if waiting.wish in wished]
    for waiting in most_urgent(able, now, shares)[:MAX_CONSIDERED]:
        decision = _judge(waiting, decide)
        if free(decision.worker):
            return waiting, decision
    return None


def _judge(waiting: W, decide: Callable[[W], Decision]) -> Decision:
    decision = decide(waiting)
    waiting.prefill_s, waiting.wish = decision.prefill_s, decision.worker
    return decision


def _nobody_wants(
    waits: Sequence[tuple[W, Decision | None]],
    decide: Callable[[W], Decision],
    free: Callable[[str], bool],
    promise: Callable[[str, float], None],
) -> tuple[W, Decision] | None:
    """Who goes to a free worker that is nobody's best, rather than wait behind others.

    All would wait for the one worker that holds what they share, beside idle ones. So the seconds
    of the more urgent are ``promise``-d to the worker that they wait for before the next one is
    judged. What is computed anew elsewhere counts twice: the worker is kept from who comes next.
    """
    promised: defaultdict[str, float] = defaultdict(float)
    for waiting, wait in waits:
        if wait is None:
            promised[waiting.wish] += waiting.prefill_s
            promise(waiting.wish, waiting.prefill_s)
            continue
        # where nothing is promised to its own worker the others have not become better
        decision = decide(waiting) if promised[wait.worker] else wait
        anew_s = max(0.0, decision.prefill_s - wait.prefill_s)
        if free(decision.worker):
            if decision.total_s + anew_s < wait.total_s + promised[wait.worker]:
                waiting.prefill_s = decision.prefill_s
                return waiting, decision
            decision = wait
        promised[decision.worker] += decision.prefill_s
        promise(decision.worker, decision.prefill_s)
    return None


def expected_wait(queue: Sequence[Waiting], prefill_s: float, busy_s: Sequence[float]) -> float:
    """Seconds until a request that arrives now, of ``prefill_s``, would be sent.

    ``busy_s`` are the seconds that each worker is still busy, at least one. The shorter ones
    in the queue go first, spread over the workers; whoever is free now takes it at once.
    """
    before = sum(w.prefill_s for w in queue if w.prefill_s <= prefill_s)
    return max(min(busy_s), (before + sum(busy_s)) / len(busy_s) if before else min(busy_s))
