"""From a prompt to a decision: looks up what is known and asks the policy. No I/O.

Holds what the decision rests on: the view, the book, the nodes' records and one learned prefill
model a worker.
"""

import heapq
import logging
import random
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct, structs

from prefixfleet.router.book import Book, Charge
from prefixfleet.router.estimate import (
    UNMEASURED,
    LinkSpeed,
    PrefillModel,
    first_guess,
    observe,
)
from prefixfleet.router.policy import Candidate, Decision, Policy, Source, choose
from prefixfleet.router.prompt import Prompt, prefix_chain
from prefixfleet.router.view import View
from prefixfleet.router.worker import Worker
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.records import NodeRecord, PullPlan

Chains = Mapping[bytes, Sequence[BlockHash]]
"""A prompt's chain in each namespace that its workers have."""

MIN_PULL_BUDGET_S = 1.0
PULL_PATIENCE = 3.0  # a pull may take this many times its estimate before it counts as failed
MAX_SOURCES = 16  # that are compared for one worker: a prefix that all nodes hold has too many

log = logging.getLogger(__name__)


class Dispatched(Struct, frozen=True, kw_only=True):
    """Where a request goes, why, and what its node shall do."""

    worker: Worker
    decision: Decision
    plan: PullPlan
    chain: Sequence[BlockHash]

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that the worker is expected not to compute."""
        return self.worker.block_tokens * (self.decision.hit_blocks + self.decision.pull_blocks)


class Dispatcher:
    """Owned by the router's event loop; not thread-safe.

    ``policy`` makes the choice; ``models`` are workers' speeds that are known from before.
    """

    def __init__(
        self,
        view: View,
        book: Book,
        records: Callable[[], Mapping[str, NodeRecord]],
        key: bytes,
        clock: Callable[[], float],
        draw: Callable[[int], int] = random.randrange,
        policy: Policy = choose,
        models: Mapping[str, PrefillModel] | None = None,
        engines: View | None = None,
        caches: View | None = None,
        step_s: Callable[[str, int], float] = lambda worker, sequences: 0.0,
    ) -> None:
        """``step_s`` gives a worker's seconds a step while it generates so many sequences."""
        self.view = view
        # what static engines hold: no sources of pulls
        self._engines = View(clock) if engines is None else engines
        # what engines hold in their own caches, besides what their nodes hold for them
        self._caches = View(clock) if caches is None else caches
        self.book = book
        self._records = records
        self._key = key
        self._clock = clock
        self._sending: dict[str, float] = {}  # when each source is done with what was planned
        self._draw = draw
        self._step_s = step_s
        self._policy = policy
        self._models: dict[str, PrefillModel] = dict(models or {})

    def chains(self, prompt: Prompt, workers: Sequence[Worker]) -> Chains:
        """The prompt's chain in each namespace of ``workers``. Slow for long prompts; pure."""
        kinds = {worker.namespace: worker.block_tokens for worker in workers}
        return {
            namespace: prefix_chain(prompt, namespace, block_tokens, self._key)
            for namespace, block_tokens in kinds.items()
        }

    def decide(self, prompt: Prompt, chains: Chains, workers: Sequence[Worker]) -> Decision:
        """The best for one request at this moment; changes nothing. ``workers`` is not empty."""
        held = {
            kind: {**self.view.leading(chain), **self._engines.leading(chain)}
            for kind, chain in chains.items()
        }
        expected = {kind: self.view.expected(chain) for kind, chain in chains.items()}
        own = {kind: self._caches.leading(chain) for kind, chain in chains.items()}
        sources = {kind: self._sources(found) for kind, found in held.items()}
        candidates = [
            self._candidate(
                w,
                held[w.namespace],
                expected[w.namespace],
                own[w.namespace].get(w.name, 0),
                sources[w.namespace],
            )
            for w in workers
        ]
        return self._policy(prompt.tokens, candidates, self._draw)

    def bind(
        self, request: str, decision: Decision, chains: Chains, workers: Sequence[Worker]
    ) -> Dispatched:
        """Act on a decision: its blocks and its pull count from now on for those that follow."""
        worker = next(w for w in workers if w.name == decision.worker)
        chain = chains[worker.namespace]
        self.view.assume(worker.record.node, chain)
        if decision.source is not None:
            self._sending[decision.source.node] = self._clock() + decision.pull_s
        return Dispatched(
            worker=worker, decision=decision, plan=_plan(request, decision), chain=chain
        )

    def learn(self, dispatched: Dispatched, prompt: Prompt, charge: Charge) -> None:
        """Follow an observed time to first token, if the request had its worker to itself."""
        if charge.alone and charge.first_byte_s is not None and not prompt.blind:
            worker = dispatched.worker
            seconds = charge.first_byte_s - charge.started_s - dispatched.decision.pull_s
            self._models[worker.name] = observe(
                self.prefill_model(worker),
                prompt.tokens,
                min(prompt.tokens, dispatched.cached_tokens),
                max(0.0, seconds),
            )

    def prefill_model(self, worker: Worker) -> PrefillModel:
        """What is known of the worker's speed."""
        known = self._models.get(worker.name)
        return known or first_guess(worker.record.prefill_tokens_per_s)

    def forget(self, name: str) -> None:
        """Drop what was learned of a worker that is gone."""
        self._models.pop(name, None)

    def _candidate(
        self,
        worker: Worker,
        held: Mapping[str, int],
        expected: Mapping[str, int],
        own_blocks: int,
        sources: Sequence[Source],
    ) -> Candidate:
        node = worker.record.node
        load = self.book.load(worker.name)
        return Candidate(
            worker=worker.name,
            node=node,
            hit_blocks=max(held.get(node, 0), expected.get(node, 0)),
            own_blocks=own_blocks,
            queued_tokens=load.queued_tokens,
            queued_requests=load.queued_requests,
            # a step that generates for others is under way, and is ended first
            busy_s=load.busy_s + self._step_s(worker.name, load.decoding),
            prefill=self.prefill_model(worker),
            block_tokens=worker.block_tokens,
            block_bytes=worker.record.block_bytes,
            sources=self._over_links(node, sources),
        )

    def _sources(self, held: Mapping[str, int]) -> list[Source]:
        """Who holds most and lives, the least asked first, as if no link had been measured."""
        now, members = self._clock(), self.view.members
        sources = [
            Source(
                node=node,
                epoch=members[node].epoch,
                blocks=blocks,
                link=UNMEASURED,
                wait_s=max(0.0, self._sending.get(node, 0.0) - now),
            )
            for node, blocks in held.items()
            if node in members
        ]
        return heapq.nsmallest(MAX_SOURCES, sources, key=lambda s: (-s.blocks, s.wait_s))

    def _over_links(self, node: str, sources: Sequence[Source]) -> Sequence[Source]:
        """``sources`` with the links that ``node`` has measured; a node is none for itself."""
        record = self._records().get(node)
        links = record.stats.get("links") if record else None
        if not isinstance(links, dict) or not links:
            return [source for source in sources if source.node != node]
        return [
            structs.replace(source, link=_read_link(links.get(source.node)) or source.link)
            for source in sources
            if source.node != node
        ]


def _read_link(measured: object) -> LinkSpeed | None:
    if not isinstance(measured, dict):
        return None
    speed, setup = measured.get("bytes_per_s"), measured.get("setup_s")
    if not isinstance(speed, int | float) or not isinstance(setup, int | float) or speed <= 0:
        return None
    return LinkSpeed(bytes_per_s=float(speed), setup_s=max(0.0, float(setup)))


def _plan(request: str, decision: Decision) -> PullPlan:
    if decision.source is None:
        return PullPlan(request=request)
    return PullPlan(
        request=request,
        source=decision.source.node,
        source_epoch=decision.source.epoch,
        blocks=decision.hit_blocks + decision.pull_blocks,
        budget_s=max(MIN_PULL_BUDGET_S, PULL_PATIENCE * decision.pull_s),
    )
