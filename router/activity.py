"""What a router did of late, for those who watch it: decisions, outcomes, origins of tokens.

Bounded memory; numbers, names and hashes, never a prompt's text. Watchers get each decision as it
is taken, again when its first byte is there, and when it has ended; one that does not read fast
enough misses some, and is told how many.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from prefixfleet.router.dispatch import Dispatched
from prefixfleet.router.hot_prefixes import HotPrefixes

KEPT_DECISIONS = 500
BUCKET_S = 5.0
KEPT_BUCKETS = 120  # ten minutes
MAX_UNREAD = 256
ORIGINS = ("local", "pulled", "computed")


@dataclass(slots=True, kw_only=True)
class Seen:
    """One request as a watcher sees it. Seconds; ``ttft_s`` is None until its first byte.

    ``cold_s`` is what the router estimates the same request would have taken on the same worker
    with nothing cached.
    """

    id: str
    at: float
    route: str
    node: str
    tokens: int
    local: int
    pulled: int
    source: str
    queue_s: float
    pull_s: float
    prefill_s: float
    estimate_s: float
    cold_s: float
    reason: str
    prefix: str
    ttft_s: float | None = None


@dataclass(slots=True, eq=False)
class Watcher:
    """One reader's queue. Owned by the task that reads it."""

    unread: asyncio.Queue[Seen] = field(default_factory=lambda: asyncio.Queue(MAX_UNREAD))
    missed: int = 0

    def tell(self, seen: Seen) -> None:
        """Queue one, or count it as missed."""
        try:
            self.unread.put_nowait(seen)
        except asyncio.QueueFull:
            self.missed += 1


class Activity:
    """Owned by the router's event loop. ``clock`` is monotonic, ``wall`` seconds since 1970."""

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._clock = clock
        self._wall = wall
        self._seen: dict[str, Seen] = {}
        self._buckets: deque[dict[str, float]] = deque(maxlen=KEPT_BUCKETS)
        self._watchers: set[Watcher] = set()
        self.prefixes = HotPrefixes()
        self.tokens = dict.fromkeys(ORIGINS, 0)
        self.requests = 0

    @property
    def watchers(self) -> int:
        """Readers that follow now."""
        return len(self._watchers)

    def sent(self, request: str, route: str, tokens: int, to: Dispatched, cold_s: float) -> None:
        """A decision was taken; a request that is sent again takes the place of its first try."""
        decision, block_tokens = to.decision, to.worker.block_tokens
        seen = Seen(
            id=request,
            at=self._wall(),
            route=route,
            node=to.worker.record.node,
            tokens=tokens,
            local=decision.hit_blocks * block_tokens,
            pulled=decision.pull_blocks * block_tokens,
            source=decision.source.node if decision.source else "",
            queue_s=decision.queue_s,
            pull_s=decision.pull_s,
            prefill_s=decision.prefill_s,
            estimate_s=decision.total_s,
            cold_s=decision.queue_s + cold_s,
            reason=reason(to),
            prefix=to.chain[0].hex()[:12] if to.chain else "",
        )
        if request not in self._seen:
            self.requests += 1
            self.prefixes.note(to.chain, block_tokens, self._clock())
        self._seen[request] = seen
        if len(self._seen) > KEPT_DECISIONS:
            del self._seen[next(iter(self._seen))]
        self._tell(seen)

    def first_byte(self, request: str, ttft_s: float) -> None:
        """The first token of a streamed answer came ``ttft_s`` after the request was sent on."""
        if seen := self._seen.get(request):
            seen.ttft_s = ttft_s
            self._tell(seen)

    def ended(self, request: str, local: int, pulled: int, computed: int) -> None:
        """Where the tokens of an answered prompt came from."""
        bucket = self._bucket()
        for origin, count in zip(ORIGINS, (local, pulled, computed), strict=True):
            self.tokens[origin] += count
            bucket[origin] += count
        bucket["requests"] += 1
        if seen := self._seen.get(request):
            seen.local, seen.pulled = local, pulled
            self._tell(seen)

    def decisions(self) -> list[Seen]:
        """The last ones, oldest first."""
        return list(self._seen.values())

    def series(self) -> list[dict[str, float]]:
        """Requests and tokens by origin in each `BUCKET_S` that had any; ``at`` is its start."""
        return list(self._buckets)

    @contextmanager
    def watched(self) -> Iterator[Watcher]:
        """A reader that is told everything while the block runs."""
        watcher = Watcher()
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)

    def _bucket(self) -> dict[str, float]:
        start = self._wall() // BUCKET_S * BUCKET_S
        if not self._buckets or self._buckets[-1]["at"] != start:
            self._buckets.append({"at": start, "requests": 0, **dict.fromkeys(ORIGINS, 0)})
        return self._buckets[-1]

    def _tell(self, seen: Seen) -> None:
        for watcher in self._watchers:
            watcher.tell(seen)


def reason(to: Dispatched) -> str:
    """Why this worker, in words: the terms of the estimate that won."""
    decision = to.decision
    words = [f"least estimate, {decision.total_s:.3f} s"]
    if decision.hit_blocks:
        words.append(f"{decision.hit_blocks} of {len(to.chain)} blocks are there")
    if decision.source:
        words.append(
            f"{decision.pull_blocks} from {decision.source.node} in {decision.pull_s:.3f} s, "
            "sooner than computing them"
        )
    if not (decision.hit_blocks or decision.source):
        words.append("no block is worth fetching")
    if decision.queue_s >= 0.001:
        words.append(f"its queue takes {decision.queue_s:.3f} s")
    return "; ".join(words)
