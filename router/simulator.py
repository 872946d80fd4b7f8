"""A fleet in simulated time: the real dispatcher, view, book and pools; modelled engines and links.

Discrete events. Placement, estimates, pulls' plans, eviction and the bookkeeping of slots are the
code that runs in production; only the seconds of a prefill and of a transfer come from
`fleet_models`. One prefill at a time a node, first come first served; a sender serves its pulls
one after the other. No decode stage: figures are about the time to first token.
"""

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from prefixfleet.router.book import Book
from prefixfleet.router.dispatch import Dispatched, Dispatcher
from prefixfleet.router.fleet_models import Hardware, ModelShape, calibrated, prefill_seconds
from prefixfleet.router.policy import Decision, Policy
from prefixfleet.router.prompt import Prompt
from prefixfleet.router.traces import Arrival, SharedBlocks
from prefixfleet.router.view import View
from prefixfleet.router.waiting import Waiting, expected_wait, next_to_go
from prefixfleet.router.worker import Worker
from prefixfleet.store.admission import ASKED_BLOCKS, make_room
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.eviction import EvictionOrder
from prefixfleet.store.eviction_value import ValueOrder
from prefixfleet.store.holds import Pin
from prefixfleet.store.index import IndexEvent, Membership
from prefixfleet.store.pool import SlotPool
from prefixfleet.store.records import NodeRecord, WorkerRecord

NAMESPACE = b"simulated"
PUBLISH_S = 0.002
"""From the end of a prefill until every router knows its blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What is simulated. ``blocks_per_node`` slots of ``block_tokens`` tokens each."""

    nodes: int
    blocks_per_node: int
    block_tokens: int
    shape: ModelShape
    hardware: Hardware
    policy: Policy
    unbound: bool = False  # requests wait in the router until their best worker is free
    ttft_slo_s: float = math.inf  # a request whose estimate is above is refused at once
    seed: int = 0
    order: Callable[[int], EvictionOrder] = ValueOrder  # of so many slots


@dataclass(frozen=True, slots=True)
class Served:
    """One request's fate. ``ttft_s`` is infinite when it was refused."""

    at_s: float
    node: int
    tokens: int
    local_tokens: int
    pulled_tokens: int
    ttft_s: float
    estimate_s: float

    @property
    def refused(self) -> bool:
        """Whether it was turned away."""
        return math.isinf(self.ttft_s)


class Clock:
    """Simulated time. Owned by its simulation."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Seconds since the start."""
        return self.now


@dataclass(slots=True)
class _Node:
    """One node's real books and its modelled engine and link."""

    number: int
    member: Membership
    pool: SlotPool
    busy_until: float = 0.0
    sending_until: float = 0.0


@dataclass(slots=True, eq=False)
class _Turn(Waiting):
    """A request that is not bound to a node yet."""

    chains: dict[bytes, list[BlockHash]]
    estimate_s: float


@dataclass(slots=True)
class _Running:
    """A request on its node until its prefill ends."""

    node: _Node
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
        self._nodes = [self._node(i) for i in range(fleet.nodes)]
        self._by_name = {node.member.node: node for node in self._nodes}
        self._workers = [self._worker(node) for node in self._nodes]
        records = self._records()
        self._dispatcher = Dispatcher(
            self.view,
            self._book,
            lambda: records,
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
            self._arrive(arrival)
        self._advance(math.inf)
        return sorted(self.served, key=lambda s: s.at_s)

    def fail(self, number: int, at_s: float) -> None:
        """Node ``number`` loses its blocks at ``at_s`` and joins anew: a restart."""
        self._at(at_s, lambda: self._restart(self._nodes[number]))

    def check(self) -> None:
        """Prove every pool's books."""
        for node in self._nodes:
            node.pool.check()

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
        busy = [self._book.load(worker.name).busy_s for worker in self._workers]
        wait_s = expected_wait(self._queue, decision.prefill_s, busy)
        return max(wait_s, decision.total_s - decision.prefill_s) + decision.prefill_s

    def _look(self) -> None:
        # Who waits goes to a free worker or not at all: with none free there is nothing to decide
        while self._somebody_free() and (
            found := next_to_go(self._queue, self.clock.now, self._decide, self._is_free)
        ):
            waiting, decision = found
            turn = next(t for t in self._queue if t is waiting)
            self._queue.remove(turn)
            self._serve(turn, decision)

    def _decide(self, waiting: Waiting) -> Decision:
        turn = next(t for t in self._queue if t is waiting)
        return self._dispatcher.decide(
            Prompt(tokens=turn.prompt_tokens), turn.chains, self._workers
        )

    def _somebody_free(self) -> bool:
        return any(self._is_free(worker.name) for worker in self._workers)

    def _is_free(self, worker: str) -> bool:
        return self._book.load(worker).queued_requests == 0

    def _serve(self, turn: _Turn, decision: Decision) -> None:
        fleet, tokens = self.fleet, turn.prompt_tokens
        chain = turn.chains[NAMESPACE]
        decided = self._dispatcher.bind("", decision, turn.chains, self._workers)
        node = self._by_name[decided.worker.record.node]
        usable = max(0, tokens - 1) // fleet.block_tokens
        pin = node.pool.pin(chain[:usable])
        local = len(pin.hashes)
        pulled, ready = self._pull(decided, chain[:usable], local)
        cached = (local + pulled) * fleet.block_tokens
        started = max(node.busy_until, ready)
        done = started + prefill_seconds(fleet.shape, fleet.hardware, tokens, cached)
        node.busy_until = done
        running = _Running(node, chain, pin)
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

    def _pull(self, decided: Dispatched, chain: list[BlockHash], local: int) -> tuple[int, float]:
        """Blocks that come from the planned source, and when they are here."""
        plan, now = decided.plan, self.clock.now
        if not plan.source:
            return 0, now
        source = self._by_name[plan.source]
        there = min(plan.blocks, source.pool.match(chain)) - local
        if there <= 0 or plan.source_epoch != source.member.epoch:
            return 0, now
        size = there * self.fleet.block_tokens * self.fleet.shape.kv_bytes_per_token
        starts = max(now, source.sending_until) + self.fleet.hardware.link_setup_s
        source.sending_until = starts + size / self.fleet.hardware.link_bytes_per_s
        return there, source.sending_until

    def _finish(self, running: _Running) -> None:
        running.charge.close()
        node, chain = running.node, running.chain
        running.pin.release()
        node.pool.observe(chain)
        with node.pool.pin(chain) as here:
            missing = self._admit(node, chain, len(here.hashes))
            parent = here.hashes[-1] if here.hashes else b""
            with node.pool.reserve(parent, missing) as reservation:
                new = tuple(block for block in missing if reservation.commit(block))
        self._at(
            self.clock.now + PUBLISH_S,
            lambda: self.view.apply(IndexEvent("publish", node.member, new)),
        )
        self._look()

    def _admit(self, node: _Node, chain: list[BlockHash], held: int) -> list[BlockHash]:
        """Those of the chain's blocks behind the ``held`` ones that are stored; room is made."""
        pool, missing = node.pool, chain[held:]
        if pool.free_slots < len(missing):
            others = {b: self.view.holders(b) - {node.member.node} for b in pool.soon(ASKED_BLOCKS)}
            pool.note_copies({block: len(nodes) for block, nodes in others.items()})
        room = make_room(pool, missing, held)
        self.view.apply(IndexEvent("withdraw", node.member, room.victims.hashes))
        pool.free(room.victims)
        return missing[: room.blocks]

    def _restart(self, node: _Node) -> None:
        node.member = Membership(node.member.node, node.member.epoch + 1, node.member.slot)
        self.view.apply(IndexEvent("join", node.member))
        node.pool = self._pool()

    def _advance(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.clock.now, _, action = heapq.heappop(self._events)
            action()

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), action))

    def _node(self, number: int) -> _Node:
        member = Membership(f"node-{number}", 1, number)
        self.view.apply(IndexEvent("join", member))
        return _Node(number, member, self._pool())

    def _pool(self) -> SlotPool:
        slots = self.fleet.blocks_per_node
        return SlotPool(slots, self.fleet.order(slots), self.clock)

    def _worker(self, node: _Node) -> Worker:
        fleet = self.fleet
        record = WorkerRecord(
            worker=f"worker-{node.number}",
            node=node.member.node,
            url="",
            model="simulated",
            model_path="",
            namespace={},
            block_bytes=fleet.block_tokens * fleet.shape.kv_bytes_per_token,
            max_model_tokens=1 << 30,
            prefill_tokens_per_s=1.0,
        )
        return Worker(record, None, NAMESPACE, fleet.block_tokens)  # type: ignore[arg-type]

    def _records(self) -> Mapping[str, NodeRecord]:
        hardware = self.fleet.hardware
        speed = {"bytes_per_s": hardware.link_bytes_per_s, "setup_s": hardware.link_setup_s}
        links = {"links": {node.member.node: speed for node in self._nodes}}
        return {
            node.member.node: NodeRecord(node=node.member.node, host="", stats=links)
            for node in self._nodes
        }


def chain_of(prompt: SharedBlocks) -> list[BlockHash]:
    """Block hashes of the prompt's full blocks: the trace's ids, since they name prefixes too."""
    full = prompt.tokens // prompt.block_tokens
    return [block.to_bytes(8, "big") + bytes(8) for block in prompt.ids[:full]]
