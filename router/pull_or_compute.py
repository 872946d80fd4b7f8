"""The best that can be done with a request on one worker: load, pull or compute what. Pure.

The later of (its queue is done) and (its node's blocks are loaded, then the pull is done), since
both start at once and overlap the queue, then the prefill of what is still missing, with the best
source and the best number of blocks, none included: min(pull, recompute) needs no threshold and
never lost in replay against a fixed ratio.
"""

from collections.abc import Iterator
from math import inf

from prefixfleet.router.decision import Candidate, Decision, Source, usable_blocks

LOAD_S = 0.25
"""A load may take so long whatever it saves; the daemon answers in a millisecond otherwise."""


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
    within_s = may_load_s(prompt_tokens, candidate, hit, own)
    if load_s <= within_s:
        return hit, load_s, within_s
    return own + int(LOAD_S / candidate.block_s), LOAD_S, LOAD_S


def may_load_s(prompt_tokens: int, candidate: Candidate, hit: int, own: int) -> float:
    """Seconds that computing the blocks from ``own`` to ``hit`` would take, `LOAD_S` at least."""
    tokens, prefill = candidate.block_tokens, candidate.prefill
    computed_s = prefill.seconds(prompt_tokens, own * tokens)
    return max(computed_s - prefill.seconds(prompt_tokens, hit * tokens), LOAD_S)


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
