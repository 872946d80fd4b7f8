"""Requests put through a pool by one eviction order, and through the optimum that knows the future.

A hit is a block of the unbroken prefix that is in the cache when its request comes.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from traces import Request

from prefixfleet.store.admission import make_room
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.eviction import EvictionOrder, LruOrder
from prefixfleet.store.eviction_fifo import FifoOrder, S3FifoOrder
from prefixfleet.store.eviction_value import ValueOrder
from prefixfleet.store.holds import Victims
from prefixfleet.store.pool import SlotPool

ORDERS: dict[str, Callable[[int], EvictionOrder]] = {
    "fifo": lambda _: FifoOrder(),
    "lru": lambda _: LruOrder(),
    "s3-fifo": S3FifoOrder,
    "value": ValueOrder,
}
NEVER = 1 << 60


@dataclass(frozen=True, slots=True)
class Hits:
    """Blocks found, of blocks asked for: in all, and in the second half of the requests."""

    found: int
    asked: int
    late_found: int
    late_asked: int

    @property
    def rate(self) -> float:
        return self.found / self.asked

    @property
    def late_rate(self) -> float:
        return self.late_found / self.late_asked


def replay(requests: Sequence[Request], order: str, num_blocks: int) -> Hits:
    """What a node does with each request: look, store what is missing, evict what must go."""
    now = 0.0
    pool = SlotPool(num_blocks, ORDERS[order](num_blocks), lambda: now)
    found = []
    for request in requests:
        now = request.at_s
        found.append(serve(pool, request.chain))
    return _hits(requests, found)


def serve(
    pool: SlotPool,
    chain: Sequence[BlockHash],
    leaving: Callable[[Victims], None] = lambda _: None,
) -> int:
    """One request at a node; how many of its leading blocks were there. ``leaving`` sees what goes
    for it, before it is gone."""
    pool.observe(chain)
    with pool.pin(chain) as here:
        hits = len(here.hashes)
        room = make_room(pool, chain[hits:])
        leaving(room.victims)
        pool.free(room.victims)
        wanted = chain[hits : hits + room.blocks]
        with pool.reserve(chain[hits - 1] if hits else b"", wanted) as reservation:
            for block in wanted:
                reservation.commit(block)
    return hits


def belady(requests: Sequence[Request], num_blocks: int) -> Hits:
    """The most hits that any order can have: keep what is asked for soonest, of what is here and
    what the request brought. A prefix is asked for no later than what follows it, so chains stay
    unbroken by themselves."""
    next_of = _next_uses(requests)
    cached: dict[BlockHash, int] = {}  # to its next use
    farthest: list[tuple[int, int, BlockHash]] = []
    found = []
    for number, request in enumerate(requests):
        here = [block in cached for block in request.chain]
        found.append(here.index(False) if False in here else len(here))
        for position, (block, after) in enumerate(zip(request.chain, next_of[number], strict=True)):
            cached[block] = after
            heapq.heappush(farthest, (-after, -position, block))
        while len(cached) > num_blocks:
            after, _, block = heapq.heappop(farthest)
            if cached.get(block) == -after:
                del cached[block]
    return _hits(requests, found)


def _next_uses(requests: Sequence[Request]) -> list[list[int]]:
    """For each block of each request, the number of the next request with it."""
    seen: dict[BlockHash, int] = {}
    after = []
    for number in range(len(requests) - 1, -1, -1):
        chain = requests[number].chain
        after.append([seen.get(block, NEVER) for block in chain])
        seen |= dict.fromkeys(chain, number)
    return after[::-1]


def _hits(requests: Sequence[Request], found: Sequence[int]) -> Hits:
    asked = [len(request.chain) for request in requests]
    half = len(requests) // 2
    return Hits(sum(found), sum(asked), sum(found[half:]), sum(asked[half:]))


def slack(requests: Sequence[Request]) -> int:
    """Different blocks of all requests: more room than this is of no use to any order."""
    return len(set(itertools.chain.from_iterable(r.chain for r in requests)))
