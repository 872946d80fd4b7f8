"""Which worker: the one on which the best that can be done takes the least seconds. Pure.

What that is on one worker says `pull_or_compute`. Of equals one that has most of the prefix in its
own cache is taken, else chance decides.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

from msgspec import Struct

from prefixfleet.router.decision import Candidate, Decision, Draw, usable_blocks
from prefixfleet.router.estimate import PrefillModel
from prefixfleet.router.pull_or_compute import best_for

FEW = 4
"""Candidates that are sooner looked at than sorted into groups."""

TIE = 0.01
"""Costs within one per cent are equal: no estimate is better than that."""


class Rank(Struct, frozen=True, kw_only=True):
    """Workers of which the first is the best, and that have equally much in their own caches.

    ``judge(number)`` is the best that can be done on one of them.
    """

    bound_s: float  # none takes less
    judge: Callable[[int], Decision]
    count: int = 1
    alike: bool = True  # all take as long as the first; else each at least as long as the last

    def tied(self, limit_s: float) -> int:
        """How many take ``limit_s`` at most, the first being one of them."""
        if self.alike:
            return self.count
        return bisect_right(range(self.count), limit_s, key=lambda n: self.judge(n).total_s)


def choose(prompt_tokens: int, candidates: Sequence[Candidate], draw: Draw) -> Decision:
    """The decision with the least estimated time to first token. ``candidates`` is not empty.

    The same as `best_for` all of them, but most need not be looked at: those that differ in
    nothing but their name cost the same, and those that would be too slow even if every block
    that anybody holds were there already cannot win.
    """
    if len(candidates) <= FEW:
        return _one_of([best_for(prompt_tokens, candidate) for candidate in candidates], draw)
    return soonest(_ranks(prompt_tokens, candidates, _kinds(candidates)), draw)


def _one_of(decisions: Sequence[Decision], draw: Draw) -> Decision:
    seconds = [decision.total_s for decision in decisions]
    limit_s = _tied_up_to(min(seconds))
    tied = [d for d, total_s in zip(decisions, seconds, strict=True) if total_s <= limit_s]
    if len(tied) > 1:
        most = max([decision.own_blocks for decision in tied])
        tied = [decision for decision in tied if decision.own_blocks == most]
    return tied[draw(len(tied)) if len(tied) > 1 else 0]


def soonest(ranks: Iterable[Rank], draw: Draw) -> Decision:
    """The best of all workers in ``ranks``, which come in the order of their bounds. Of those
    that are tied and have most in their own caches each is as likely as the other."""
    least, judged = float("inf"), []
    for rank in ranks:
        if rank.bound_s > _tied_up_to(least):
            break
        decision = rank.judge(0)
        least = min(least, decision.total_s)
        judged.append((decision, rank))
    limit_s = _tied_up_to(least)
    tied = [(decision, rank) for decision, rank in judged if decision.total_s <= limit_s]
    most = max(decision.own_blocks for decision, _ in tied)
    best = [(rank, rank.tied(limit_s)) for d, rank in tied if d.own_blocks == most]
    total = sum(count for _, count in best)
    number = draw(total) if total > 1 else 0
    for rank, count in best:
        if number < count:
            return rank.judge(number)
        number -= count
    raise AssertionError("draw(n) is below n")


def _tied_up_to(least_s: float) -> float:
    return least_s * (1 + TIE) + 1e-6


def _kinds(candidates: Sequence[Candidate]) -> list[list[int]]:
    """Positions of the candidates in groups that differ only in names.

    What `best_for` looks at must be in ``kind``, and what saves seconds in the bound below.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    holders: dict[int, frozenset[str]] = {}
    for number, c in enumerate(candidates):
        sources = id(c.sources)
        if sources not in holders:
            holders[sources] = frozenset(source.node for source in c.sources)
        own = c.node if c.node in holders[sources] else ""  # it pulls from the others only
        size = (c.block_tokens, c.block_bytes)
        seconds = (c.busy_s, c.block_s, c.prefill.coefficients)
        kind = (c.hit_blocks, c.own_blocks, seconds, sources, own, size)
        groups.setdefault(kind, []).append(number)
    return list(groups.values())


def _ranks(
    prompt_tokens: int, candidates: Sequence[Candidate], kinds: list[list[int]]
) -> list[Rank]:
    def rank_of(numbers: list[int]) -> Rank:
        first = candidates[numbers[0]]
        reach = max((s.blocks for s in first.sources), default=0)
        reach = max(reach, first.hit_blocks, first.own_blocks)
        return Rank(
            bound_s=least_seconds(
                prompt_tokens, first.busy_s, first.prefill, reach, first.block_tokens
            ),
            judge=lambda number: best_for(prompt_tokens, candidates[numbers[number]]),
            count=len(numbers),
        )

    return sorted(map(rank_of, kinds), key=attrgetter("bound_s"))


def least_seconds(
    prompt_tokens: int, busy_s: float, prefill: PrefillModel, reach: int, block_tokens: int
) -> float:
    """What a worker cannot take less than: ``reach`` blocks are there, and nothing was pulled."""
    cached = min(reach, usable_blocks(prompt_tokens, block_tokens)) * block_tokens
    # sums of floats are not exact
    return (busy_s + prefill.seconds(prompt_tokens, cached)) * (1 - 1e-9) - 1e-9
