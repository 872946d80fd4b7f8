"""Which worker, and what it should pull from whom: one cost in seconds. Pure.

For every worker: the later of (its queue is done) and (its node's blocks are loaded, then the pull
is done), since both start at once and overlap the queue, then the prefill of what is still missing,
with the best source and the best number of blocks, none included: min(pull, recompute) needs no
threshold and never lost in replay against a fixed ratio. Least seconds win; of equals one that has
most of the prefix in its own cache, else chance decides.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from operator import attrgetter

from msgspec import Struct

from prefixfleet.router.estimate import LinkSpeed, PrefillModel, pull_seconds

FEW = 4
"""Candidates that are sooner looked at than sorted into groups."""

LOAD_S = 0.25
"""A load may take so long whatever it saves; the daemon answers in a millisecond otherwise."""

Draw = Callable[[int], int]
"""``draw(n)`` is a random number of 0 to n - 1; injected, so that tests can fix it."""

TIE = 0.01
"""Costs within one per cent are equal: no estimate is better than that."""


class Source(Struct, frozen=True, kw_only=True):
    """A node that holds ``blocks`` leading blocks of the prompt, and the link from there."""

    node: str
    epoch: int
    blocks: int
    link: LinkSpeed
    wait_s: float = 0.0  # until the source is done with the pulls that were planned before
    block_s: float = 0.0  # seconds that a block held there takes, by what it has learned

    def seconds(self, blocks: int, block_bytes: int) -> float:
        """Time until so many of its blocks, at least one, are where they are wanted."""
        moving_s = pull_seconds(blocks * block_bytes, self.link)
        return self.wait_s + blocks * self.block_s + moving_s


class Candidate(Struct, frozen=True, kw_only=True):
    """A worker that could take the request, and what is known about it at this moment."""

    worker: str
    node: str
    hit_blocks: int  # leading blocks that its node holds or will hold
    queued_tokens: int  # uncached tokens of requests that wait for their first token
    queued_requests: int
    busy_s: float  # until those are done, by their own estimates
    prefill: PrefillModel
    block_tokens: int
    block_bytes: int
    own_blocks: int = 0  # leading blocks that the engine itself holds: it need not even load them
    block_s: float = 0.0  # seconds that a block of its node takes to load, by what it has learned
    sources: Sequence[Source] = ()


class Decision(Struct, frozen=True, kw_only=True):
    """The choice and its terms, in seconds; `hit_blocks` and `pull_blocks` do not overlap."""

    worker: str
    hit_blocks: int
    pull_blocks: int
    source: Source | None
    queue_s: float
    pull_s: float
    prefill_s: float
    own_blocks: int = 0  # of the hit, without a load
    load_s: float = 0.0  # of the rest of the hit
    load_within_s: float = inf  # the node shall not load longer, without a pull

    @property
    def total_s(self) -> float:
        """Estimated time to first token."""
        return max(self.queue_s, self.load_s + self.pull_s) + self.prefill_s


Policy = Callable[[int, Sequence[Candidate], Draw], Decision]
"""A way to choose: prompt tokens, candidates (at least one), random draw."""


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


def usable_blocks(prompt_tokens: int, block_tokens: int) -> int:
    """Blocks that can be reused: the engine computes at least the last token itself."""
    return max(0, prompt_tokens - 1) // block_tokens


def best_for(prompt_tokens: int, candidate: Candidate) -> Decision:
    """The best that can be done with the request on one worker."""
    usable = usable_blocks(prompt_tokens, candidate.block_tokens)
    hit, own = min(candidate.hit_blocks, usable), min(candidate.own_blocks, usable)
    load_s = max(0, hit - own) * candidate.block_s
    source, pulled, within_s = None, 0, inf
    if candidate.sources:
        source, pulled = _best_pull(prompt_tokens, candidate, hit, own, usable, load_s)
    if source is None:
        hit = max(hit, own)
        hit, load_s, within_s = _worth_loading(prompt_tokens, candidate, hit, own, load_s)
    return Decision(
        worker=candidate.worker,
        hit_blocks=hit,
        pull_blocks=pulled,
        source=source,
        queue_s=candidate.busy_s,
        pull_s=source.seconds(pulled, candidate.block_bytes) if source else 0.0,
        prefill_s=candidate.prefill.seconds(prompt_tokens, (hit + pulled) * candidate.block_tokens),
        own_blocks=own,
        load_s=load_s,
        load_within_s=within_s,
    )


def _worth_loading(
    prompt_tokens: int, candidate: Candidate, hit: int, own: int, load_s: float
) -> tuple[int, float, float]:
    """Leading blocks that are there when the load ends, the seconds it takes, and may take.

    As long as computing the blocks would take, since a prompt's blocks may all lie on the disk
    of a node whose hits are fast on the whole. Where that would be sooner than the load itself,
    the node takes what comes within `LOAD_S`: in its memory it may have them all.
    """
    if not load_s:
        return hit, load_s, LOAD_S
    tokens, prefill = candidate.block_tokens, candidate.prefill
    saved_s = prefill.seconds(prompt_tokens, own * tokens) - prefill.seconds(
        prompt_tokens, hit * tokens
    )
    if load_s <= max(saved_s, LOAD_S):
        return hit, load_s, max(saved_s, LOAD_S)
    return own + int(LOAD_S / candidate.block_s), LOAD_S, LOAD_S


def _best_pull(
    prompt_tokens: int, candidate: Candidate, hit: int, own: int, usable: int, load_s: float
) -> tuple[Source | None, int]:
    """From whom to pull and how many of the ``usable`` blocks behind ``hit``, which take
    ``load_s``; nobody and 0 if computing them is as fast."""

    def total_s(source: Source | None, count: int) -> float:
        pull_s = source.seconds(count, candidate.block_bytes) if source else 0.0
        # a pull starts where the node's blocks end, also where the engine has more itself
        cached = max(hit + count, own) * candidate.block_tokens
        ready_s = max(candidate.busy_s, load_s + pull_s)
        return ready_s + candidate.prefill.seconds(prompt_tokens, cached)

    best: tuple[Source | None, int] = (None, 0)
    least_s = total_s(*best)
    for source in candidate.sources:
        most = min(source.blocks, usable) - hit
        if most <= 0 or source.node == candidate.node:
            continue
        spare_s = candidate.busy_s - load_s - source.wait_s
        for count in _worth_trying(most, spare_s, candidate.block_bytes, source):
            if (seconds := total_s(source, count)) < least_s:
                least_s, best = seconds, (source, count)
    return best


def _worth_trying(most: int, spare_s: float, block_bytes: int, source: Source) -> Iterator[int]:
    """Numbers of blocks among which the best is found.

    Seconds of a pull grow linearly with the blocks, those of the prefill shrink ever faster: the
    sum is concave on both sides of the point where the pull outlasts the queue, so its least value
    is at an end of one of the two ranges.
    """
    yield most
    block_s = source.block_s + max(1, block_bytes) / max(source.link.bytes_per_s, 1.0)
    free = int((spare_s - source.link.setup_s) / block_s)
    if 0 < free < most:
        yield free
