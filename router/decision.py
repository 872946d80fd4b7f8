"""What a policy is asked, and what it answers: a request's candidates and the decision on one."""

from collections.abc import Callable, Sequence
from math import inf

from msgspec import Struct

from prefixfleet.router.estimate import LinkSpeed, PrefillModel, pull_seconds

Draw = Callable[[int], int]
"""``draw(n)`` is a random number of 0 to n - 1; injected, so that tests can fix it."""


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


def usable_blocks(prompt_tokens: int, block_tokens: int) -> int:
    """Blocks that can be reused: the engine computes at least the last token itself."""
    return max(0, prompt_tokens - 1) // block_tokens
