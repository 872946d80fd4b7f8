"""From a prompt to a decision: looks up what is known and asks the policy. No I/O.

Holds what the decision rests on: the view, the book, the nodes' records and one learned prefill
model a worker.
"""

import heapq
import logging
import random
from collections.abc import Callable, Container, Mapping, Sequence

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
from prefixfleet.store.records import NodeRecord, PullPlan, WorkerRecord

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
        pullable: Callable[[], Container[str]] = frozenset,
        caches: View | None = None,
        step_s: Callable[[str, int], float] = lambda worker, sequences: 0.0,
    ) -> None:
        """``step_s`` gives a worker's seconds a step while it generates so many sequences.

        ``engines`` is what static engines hold, ``pullable`` those that pull from each other.
        """
        self.view = view
        self._pullable = pullable
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
        pullable = self._pullable()
        sources = {kind: self._sources(found, pullable) for kind, found in held.items()}
        records = self._records()
        candidates = [
            self._candidate(
                w.record,
                held[w.namespace],
                expected[w.namespace],
                own[w.namespace].get(w.record.worker, 0),
                sources[w.namespace] if not w.static or w.record.node in pullable else (),
                records.get(w.record.node),
                w.block_tokens,
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
        worker: WorkerRecord,
        held: Mapping[str, int],
        expected: Mapping[str, int],
        own_blocks: int,
        sources: Sequence[Source],
        record: NodeRecord | None,
        block_tokens: int,
    ) -> Candidate:
        name, node = worker.worker, worker.node
        if record is not None or node in held:
            sources = _over_links(node, record, sources)
        load = self.book.load(name)
        busy_s = load.busy_s
        if load.decoding:  # a step that generates for others is under way, and is ended first
            busy_s += self._step_s(name, load.decoding)
        return Candidate(
            worker=name,
            node=node,
            hit_blocks=max(held.get(node, 0), expected.get(node, 0)),
            own_blocks=own_blocks,
            queued_tokens=load.queued_tokens,
            queued_requests=load.queued_requests,
            busy_s=busy_s,
            prefill=self._models.get(name) or first_guess(worker.prefill_tokens_per_s),
            block_tokens=block_tokens,
            block_bytes=worker.block_bytes,
            sources=sources,
        )

    def _sources(self, held: Mapping[str, int], pullable: Container[str]) -> list[Source]:
        """Who holds most and lives, the least asked first, as if no link had been measured."""
        now, members, engines = self._clock(), self.view.members, self._engines.members
        sources = [
            Source(
                node=node,
                epoch=(members.get(node) or engines[node]).epoch,
                blocks=blocks,
                link=UNMEASURED,
                wait_s=max(0.0, self._sending.get(node, 0.0) - now),
            )
            for node, blocks in held.items()
            if node in members or (node in engines and node in pullable)
        ]
        return heapq.nsmallest(MAX_SOURCES, sources, key=lambda s: (-s.blocks, s.wait_s))


def _over_links(
    node: str, record: NodeRecord | None, sources: Sequence[Source]
) -> Sequence[Source]:
    """``sources`` with the links that ``node`` has measured; a node is none for itself.

    The very same ``sources`` where nothing is to be changed: the policy sees by that who is
    alike.
    """
    links = record.stats.get("links") if record else None
    if isinstance(links, dict) and links:
        return [
            structs.replace(source, link=_read_link(links.get(source.node)) or source.link)
            for source in sources
            if source.node != node
        ]
    if any(source.node == node for source in sources):
        return [source for source in sources if source.node != node]
    return sources


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
