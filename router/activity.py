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

from msgspec import Struct

from prefixfleet.router.decision import Decision
from prefixfleet.router.dispatch import Dispatched
from prefixfleet.router.hot_prefixes import HotPrefixes
from prefixfleet.store.chain import BlockHash

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


class _Sent(Struct, eq=False):
    """What `Seen` is made of, for the few requests that somebody looks at."""

    id: str
    at: float
    route: str
    tokens: int
    node: str
    decision: Decision
    blocks: int
    prefix: BlockHash
    cold_s: float
    local: int
    pulled: int
    ttft_s: float | None = None

    def seen(self) -> Seen:
        decision = self.decision
        return Seen(
            id=self.id,
            at=self.at,
            route=self.route,
            node=self.node,
            tokens=self.tokens,
            local=self.local,
            pulled=self.pulled,
            source=decision.source.node if decision.source else "",
            queue_s=decision.queue_s,
            pull_s=decision.pull_s,
            prefill_s=decision.prefill_s,
            estimate_s=decision.total_s,
            cold_s=decision.queue_s + self.cold_s,
            reason=reason(decision, self.blocks),
            prefix=self.prefix.hex()[:12],
            ttft_s=self.ttft_s,
        )


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
        self._sent: dict[str, _Sent] = {}
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
        block_tokens = to.worker.block_tokens
        if request not in self._sent:
            self.requests += 1
            self.prefixes.note(to.chain, block_tokens, self._clock())
        self._sent[request] = sent = _Sent(
            request,
            self._wall(),
            route,
            tokens,
            to.worker.record.node,
            to.decision,
            len(to.chain),
            to.chain[0] if to.chain else b"",
            cold_s,
            to.decision.hit_blocks * block_tokens,
            to.decision.pull_blocks * block_tokens,
        )
        if len(self._sent) > KEPT_DECISIONS:
            del self._sent[next(iter(self._sent))]
        self._tell(sent)

    def first_byte(self, request: str, ttft_s: float) -> None:
        """The first token of a streamed answer came ``ttft_s`` after the request was sent on."""
        if sent := self._sent.get(request):
            sent.ttft_s = ttft_s
            self._tell(sent)

    def ended(self, request: str, local: int, pulled: int, computed: int) -> None:
        """Where the tokens of an answered prompt came from."""
        bucket = self._bucket()
        for origin, count in zip(ORIGINS, (local, pulled, computed), strict=True):
            self.tokens[origin] += count
            bucket[origin] += count
        bucket["requests"] += 1
        if sent := self._sent.get(request):
            sent.local, sent.pulled = local, pulled
            self._tell(sent)

    def decisions(self) -> list[Seen]:
        """The last ones, oldest first."""
        return [sent.seen() for sent in self._sent.values()]

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

    def _tell(self, sent: _Sent) -> None:
        if self._watchers:
            seen = sent.seen()
            for watcher in self._watchers:
                watcher.tell(seen)


def reason(decision: Decision, blocks: int) -> str:
    """Why this worker, in words: the terms of the estimate that won, for a prompt of ``blocks``."""
    words = [f"least estimate, {decision.total_s:.3f} s"]
    if decision.hit_blocks:
        load = f", loaded in {decision.load_s:.3f} s" if decision.load_s >= 0.001 else ""
        words.append(f"{decision.hit_blocks} of {blocks} blocks are there{load}")
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
