"""A fleet in simulated time: the real dispatcher, view, book and pools; modelled engines and links.

Discrete events. Placement, estimates, pulls' plans, admission, eviction, broadcasts and the
bookkeeping of slots are the code that runs in production; only the seconds of a prefill and of a
transfer come from `fleet_models`, and what is on disk from `simulated_disk`. One prefill at a time
a node, first come first served; a sender serves its pulls one after the other. No decode stage:
figures are about the time to first token.
"""

import math
import random
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

from prefixfleet.router.book import Book
from prefixfleet.router.decision import Decision
from prefixfleet.router.dispatch import Dispatcher
from prefixfleet.router.fleet_models import calibrated, prefill_seconds
from prefixfleet.router.prompt import Prompt
from prefixfleet.router.simulated_fleet import NAMESPACE, Fleet, Served, chain_of
from prefixfleet.router.simulated_moves import Moves
from prefixfleet.router.simulated_node import SimulatedNode
from prefixfleet.router.simulated_replication import Broadcasts
from prefixfleet.router.simulated_requests import Running, Turn
from prefixfleet.router.simulated_time import SimulatedTime
from prefixfleet.router.traces import Arrival, SharedBlocks
from prefixfleet.router.view import View
from prefixfleet.router.waiting import expected_wait, next_to_go
from prefixfleet.router.worker import Worker
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.index import IndexEvent, Membership
from prefixfleet.store.pool import SlotPool

TELL_S = 1.0
"""From one time to the next that a node tells how fast its disk was."""
PUBLISH_S = 0.002
"""From the end of a prefill until every router knows its blocks."""


class Simulation:
    """One run. Owned by the caller; not reusable."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.clock = SimulatedTime()
        self.view = View(self.clock)
        self._book = Book(self.clock)
        self._nodes = [self._join(i) for i in range(fleet.nodes)]
        self.broadcasts = Broadcasts(fleet, self._nodes, self.view, self.clock.at, self._publish)
        self._by_name = {node.member.node: node for node in self._nodes}
        self._moves = Moves(fleet, self._by_name, self.broadcasts, self.clock)
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
        self._queue: list[Turn] = []
        self._running: list[Running] = []
        self._away: set[str] = set()  # nodes that are gone for a while

    def run(self, arrivals: Iterable[Arrival]) -> list[Served]:
        """Serve every arrival; returns them in order of arrival."""
        for arrival in arrivals:
            self.clock.advance(arrival.at_s)
            self.clock.now = arrival.at_s
            self._tell()
            self._arrive(arrival)
        self.clock.advance(math.inf)
        return sorted(self.served, key=lambda s: s.at_s)

    def fail(self, number: int, at_s: float, away_s: float = 0.0) -> None:
        """At ``at_s`` node ``number`` loses its blocks in memory. It joins anew at once: its daemon
        restarts. Or it is away for ``away_s`` seconds, its engine too: what it was computing goes
        to others."""
        node = self._nodes[number]
        if away_s:
            self.clock.at(at_s, lambda: self._lose(node))
            self.clock.at(at_s + away_s, lambda: self._return(node))
        else:
            self.clock.at(at_s, lambda: node.restart(self._pool, self.view))

    def check(self) -> None:
        """Prove every pool's books."""
        for node in self._nodes:
            node.pool.check()

    def _tell(self) -> None:
        """Let the nodes tell what they learned of their disks, as they do each second."""
        if self.fleet.disk_blocks_per_node and self.clock.now - self._told_s >= TELL_S:
            self._records = self.fleet.records(self._nodes)
            self._told_s = self.clock.now

    def _lose(self, node: SimulatedNode) -> None:
        node.leave(self.view)
        self._away.add(node.member.node)
        self._free -= {w.name for w in self._workers if w.record.node == node.member.node}
        lost = [running for running in self._running if running.node is node]
        for running in lost:
            self._end(running)
        for running in lost:
            self._place(running.turn)

    def _return(self, node: SimulatedNode) -> None:
        node.restart(self._pool, self.view)
        node.busy_until = node.sending_until = self.clock.now
        self._away.discard(node.member.node)
        self._free |= {w.name for w in self._workers if w.record.node == node.member.node}
        self._look()

    def _present(self) -> Sequence[Worker]:
        if not self._away:
            return self._workers
        return [w for w in self._workers if w.record.node not in self._away]

    def _place(self, turn: Turn) -> None:
        """A request of a node that is gone: to another one."""
        if self.fleet.unbound:
            self._queue.append(turn)
            self._look()
        elif present := self._present():
            prompt = Prompt(tokens=turn.prompt_tokens)
            self._serve(turn, self._dispatcher.decide(prompt, turn.chains, present))
        else:
            self._refuse(turn.arrived_s, turn.prompt_tokens, turn.estimate_s)

    def _refuse(self, at_s: float, tokens: int, estimate_s: float) -> None:
        self.served.append(Served(at_s, -1, tokens, 0, 0, math.inf, estimate_s))

    def _arrive(self, arrival: Arrival) -> None:
        prompt = arrival.prompt
        assert isinstance(prompt, SharedBlocks), "only traces of block ids can be simulated"
        chains = {NAMESPACE: chain_of(prompt)}
        if not (present := self._present()):
            self._refuse(self.clock.now, prompt.tokens, math.inf)
            return
        decision = self._dispatcher.decide(Prompt(tokens=prompt.tokens), chains, present)
        estimate = self._estimate(decision)
        if estimate > self.fleet.ttft_slo_s:
            self._refuse(self.clock.now, prompt.tokens, estimate)
            return
        turn = Turn(self.clock.now, prompt.tokens, decision.prefill_s, chains, estimate)
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
            busy = [self._book.load(worker.name).busy_s for worker in self._present()]
            wait_s = expected_wait(self._queue, decision.prefill_s, busy)
        return max(wait_s, decision.total_s - decision.prefill_s) + decision.prefill_s

    def _look(self) -> None:
        # Who waits goes to a free worker or not at all: with none free there is nothing to decide
        while self._free and (found := self._next()):
            turn, decision = found
            self._queue.remove(turn)
            self._serve(turn, decision)

    def _next(self) -> tuple[Turn, Decision] | None:
        with self._book.promising() as promise:
            return next_to_go(self._queue, self.clock.now, self._decide, self._is_free, promise)

    def _decide(self, turn: Turn) -> Decision:
        return self._dispatcher.decide(
            Prompt(tokens=turn.prompt_tokens), turn.chains, self._present()
        )

    def _is_free(self, worker: str) -> bool:
        return worker in self._free

    def _serve(self, turn: Turn, decision: Decision) -> None:
        fleet, tokens = self.fleet, turn.prompt_tokens
        chain = turn.chains[NAMESPACE]
        decided = self._dispatcher.bind("", decision, turn.chains, self._workers)
        node = self._by_name[decided.worker.record.node]
        usable = max(0, tokens - 1) // fleet.block_tokens
        pin = node.pool.pin(chain[:usable])
        local, loaded = self._moves.load(node, decided.plan, chain[:usable])
        pulled, ready = self._moves.pull(decided, chain[:usable], local, loaded)
        cached = (local + pulled) * fleet.block_tokens
        seconds = prefill_seconds(fleet.shape, fleet.hardware, tokens, cached)
        done = node.compute(ready, seconds)
        fate = Served(
            turn.arrived_s,
            node.number,
            tokens,
            local * fleet.block_tokens,
            pulled * fleet.block_tokens,
            done - turn.arrived_s,
            turn.estimate_s,
        )
        running = Running(turn, decided.worker.name, node, chain, pin, ExitStack(), fate)
        self._running.append(running)
        self._free.discard(running.worker)
        running.charge.enter_context(
            self._book.charged(
                decided.worker.name,
                tokens=tokens - cached,
                sequences=1,
                expected_s=decision.prefill_s,
            )
        )
        self.clock.at(done, lambda: self._finish(running))

    def _finish(self, running: Running) -> None:
        if running not in self._running:
            return  # its node was lost meanwhile
        self._end(running)
        self.served.append(running.fate)
        if not self._book.load(running.worker).queued_requests:
            self._free.add(running.worker)
        new = running.node.store(running.chain, self.view, self.clock.now)
        self._publish(running.node, new)
        self._look()

    def _end(self, running: Running) -> None:
        self._running.remove(running)
        running.charge.close()
        running.pin.release()

    def _publish(self, node: SimulatedNode, new: tuple[BlockHash, ...]) -> None:
        event = IndexEvent("publish", node.member, new)
        self.clock.at(self.clock.now + PUBLISH_S, lambda: self.view.apply(event))

    def _join(self, number: int) -> SimulatedNode:
        member = Membership(f"node-{number}", 1, number)
        self.view.apply(IndexEvent("join", member))
        return self.fleet.node(number, member, self.clock)

    def _pool(self) -> SlotPool:
        return self.fleet.pool(self.clock)
