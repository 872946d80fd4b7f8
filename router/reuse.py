"""How much of a trace an LRU cache of any size would find, from one pass over it. Pure.

LRU is a stack algorithm: a block is found by every cache larger than the number of other blocks
that were used since its last use (Mattson et al., IBM Systems Journal, 1970). A prefix is used
tail first, so that no block leaves before those that follow it. Requests are taken one after the
other: what is still being computed counts as there.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prefixfleet.router.percentiles import percentile, reached
from prefixfleet.router.traces import Arrival, SharedBlocks

RESAMPLES = 100
CONFIDENCE = 0.9


@dataclass(frozen=True, slots=True)
class Reuse:
    """One request: ``needs[i]`` is the cache, in blocks, that finds its first i + 1 blocks.

    ``conversation`` is equal for a request and those that continue it.
    """

    tokens: int
    needs: tuple[int, ...]
    conversation: int

    def found(self, blocks: int) -> int:
        """Leading blocks that a cache of ``blocks`` finds."""
        low, high = 0, len(self.needs)
        while low < high:
            middle = (low + high) // 2
            if self.needs[middle] <= blocks:
                low = middle + 1
            else:
                high = middle
        return low


@dataclass(frozen=True, slots=True)
class HitRates:
    """``mean`` is by tokens, with the interval of `CONFIDENCE` around it; ``p90`` and ``p99`` are
    what nine tenths and 99 of 100 requests reach at least."""

    mean: float
    low: float
    high: float
    p50: float
    p90: float
    p99: float


class _LastUses:
    """Blocks by the time of their last use, with the number used since: a Fenwick tree."""

    def __init__(self, uses: int) -> None:
        self._tree = [0] * (uses + 1)
        self._last: dict[int, int] = {}
        self._now = 0

    def distance(self, block: int) -> int | None:
        """Blocks used since, this one included; None for one never used."""
        last = self._last.get(block)
        return None if last is None else len(self._last) - self._sum(last - 1)

    def use(self, block: int) -> None:
        """The block is used now."""
        if (last := self._last.get(block)) is not None:
            self._add(last, -1)
        self._now += 1
        self._last[block] = self._now
        self._add(self._now, 1)

    def _add(self, at: int, change: int) -> None:
        while at < len(self._tree):
            self._tree[at] += change
            at += at & -at

    def _sum(self, to: int) -> int:
        total = 0
        while to > 0:
            total += self._tree[to]
            to -= to & -to
        return total


def reuses(arrivals: Sequence[Arrival]) -> list[Reuse]:
    """What each request of a trace of block ids could find."""
    chains = [_full_blocks(arrival) for arrival in arrivals]
    uses = _LastUses(sum(map(len, chains)))
    made_by: dict[int, tuple[int, int]] = {}  # block to (conversation, length of its request)
    found = []
    for number, (arrival, chain) in enumerate(zip(arrivals, chains, strict=True)):
        needs = tuple(_needs(uses, chain, _usable(arrival)))
        conversation = _conversation(made_by, chain, number)
        for block in reversed(chain):
            made_by.setdefault(block, (conversation, len(chain)))
            uses.use(block)
        found.append(Reuse(_prompt(arrival).tokens, needs, conversation))
    return found


def hit_rates(requests: Sequence[Reuse], blocks: int, block_tokens: int, seed: int = 0) -> HitRates:
    """Hit rates of a cache of ``blocks``; the interval is a bootstrap over conversations."""
    hits = [request.found(blocks) * block_tokens for request in requests]
    ratios = [hit / request.tokens for hit, request in zip(hits, requests, strict=True)]
    groups: dict[int, tuple[int, int]] = {}
    for hit, request in zip(hits, requests, strict=True):
        before = groups.get(request.conversation, (0, 0))
        groups[request.conversation] = (before[0] + hit, before[1] + request.tokens)
    sums, draw, means = list(groups.values()), random.Random(seed), []
    for _ in range(RESAMPLES):
        sample = draw.choices(sums, k=len(sums))
        means.append(sum(h for h, _ in sample) / sum(t for _, t in sample))
    outside = 100 * (1 - CONFIDENCE) / 2
    return HitRates(
        mean=sum(hits) / sum(request.tokens for request in requests),
        low=percentile(means, outside),
        high=percentile(means, 100 - outside),
        p50=reached(ratios, 50),
        p90=reached(ratios, 90),
        p99=reached(ratios, 99),
    )


def working_set(arrivals: Sequence[Arrival], points: int = 60) -> list[tuple[float, int, int]]:
    """(seconds, distinct blocks so far, of these asked for more than once), evenly in time."""
    seen: dict[int, bool] = {}
    again = 0
    curve: list[tuple[float, int, int]] = []
    step = (arrivals[-1].at_s / points) or 1.0
    for arrival in arrivals:
        while len(curve) * step < arrival.at_s:
            curve.append((len(curve) * step, len(seen), again))
        for block in _full_blocks(arrival):
            again += seen.get(block) is False
            seen[block] = block in seen
    return [*curve, (arrivals[-1].at_s, len(seen), again)]


def _needs(uses: _LastUses, chain: Sequence[int], usable: int) -> Iterator[int]:
    most = 0
    for block in chain[:usable]:
        distance = uses.distance(block)
        if distance is None:
            return
        most = max(most, distance)
        yield most


def _conversation(made_by: dict[int, tuple[int, int]], chain: Sequence[int], number: int) -> int:
    """That of the request whose prompt this one continues, all of it but the last block; else its
    own. A shared system prompt makes no conversation."""
    known = next((i for i, block in enumerate(chain) if block not in made_by), len(chain))
    if known:
        conversation, length = made_by[chain[known - 1]]
        if known >= length - 1 and known > 1:
            return conversation
    return number


def _prompt(arrival: Arrival) -> SharedBlocks:
    assert isinstance(arrival.prompt, SharedBlocks), "only traces of block ids can be planned by"
    return arrival.prompt


def _full_blocks(arrival: Arrival) -> tuple[int, ...]:
    prompt = _prompt(arrival)
    return prompt.ids[: prompt.tokens // prompt.block_tokens]


def _usable(arrival: Arrival) -> int:
    """Blocks that may be found: an engine computes at least the last token."""
    prompt = _prompt(arrival)
    return max(0, prompt.tokens - 1) // prompt.block_tokens
