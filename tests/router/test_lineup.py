"""The standing order of workers: a decision from it is one from the best of every single worker."""

from types import SimpleNamespace
from typing import Any

import pytest
from clocks import ManualClock
from hypothesis import given
from hypothesis import strategies as st
from indexes import chain_of
from msgspec import structs
from upstreams import NAMESPACE
from worker_records import worker_record

from prefixfleet.router import journal
from prefixfleet.router.book import Book
from prefixfleet.router.charge import Load
from prefixfleet.router.dispatch import Dispatcher
from prefixfleet.router.policy import choose
from prefixfleet.router.prompt import Prompt
from prefixfleet.router.pull_or_compute import best_for
from prefixfleet.router.view import View
from prefixfleet.router.worker import Worker
from prefixfleet.store.index import IndexEvent, Membership
from prefixfleet.store.records import NodeRecord

KINDS = (b"n" * 16, b"m" * 16)
BLOCKS = 12
CHAINS = {kind: chain_of(kind.decode(), BLOCKS) for kind in KINDS}
TOKENS = BLOCKS * NAMESPACE.block_tokens + 5
WORKERS = 10
STEPS_S = {0: 0.0, 1: 0.01, 2: 0.0101, 3: 0.2}
LINKS: tuple[dict[str, Any], ...] = (
    {},
    {"n0": {"bytes_per_s": 1e6, "setup_s": 0.001}},
    {"n1": "broken"},
)


def worker(number, kind=KINDS[0], static=False, speed=1_000.0):
    record = worker_record(number, prefill_tokens_per_s=speed)
    return Worker(record, SimpleNamespace(), kind, NAMESPACE.block_tokens, static=static)


class Fleet:
    """A dispatcher with everything it looks at, and one beside it that looks at everybody."""

    def __init__(self, workers):
        self.clock, self.workers, self.charges = ManualClock(), workers, []
        self.view, self.book, self.caches = View(self.clock), Book(self.clock), View(self.clock)
        self.records, self.drawn = {}, 0
        for number in range(WORKERS):
            self.view.apply(IndexEvent("join", Membership(f"n{number}", 1, number)))
            self.caches.apply(IndexEvent("join", Membership(f"w{number}", 1, number)))
        self.all = []
        self.lined_up = self._dispatcher(choose)
        self.compared = self._dispatcher(self._look_at_everybody)

    def _dispatcher(self, policy):
        dispatcher = Dispatcher(
            self.view,
            self.book,
            lambda: self.records,
            b"k" * 32,
            self.clock,
            draw=self._draw,
            policy=policy,
            caches=self.caches,
            pullable=lambda: {"n0"},
            step_s=lambda name, sequences: STEPS_S.get(sequences, 0.5),
        )
        dispatcher._sending = {"n1": self.clock.now_s + 0.05}
        return dispatcher

    def _look_at_everybody(self, tokens, candidates, draw):
        self.all = [best_for(tokens, candidate) for candidate in candidates]
        return self.all[0]

    def _draw(self, count):
        assert count == self.expected
        return self.drawn

    def tied(self):
        """Every choice that may be made now, by worker."""
        self.compared.decide(Prompt(tokens=TOKENS), CHAINS, self.workers)
        limit_s = min(decision.total_s for decision in self.all) * 1.01 + 1e-6
        tied = [decision for decision in self.all if decision.total_s <= limit_s]
        most = max(decision.own_blocks for decision in tied)
        return {d.worker: rounded(d) for d in tied if d.own_blocks == most}

    def choices(self, count):
        """What is chosen with each draw of ``count``."""
        self.expected, found = count, {}
        for self.drawn in range(count):
            decision = self.lined_up.decide(Prompt(tokens=TOKENS), CHAINS, self.workers)
            found[decision.worker] = rounded(decision)
        return found

    def learn(self, name, seconds):
        """One prompt that ``name`` computed alone took so long."""
        served = next(w for w in self.workers if w.name == name)
        decision = structs.replace(best_for(TOKENS, self.idle(name)), pull_s=0.0)
        for dispatcher in (self.lined_up, self.compared):
            done = dispatcher.bind("r", decision, CHAINS, [served])
            charge = SimpleNamespace(alone=True, prefill_s=seconds)
            dispatcher.learn(done, Prompt(tokens=TOKENS), charge)

    def idle(self, name):
        seen = []

        def policy(tokens, candidates, draw):
            seen.extend(candidates)
            return best_for(tokens, candidates[0])

        self._dispatcher(policy).decide(Prompt(tokens=TOKENS), CHAINS, self.workers)
        return next(candidate for candidate in seen if candidate.worker == name)


def rounded(decision):
    """Two ways to the same float may differ in its last bit."""
    return structs.replace(decision, queue_s=round(decision.queue_s, 9))


@st.composite
def crews(draw):
    return [
        worker(
            number,
            kind=draw(st.sampled_from([KINDS[0], KINDS[0], KINDS[1]])),
            static=draw(st.sampled_from([False, False, False, True])),
            speed=draw(st.sampled_from([1_000.0, 1_000.0, 5_000.0])),
        )
        for number in range(draw(st.sampled_from([1, 3, 6, WORKERS])))
    ]


number = st.integers(0, WORKERS - 1)
changes = st.lists(
    st.one_of(
        st.tuples(st.just("charge"), number, st.sampled_from([0.1, 0.1, 2.0])),
        st.tuples(st.just("first byte"), st.integers(0, 9)),
        st.tuples(st.just("release"), st.integers(0, 9)),
        st.tuples(st.just("hear"), number, st.integers(0, 3), st.sampled_from([0.0, 0.3])),
        st.tuples(st.just("pass"), st.sampled_from([0.05, 0.1, 5.0])),
        st.tuples(st.just("learn"), number, st.sampled_from([0.01, 3.0])),
        st.tuples(st.just("hold"), number, st.integers(0, BLOCKS)),
        st.tuples(st.just("cache"), number, st.integers(0, BLOCKS)),
        st.tuples(st.just("assume"), number, st.integers(0, BLOCKS)),
        st.tuples(st.just("links"), number, st.sampled_from(LINKS)),
    ),
    max_size=8,
)


def change(fleet, what, *terms):
    """One thing that happens to a fleet."""
    name = f"w{terms[0]}"
    if what == "hear":
        fleet.book.hear({name: Load(7, terms[1], terms[1], terms[2])} if terms[1] else {})
    elif what == "pass":
        fleet.clock.advance(terms[0])
    elif what == "learn" and any(w.name == name for w in fleet.workers):
        fleet.learn(name, terms[1])
    elif what in ("charge", "first byte", "release"):
        serve(fleet, what, *terms)
    else:
        tell(fleet, what, *terms)


def serve(fleet, what, number, seconds=0.0):
    """A step in the life of a request."""
    if what == "charge":
        fleet.charges.append(
            fleet.book.charge(f"w{number}", tokens=9, sequences=1 + number % 3, expected_s=seconds)
        )
    elif fleet.charges and what == "first byte":
        fleet.charges[number % len(fleet.charges)].first_byte(fleet.clock())
    elif fleet.charges:
        fleet.book.release(fleet.charges.pop(number % len(fleet.charges)))


def tell(fleet, what, number, *terms):
    """The index says something about a node or an engine."""
    node = f"n{number}"
    if what == "links":
        record = NodeRecord(node=node, host="h", stats={"links": terms[0]})
        fleet.records = {**fleet.records, node: record}
    elif what == "assume":
        fleet.view.assume(node, CHAINS[KINDS[0]][: terms[0]])
    elif what in ("hold", "cache"):
        view, member = (fleet.view, node) if what == "hold" else (fleet.caches, f"w{number}")
        for chain in CHAINS.values():
            held = tuple(chain[: terms[0]])
            view.apply(IndexEvent("publish", view.members[member], held))


busy = st.lists(st.sampled_from(["free", "computes", "generates", "generates more", "late"]))


def make_busy(fleet, states):
    """Each worker as its state says: what is free would hide the others."""
    terms = {"computes": (1, 0.3), "late": (1, 1e-4), "generates": (2, 0.0)}
    for number, state in enumerate(states[:WORKERS]):
        if state != "free":
            sequences, expected_s = terms.get(state, (3 - number % 3, 0.0))
            charge = fleet.book.charge(
                f"w{number}", tokens=9, sequences=sequences, expected_s=expected_s
            )
            fleet.charges.append(charge)
            if state.startswith("generates"):
                charge.first_byte(fleet.clock())
    fleet.clock.advance(0.01)


promises = st.lists(st.tuples(number, st.sampled_from([0.1, 0.3])), max_size=4)


@given(crews(), busy, changes, promises)
def test_the_order_that_stands_changes_no_decision(workers, states, happened, promised):
    """The same choices, each as likely, as from the best of every single worker; also while
    some are promised to others."""
    fleet = Fleet(workers)
    make_busy(fleet, states)
    for what in [("pass", 0.0), *happened]:
        change(fleet, *what)

        for promised_now in (promised, []):
            with fleet.book.promising() as promise:
                for number, seconds in promised_now:
                    promise(f"w{number}", seconds)
                tied = fleet.tied()

                assert fleet.choices(len(tied)) == tied


def test_a_decision_on_a_big_fleet_looks_at_few_workers(monkeypatch):
    """Of a thousand that hold nothing only the soonest, however they are busy."""
    fleet = Fleet([worker(number) for number in range(1_000)])
    for number in range(1_000):
        fleet.book.charge(f"w{number}", tokens=9, sequences=1, expected_s=1.0 + number)
    fleet.view.apply(IndexEvent("publish", Membership("n7", 1, 7), tuple(CHAINS[KINDS[0]])))
    asked = []
    load = fleet.book.load
    fleet.expected = 1
    fleet.choices(1)
    monkeypatch.setattr(fleet.book, "load", lambda name: asked.append(name) or load(name))

    assert fleet.choices(1).keys() == {"w0"}
    assert set(asked) <= {"w0", "w1", "w7"}


def test_who_asks_too_late_what_changed_looks_at_everybody(monkeypatch):
    monkeypatch.setattr(journal, "MAX_KEPT", 10)
    fleet = Fleet([worker(number) for number in range(3)])
    assert fleet.choices(3).keys() == {"w0", "w1", "w2"}
    for _ in range(8):
        fleet.book.release(fleet.book.charge("w0", tokens=9, sequences=1, expected_s=1.0))
    fleet.book.charge("w1", tokens=9, sequences=1, expected_s=1.0)
    fleet.book.charge("w2", tokens=9, sequences=1, expected_s=1.0)

    assert fleet.choices(1).keys() == {"w0"}


@pytest.mark.parametrize("left", [["w0"], ["w1", "w2"]])
def test_workers_that_may_get_nothing_are_not_chosen(left):
    fleet = Fleet([worker(number) for number in range(3)])
    fleet.choices(3)
    fleet.workers = [w for w in fleet.workers if w.name in left]

    assert fleet.choices(len(left)).keys() == set(left)


def test_of_workers_that_generate_those_win_whose_step_ends_soonest():
    fleet = Fleet([worker(number) for number in range(4)])
    for number, sequences in enumerate([3, 1, 2, 2]):
        charge = fleet.book.charge(f"w{number}", tokens=9, sequences=sequences, expected_s=0.1)
        charge.first_byte(fleet.clock())

    tied = fleet.tied()

    assert tied.keys() == {"w1", "w2", "w3"}
    assert fleet.choices(3) == tied
