"""A fleet in simulated time: the real dispatcher, view, book and pools; modelled engines and links.

Discrete events. Placement, estimates, pulls' plans, admission, eviction, broadcasts and the
bookkeeping of slots are the code that runs in production; only the seconds of a prefill and of a
transfer come from `fleet_models`, and what is on disk from `simulated_disk`. One prefill at a time
a node, first come first served; a sender serves its pulls one after the other. No decode stage:
figures are about the time to first token.
"""

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field

from prefixfleet.router.book import Book
from prefixfleet.router.dispatch import Dispatched, Dispatcher
from prefixfleet.router.fleet_models import calibrated, prefill_seconds
from prefixfleet.router.policy import Decision
from prefixfleet.router.prompt import Prompt
from prefixfleet.router.simulated_fleet import NAMESPACE, Fleet, Served, chain_of
from prefixfleet.router.simulated_node import SimulatedNode
from prefixfleet.router.simulated_replication import Broadcasts
from prefixfleet.router.traces import Arrival, SharedBlocks
from prefixfleet.router.view import View
from prefixfleet.router.waiting import Waiting, expected_wait, next_to_go
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.holds import Pin
from prefixfleet.store.index import IndexEvent, Membership
from prefixfleet.store.pool import SlotPool
from prefixfleet.store.records import PullPlan

TELL_S = 1.0
"""From one time to the next that a node tells how fast its disk was."""
PUBLISH_S = 0.002
"""From the end of a prefill until every router knows its blocks."""


class Clock:
    """Simulated time. Owned by its simulation."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Seconds since the start."""
        return self.now


@dataclass(slots=True, eq=False)
class _Turn(Waiting):
    """A request that is not bound to a node yet."""

    chains: dict[bytes, list[BlockHash]]
    estimate_s: float


@dataclass(slots=True)
class _Running:
    """A request on its node until its prefill ends."""

    worker: str
    node: SimulatedNode
    chain: list[BlockHash]
    pin: Pin
    charge: ExitStack = field(default_factory=ExitStack)


class Simulation:
    """One run. Owned by the caller; not reusable."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.clock = Clock()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.view = View(self.clock)
        self._book = Book(self.clock)
        self._nodes = [self._join(i) for i in range(fleet.nodes)]
        self.broadcasts = Broadcasts(fleet, self._nodes, self.view, self._at, self._publish)
        self._by_name = {node.member.node: node for node in self._nodes}
        self._workers = tuple(fleet.worker(node) for node in self._nodes)
        self._free = {worker.name for worker in self._workers}  # no prefill is in flight on them
        self._records = fleet.records(self._nodes)
        self._told_s = 0.0
        self._dispatcher = Dispatcher(
            self.view,
            self._book,
            lambda: self._records,
            key=b"",
            clock=self.clock,
            draw=random.Random(fleet.seed).randrange,
            policy=fleet.policy,
            models={w.name: calibrated(fleet.shape, fleet.hardware) for w in self._workers},
        )
        self.served: list[Served] = []
        self._queue: list[_Turn] = []

    def run(self, arrivals: Iterable[Arrival]) -> list[Served]:
        """Serve every arrival; returns them in order of arrival."""
        for arrival in arrivals:
            self._advance(arrival.at_s)
            self.clock.now = arrival.at_s
            self._tell()
            self._arrive(arrival)
        self._advance(math.inf)
        return sorted(self.served, key=lambda s: s.at_s)

    def fail(self, number: int, at_s: float) -> None:
        """Node ``number`` loses its blocks at ``at_s`` and joins anew: a restart."""
        self._at(at_s, lambda: self._nodes[number].restart(self._pool, self.view))

    def check(self) -> None:
        """Prove every pool's books."""
        for node in self._nodes:
            node.pool.check()

    def _tell(self) -> None:
        """Let the nodes tell what they learned of their disks, as they do each second."""
        if self.fleet.disk_blocks_per_node and self.clock.now - self._told_s >= TELL_S:
            self._records = self.fleet.records(self._nodes)
            self._told_s = self.clock.now

    def _arrive(self, arrival: Arrival) -> None:
        prompt = arrival.prompt
        assert isinstance(prompt, SharedBlocks), "only traces of block ids can be simulated"
        chains = {NAMESPACE: chain_of(prompt)}
        decision = self._dispatcher.decide(Prompt(tokens=prompt.tokens), chains, self._workers)
        estimate = self._estimate(decision)
        if estimate > self.fleet.ttft_slo_s:
            self.served.append(Served(self.clock.now, -1, prompt.tokens, 0, 0, math.inf, estimate))
            return
        turn = _Turn(self.clock.now, prompt.tokens, decision.prefill_s, chains, estimate)
        if self.fleet.unbound:
            self._queue.append(turn)
            self._look()
        else:
            self._serve(turn, decision)

    def _estimate(self, decision: Decision) -> float:
        """Time to first token that the router expects when the request arrives."""
        if not self.fleet.unbound:
            return decision.total_s
        wait_s = 0.0
        if self._queue or not self._free:
            busy = [self._book.load(worker.name).busy_s for worker in self._workers]
            wait_s = expected_wait(self._queue, decision.prefill_s, busy)
        return max(wait_s, decision.total_s - decision.prefill_s) + decision.prefill_s

    def _look(self) -> None:
        # Who waits goes to a free worker or not at all: with none free there is nothing to decide
        while self._free and (found := self._next()):
            waiting, decision = found
            turn = next(t for t in self._queue if t is waiting)
            self._queue.remove(turn)
            self._serve(turn, decision)

    def _next(self) -> tuple[Waiting, Decision] | None:
        with self._book.promising() as promise:
            return next_to_go(self._queue, self.clock.now, self._decide, self._is_free, promise)

    def _decide(self, waiting: Waiting) -> Decision:
        turn = next(t for t in self._queue if t is waiting)
        return self._dispatcher.decide(
            Prompt(tokens=turn.prompt_tokens), turn.chains, self._workers
        )

    def _is_free(self, worker: str) -> bool:
        return worker in self._free

    def _serve(self, turn: _Turn, decision: Decision) -> None:
        fleet, tokens = self.fleet, turn.prompt_tokens
        chain = turn.chains[NAMESPACE]
        decided = self._dispatcher.bind("", decision, turn.chains, self._workers)
        node = self._by_name[decided.worker.record.node]
        usable = max(0, tokens - 1) // fleet.block_tokens
        pin = node.pool.pin(chain[:usable])
        local, loaded = self._load(node, decided.plan, chain[:usable])
        pulled, ready = self._pull(decided, chain[:usable], local, loaded)
        cached = (local + pulled) * fleet.block_tokens
        seconds = prefill_seconds(fleet.shape, fleet.hardware, tokens, cached)
        done = node.compute(ready, seconds)
        running = _Running(decided.worker.name, node, chain, pin)
        self._free.discard(running.worker)
        running.charge.enter_context(
            self._book.charged(
                decided.worker.name,
                tokens=tokens - cached,
                sequences=1,
                expected_s=decision.prefill_s,
            )
        )
        self._at(done, lambda: self._finish(running))
        self.served.append(
            Served(
                turn.arrived_s,
                node.number,
                tokens,
                local * fleet.block_tokens,
                pulled * fleet.block_tokens,
                done - turn.arrived_s,
                turn.estimate_s,
            )
        )

    def _load(
        self, node: SimulatedNode, plan: PullPlan, chain: list[BlockHash]
    ) -> tuple[int, float]:
        """Of the node's own blocks those that the plan leaves time for, and when they are there."""
        block_s, until = self.fleet.hit_block_s, self.clock.now + plan.budget_s
        local, read_s = node.read(chain, self.clock.now, until)
        if plan.source or read_s + local * block_s <= until:
            return local, read_s + local * block_s
        return int((until - read_s) / block_s), until

    def _pull(
        self, decided: Dispatched, chain: list[BlockHash], local: int, loaded: float
    ) -> tuple[int, float]:
        """Blocks from the planned source, and when they are there, and the ``local`` too."""
        plan, block_s = decided.plan, self.fleet.hit_block_s
        if not plan.source:
            return 0, loaded
        source = self._by_name[plan.source]
        if plan.source_epoch != source.member.epoch:
            return 0, loaded
        until = max(loaded, self.clock.now + plan.budget_s)
        held, read_s = source.read(chain[: plan.blocks], loaded, until)
        there = held - local
        if there <= 0:
            return 0, loaded
        if not local:
            asker = decided.worker.record.node
            self.broadcasts.leased(source, asker, chain[:there], self.clock.now)
        hardware = self.fleet.hardware
        seconds = there * (block_s + self.fleet.block_bytes / hardware.link_bytes_per_s)
        return there, source.send(read_s, hardware.link_setup_s, seconds)

    def _finish(self, running: _Running) -> None:
        running.charge.close()
        if not self._book.load(running.worker).queued_requests:
            self._free.add(running.worker)
        running.pin.release()
        new = running.node.store(running.chain, self.view, self.clock.now)
        self._publish(running.node, new)
        self._look()

    def _publish(self, node: SimulatedNode, new: tuple[BlockHash, ...]) -> None:
        event = IndexEvent("publish", node.member, new)
        self._at(self.clock.now + PUBLISH_S, lambda: self.view.apply(event))

    def _advance(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.clock.now, _, action = heapq.heappop(self._events)
            action()

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), action))

    def _join(self, number: int) -> SimulatedNode:
        member = Membership(f"node-{number}", 1, number)
        self.view.apply(IndexEvent("join", member))
        return self.fleet.node(number, member, self.clock)

    def _pool(self) -> SlotPool:
        return self.fleet.pool(self.clock)
