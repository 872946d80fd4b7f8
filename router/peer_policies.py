"""Other systems' ways to choose a worker, behind the interface of `policy.choose`.

For comparison in the simulator and for operators who want one of them. Each is its published rule
with its published constants; where the rule has no pull, none is planned. All are pure but
`RoundRobin`, which counts. They know the queues of workers only, so a request of theirs must not
wait in the router: there no rule would see it.
"""

from collections.abc import Callable, Sequence

from prefixfleet.router.decision import Candidate, Decision, Draw, Policy, Source, usable_blocks
from prefixfleet.router.estimate import pull_seconds
from prefixfleet.router.pull_or_compute import LOAD_S, may_load_s

BALANCING_THRESHOLD = 1.3
"""Mooncake tuned theirs by hand and did not publish it; between 1 and 5 the mean moved by less
than 1 % in replay."""
MAX_REMEMBERED = 10_000
"""Workers whose last turn is known: names of those that are gone for good must not gather."""
STICKY_SHARE = 0.8
STICKY_PENALTY_S = 18.0
"""llm-d's defaults of August 2026 (prefix-cache-affinity-filter)."""


def random_worker(prompt_tokens: int, candidates: Sequence[Candidate], draw: Draw) -> Decision:
    """Any worker, whatever it holds."""
    return _plain(prompt_tokens, candidates[draw(len(candidates))])


class RoundRobin:
    """One after the other: whoever was named longest ago, of equals the first by name. So workers
    of each model take turns among themselves. Owned by one router."""

    def __init__(self) -> None:
        self._named: dict[str, int] = {}  # at which turn; the latest is the last
        self._turn = 0

    def __call__(self, prompt_tokens: int, candidates: Sequence[Candidate], draw: Draw) -> Decision:
        """See `Policy`."""
        chosen = min(candidates, key=lambda c: (self._named.get(c.worker, 0), c.worker))
        self._turn += 1
        self._named.pop(chosen.worker, None)
        self._named[chosen.worker] = self._turn
        if len(self._named) > MAX_REMEMBERED:
            del self._named[next(iter(self._named))]
        return _plain(prompt_tokens, chosen)


def least_tokens(prompt_tokens: int, candidates: Sequence[Candidate], draw: Draw) -> Decision:
    """The worker with the fewest uncached tokens in its queue."""
    return _plain(prompt_tokens, _least(candidates, lambda c: c.queued_tokens, draw))


def local_aware(prompt_tokens: int, candidates: Sequence[Candidate], draw: Draw) -> Decision:
    """Least queue plus prefill of what the worker itself lacks; nothing is pulled."""
    decisions = {c.worker: _plain(prompt_tokens, c) for c in candidates}
    return decisions[_least(candidates, lambda c: decisions[c.worker].total_s, draw).worker]


def algorithm_1(prompt_tokens: int, candidates: Sequence[Candidate], draw: Draw) -> Decision:
    """Mooncake's Algorithm 1 (FAST'25, section 4.1): pull whenever somebody's match is longer by
    a fixed ratio, and take the least sum of transfer, queue and prefill."""
    decisions = {c.worker: _algorithm_1(prompt_tokens, c) for c in candidates}

    def cost(candidate: Candidate) -> float:
        decision = decisions[candidate.worker]
        return decision.pull_s + decision.queue_s + decision.prefill_s

    return decisions[_least(candidates, cost, draw).worker]


def dynamo_cost(prompt_tokens: int, candidates: Sequence[Candidate], draw: Draw) -> Decision:
    """NVIDIA Dynamo's KV router: blocks to prefill, the queue included, plus blocks to hold.

    Its term for blocks of running decodes is left out: a router does not know how long they are."""

    def cost(candidate: Candidate) -> float:
        prompt_blocks = -(-prompt_tokens // candidate.block_tokens)
        active = candidate.queued_tokens / candidate.block_tokens
        prefill = max(active + prompt_blocks - _found(candidate), 0.0)
        return prefill + prompt_blocks

    return _plain(prompt_tokens, _least(candidates, cost, draw))


def sticky_until_saturated(
    prompt_tokens: int, candidates: Sequence[Candidate], draw: Draw
) -> Decision:
    """llm-d: among workers with most of the prompt, unless they are slower by a fixed penalty."""
    usable = max(1, usable_blocks(prompt_tokens, candidates[0].block_tokens))
    sticky = [c for c in candidates if _found(c) / usable >= STICKY_SHARE]
    others = [c for c in candidates if c not in sticky]
    if sticky and others:
        best = {id(group): min(c.busy_s for c in group) for group in (sticky, others)}
        if best[id(sticky)] - best[id(others)] > STICKY_PENALTY_S:
            sticky = []
    return _plain(prompt_tokens, _least(sticky or candidates, lambda c: c.queued_tokens, draw))


PEERS: dict[str, Callable[[], Policy]] = {
    "random": lambda: random_worker,
    "round-robin": RoundRobin,
    "least-tokens": lambda: least_tokens,
    "local-aware": lambda: local_aware,
    "algorithm-1": lambda: algorithm_1,
    "dynamo": lambda: dynamo_cost,
    "sticky": lambda: sticky_until_saturated,
}
"""By the name that settings and the simulator use; each call makes a fresh policy."""


def _algorithm_1(prompt_tokens: int, candidate: Candidate) -> Decision:
    usable = usable_blocks(prompt_tokens, candidate.block_tokens)
    hit = min(_found(candidate), usable)
    best = max(candidate.sources, key=lambda s: s.blocks, default=None)
    length = min(best.blocks, usable) if best else 0
    if best is None or length <= hit or (hit and length / hit <= BALANCING_THRESHOLD):
        return _plain(prompt_tokens, candidate)
    return _priced(prompt_tokens, candidate, hit, best, length - hit)


def _plain(prompt_tokens: int, candidate: Candidate) -> Decision:
    hit = min(_found(candidate), usable_blocks(prompt_tokens, candidate.block_tokens))
    return _priced(prompt_tokens, candidate, hit, None, 0)


def _found(candidate: Candidate) -> int:
    """Leading blocks that the worker has, itself or on its node."""
    return max(candidate.hit_blocks, candidate.own_blocks)


def _priced(
    prompt_tokens: int, candidate: Candidate, hit: int, source: Source | None, pulled: int
) -> Decision:
    cached = (hit + pulled) * candidate.block_tokens
    own = min(hit, candidate.own_blocks)
    load_s = (hit - own) * candidate.block_s
    return Decision(
        worker=candidate.worker,
        hit_blocks=hit,
        pull_blocks=pulled,
        source=source,
        queue_s=candidate.busy_s,
        pull_s=pull_seconds(pulled * candidate.block_bytes, source.link) if source else 0.0,
        prefill_s=candidate.prefill.seconds(prompt_tokens, cached),
        own_blocks=own,
        load_s=load_s,
        load_within_s=may_load_s(prompt_tokens, candidate, hit, own) if load_s else LOAD_S,
    )


def _least(
    candidates: Sequence[Candidate], cost: Callable[[Candidate], float], draw: Draw
) -> Candidate:
    """The cheapest candidate; ties at random."""
    costs = [cost(candidate) for candidate in candidates]
    least = min(costs)
    tied = [c for c, value in zip(candidates, costs, strict=True) if value <= least]
    return tied[draw(len(tied))]
