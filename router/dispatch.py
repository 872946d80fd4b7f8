"""From a prompt to a decision: looks up what is known and asks the policy. No I/O.

Holds what the decision rests on: the view, the book, the nodes' records and one learned prefill
model a worker.
"""

import random
from collections.abc import Callable, Container, Mapping, Sequence

from msgspec import Struct

from prefixfleet.router.book import Book
from prefixfleet.router.candidates import Findings, candidate, longest, over_links, read_block_s
from prefixfleet.router.charge import Charge, Load
from prefixfleet.router.decision import Candidate, Decision, Policy, Source
from prefixfleet.router.estimate import PrefillModel
from prefixfleet.router.lineup import Lineup, Links
from prefixfleet.router.policy import choose, soonest
from prefixfleet.router.prompt import Prompt, prefix_chain
from prefixfleet.router.ranks import Ranks
from prefixfleet.router.speeds import Speeds
from prefixfleet.router.view import View
from prefixfleet.router.worker import Worker, namespace_of
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.records import NodeRecord, PullPlan

Chains = Mapping[bytes, Sequence[BlockHash]]
"""A prompt's chain in each `Worker.kind` that its workers have."""

MIN_PULL_BUDGET_S = 1.0
MAX_PULL_BUDGET_S = 600.0
"""Whatever a node's record says of its seconds: a plan of more than a day is refused as none."""
PULL_PATIENCE = 3.0  # a pull may take this many times its estimate before it counts as failed
FEW = 4
"""So many workers are compared one by one in less time than their order is brought up to date."""
MAX_LINEUPS = 16  # a model or adapter each, as a rule; who starts slowly is another one


class Dispatched(Struct, frozen=True, kw_only=True):
    """Where a request goes, and why."""

    request: str
    worker: Worker
    decision: Decision
    chain: Sequence[BlockHash]

    @property
    def plan(self) -> PullPlan:
        """What the worker's node shall do."""
        return _plan(self.request, self.decision)

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
        self._sending: dict[str, float] = {}  # when those that send are done
        self._draw = draw
        self._step_s = step_s
        self._policy = policy
        self.speeds = Speeds(models, changed=self._regroup)
        self._lineups: dict[tuple[Worker, ...], Lineup] = {}  # the last one asked for is the last
        self._lined_up_by: Mapping[str, NodeRecord] = {}
        self._told: Mapping[str, NodeRecord] = {}  # the records of the last decision
        self._told_at_s = 0.0  # when they were new

    def chains(self, prompt: Prompt, workers: Sequence[Worker]) -> Chains:
        """The prompt's chain in each kind of ``workers``. Slow for long prompts; pure."""
        kinds = {worker.kind: worker for worker in workers}
        return {kind: self._chain(prompt, worker) for kind, worker in kinds.items()}

    def _chain(self, prompt: Prompt, worker: Worker) -> Sequence[BlockHash]:
        if worker.lora is None:
            return []
        return prefix_chain(prompt, worker.namespace, worker.block_tokens, self._key, worker.lora)

    def decide(self, prompt: Prompt, chains: Chains, workers: Sequence[Worker]) -> Decision:
        """The best for one request at this moment; changes nothing. ``workers`` is not empty."""
        findings = {k: self._look_up(chain, namespace_of(k)) for k, chain in chains.items()}
        now = self._clock()
        told_s = self._told_s(now)

        def of(worker: Worker, busy_s: float, load: Load) -> Candidate:
            prefill, links = self._kind_of(worker)
            found = findings[worker.kind]
            sources = found.sources
            node = worker.record.node
            # plain engines tell adapters apart by name and path, whatever is in the files
            if worker.static and (worker.adapter or node not in self._pullable()):
                sources = ()
            sources = over_links(node, links, sources, told_s)
            block_s = self._block_s(node, worker.namespace)
            return candidate(worker, found, load, busy_s, prefill, sources, block_s)

        if self._policy is choose and len(workers) > FEW:
            lineup = self._lineup(workers)
            ranks = Ranks(prompt.tokens, lineup, findings, now, told_s, self.book.load, of)
            return soonest(ranks, self._draw)
        candidates = []
        for worker in workers:
            load = self.book.load(worker.name)
            candidates.append(of(worker, load.busy_s + self._step_of(worker.name, load), load))
        return self._policy(prompt.tokens, candidates, self._draw)

    def bind(
        self, request: str, decision: Decision, chains: Chains, workers: Sequence[Worker]
    ) -> Dispatched:
        """Act on a decision: its blocks and its pull count from now on for those that follow."""
        worker = next(w for w in workers if w.name == decision.worker)
        chain = chains[worker.kind]
        self.view.assume(worker.record.node, chain)
        if decision.source is not None:
            now = self._clock()
            self._sending = {node: end for node, end in self._sending.items() if end > now}
            self._sending[decision.source.node] = now + decision.pull_s
        return Dispatched(request=request, worker=worker, decision=decision, chain=chain)

    def learn(self, dispatched: Dispatched, prompt: Prompt, charge: Charge) -> None:
        """Follow what a prefill took whose first byte has come; see `Speeds.learn`."""
        if not prompt.blind:
            decision, tokens = dispatched.decision, prompt.tokens
            cached = min(tokens, dispatched.cached_tokens)
            moving_s = decision.load_s + decision.pull_s
            self.speeds.learn(dispatched.worker.record, charge, tokens, cached, moving_s)

    def _look_up(self, chain: Sequence[BlockHash], namespace: bytes) -> Findings:
        held = {**self.view.leading(chain), **self._engines.leading(chain)}
        return Findings(
            held=held,
            expected=self.view.expected(chain),
            own=self._caches.leading(chain),
            sources=self._sources(held, namespace) if held else (),
        )

    def _sources(self, held: Mapping[str, int], namespace: bytes) -> Sequence[Source]:
        members, engines = self.view.members, self._engines.members
        pullable = self._pullable() if engines else ()
        can_send = {
            node: ((members.get(node) or engines[node]).epoch, blocks)
            for node, blocks in held.items()
            if node in members or (node in engines and node in pullable)
        }
        if not can_send:
            return ()
        now = self._clock()
        waits_s = {
            node: max(0.0, self._sending[node] - now)
            for node in can_send.keys() & self._sending.keys()
        }
        return longest(can_send, waits_s, lambda node: self._block_s(node, namespace))

    def _lineup(self, workers: Sequence[Worker]) -> Lineup:
        """The standing order of exactly these workers, as of now."""
        records = self._records()
        if records is not self._lined_up_by and (records or self._lined_up_by):
            self._lineups.clear()  # links may have changed
        self._lined_up_by = records
        key = tuple(workers)
        lineup = self._lineups.pop(key, None)
        if lineup is None:
            lineup = Lineup(workers, self.book, self._step_s, self._kind_of)
        else:
            lineup.refresh()
        self._lineups[key] = lineup
        if len(self._lineups) > MAX_LINEUPS:
            del self._lineups[next(iter(self._lineups))]
        return lineup

    def _kind_of(self, worker: Worker) -> tuple[PrefillModel, Links]:
        record = self._records().get(worker.record.node)
        links = record.stats.get("links") if record else None
        return self.speeds.of(worker.record), links if isinstance(links, dict) and links else None

    def _regroup(self, worker: str) -> None:
        for lineup in self._lineups.values():
            lineup.regroup(worker)

    def _told_s(self, now: float) -> float:
        """How long ago the nodes' records were new here, as far as decisions show."""
        records = self._records()
        if records is not self._told:
            self._told, self._told_at_s = records, now
        return now - self._told_at_s

    def _block_s(self, node: str, namespace: bytes) -> float:
        return read_block_s(self._records().get(node), namespace)

    def _step_of(self, name: str, load: Load) -> float:
        # a step that generates for others is under way, and is ended first
        return self._step_s(name, load.decoding) if load.decoding else 0.0


def _plan(request: str, decision: Decision) -> PullPlan:
    if decision.source is None:
        return PullPlan(request=request, budget_s=min(decision.load_within_s, MAX_PULL_BUDGET_S))
    moving_s = decision.load_s + decision.pull_s
    return PullPlan(
        request=request,
        source=decision.source.node,
        source_epoch=decision.source.epoch,
        blocks=decision.hit_blocks + decision.pull_blocks,
        budget_s=min(max(MIN_PULL_BUDGET_S, PULL_PATIENCE * moving_s), MAX_PULL_BUDGET_S),
    )
