"""What the policy is shown of each worker: who could send it blocks, over which link."""

import math
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
from clocks import ManualClock
from indexes import chain_of
from upstreams import NAMESPACE
from worker_records import worker_record

from prefixfleet.router.book import Book
from prefixfleet.router.candidates import (
    MAX_BLOCK_S,
    MAX_QUEUE_S,
    MAX_SOURCES,
    over_links,
    read_block_s,
    read_link,
    read_queue_s,
)
from prefixfleet.router.decision import Candidate, Source
from prefixfleet.router.dispatch import Dispatcher
from prefixfleet.router.estimate import UNMEASURED, LinkSpeed, first_guess
from prefixfleet.router.policy import choose
from prefixfleet.router.prompt import Prompt
from prefixfleet.router.pull_or_compute import LOAD_S, best_for
from prefixfleet.router.view import View
from prefixfleet.router.worker import Worker
from prefixfleet.store.index import IndexEvent, Membership
from prefixfleet.store.records import NodeRecord, PullPlan

HOLDERS = MAX_SOURCES + 4
CHAIN = chain_of("x", HOLDERS)
KIND = b"n" * 16


def worker_on(node):
    record = worker_record(0, worker=f"worker of {node}", node=node, block_bytes=1)
    return Worker(record, SimpleNamespace(), KIND, NAMESPACE.block_tokens)


@pytest.fixture
def seen():
    return {}


@pytest.fixture
def dispatcher(seen):
    """Node i of 20 holds i + 1 blocks; node 5 has measured its link from node 19."""
    clock = ManualClock()
    view = View(clock)
    for number in range(HOLDERS):
        member = Membership(f"n{number}", number + 1, number)
        view.apply(IndexEvent("join", member))
        view.apply(IndexEvent("publish", member, tuple(CHAIN[: number + 1])))
    links = {"n19": {"bytes_per_s": 5.0, "setup_s": 0.25}}
    stats = {"links": links, "kinds": {KIND.hex(): {"block_s": 0.5}}}
    records = {"n5": NodeRecord(node="n5", host="h", stats=stats)}

    def policy(tokens, candidates, draw):
        seen.update({candidate.node: candidate for candidate in candidates})
        return choose(tokens, candidates, draw)

    caches = View(clock)
    engine = Membership("worker of elsewhere", 1, 0)
    caches.apply(IndexEvent("join", engine))
    caches.apply(IndexEvent("publish", engine, tuple(CHAIN[:3])))
    return Dispatcher(
        view, Book(clock), lambda: records, b"k" * 32, clock, policy=policy, caches=caches
    )


def test_only_the_longest_holders_are_compared(dispatcher, seen):
    dispatcher.decide(Prompt(tokens=1_000), {KIND: CHAIN}, [worker_on("elsewhere")])

    blocks = [source.blocks for source in seen["elsewhere"].sources]
    assert blocks == list(range(HOLDERS, HOLDERS - MAX_SOURCES, -1))


def test_what_an_engine_holds_itself_counts_for_it_alone_and_is_no_source(dispatcher, seen):
    workers = [worker_on("elsewhere"), worker_on("n0")]
    dispatcher.decide(Prompt(tokens=1_000), {KIND: CHAIN}, workers)

    assert (seen["elsewhere"].own_blocks, seen["n0"].own_blocks) == (3, 0)
    assert {s.node for s in seen["n0"].sources} <= {f"n{number}" for number in range(HOLDERS)}


def test_a_node_is_no_source_for_itself_and_its_own_link_speeds_count(dispatcher, seen):
    dispatcher.decide(Prompt(tokens=1_000), {KIND: CHAIN}, [worker_on("n5"), worker_on("n19")])

    links = {source.node: source.link for source in seen["n5"].sources}
    assert "n5" not in links
    assert links["n19"] == LinkSpeed(bytes_per_s=5.0, setup_s=0.25)
    assert links["n18"] == UNMEASURED
    assert "n19" not in {source.node for source in seen["n19"].sources}
    assert seen["n19"].hit_blocks == HOLDERS


def test_what_a_node_has_learned_of_its_blocks_counts_for_it_and_for_who_pulls_from_it(
    dispatcher, seen
):
    dispatcher.decide(Prompt(tokens=1_000), {KIND: CHAIN}, [worker_on("n5"), worker_on("n18")])

    assert (seen["n5"].block_s, seen["n18"].block_s) == (0.5, 0.0)
    sources = {source.node: source.block_s for source in seen["n18"].sources}
    assert (sources["n5"], sources["n19"]) == (0.5, 0.0)


def test_a_hit_is_priced_as_those_of_its_model_however_slow_another_one_of_the_node_is(
    dispatcher, seen
):
    """One daemon serves both; ``hits`` of its record is the slowest of them, for people."""
    models = {b"f" * 16: 0.001, KIND: 0.5}
    kinds = {digest.hex(): {"block_s": block_s} for digest, block_s in models.items()}
    stats = {"hits": {"block_s": 0.5}, "kinds": kinds}
    dispatcher._records = lambda: {"n5": NodeRecord(node="n5", host="h", stats=stats)}
    lora = "an adapter"

    for namespace, block_s in (*models.items(), (b"s" * 16, 0.0)):
        there, elsewhere = (
            replace(worker_on(node), namespace=namespace, lora=lora) for node in ("n5", "elsewhere")
        )
        dispatcher.decide(Prompt(tokens=1_000), {there.kind: CHAIN}, [there, elsewhere])

        assert seen["n5"].block_s == block_s
        prices = {source.node: source.block_s for source in seen["elsewhere"].sources}
        assert (prices["n5"], prices["n19"]) == (block_s, 0.0)


@pytest.mark.parametrize(
    "kind", [None, [], {}, {"block_s": "1"}, {"block_s": -1.0}, {"block_s": float("nan")}]
)
def test_a_record_that_says_nothing_sensible_of_its_blocks_is_as_one_without(kind):
    for kinds in ({KIND.hex(): kind}, kind):
        record = NodeRecord(node="n", host="h", stats={"kinds": kinds})
        assert read_block_s(record, KIND) == 0.0


def test_no_record_makes_a_node_infinitely_slow():
    stats = {"kinds": {KIND.hex(): {"block_s": float("inf")}}}

    assert read_block_s(NodeRecord(node="n", host="h", stats=stats), KIND) == MAX_BLOCK_S


@pytest.mark.parametrize("setup_s", [0.0, -1.0, 1e300, math.inf, math.nan, "1", None])
@pytest.mark.parametrize("bytes_per_s", [1e-300, 1.0, 1e308, math.inf, math.nan, 0.0, -1.0, None])
def test_a_link_that_a_record_says_nonsense_of_fails_no_decision(bytes_per_s, setup_s):
    link = read_link({"bytes_per_s": bytes_per_s, "setup_s": setup_s}) or UNMEASURED
    sources = [Source(node="b", epoch=1, blocks=10, link=link)]
    seen = Candidate(
        worker="a", node="a", hit_blocks=0, queued_tokens=0, queued_requests=0, busy_s=5.0,
        prefill=first_guess(1_000.0), block_tokens=16, block_bytes=1, sources=sources,
    )  # fmt: skip

    assert 5.0 < best_for(1_000, seen).total_s <= 6.0


@pytest.mark.parametrize(
    ("queued", "told_s", "expected"),
    [
        (4_000, 0.0, 4.0), (4_000, 1.5, 2.5), (4_000, 5.0, 0.0), (0, 0.0, 0.0),
        (10**15, 0.0, MAX_QUEUE_S), (-5, 0.0, 0.0), (math.nan, 0.0, 0.0), (math.inf, 0.0, 0.0),
        ("9", 0.0, 0.0), (None, 0.0, 0.0), ([1], 0.0, 0.0),
    ],
)  # fmt: skip
def test_the_queue_of_a_source_is_its_seconds_and_goes_with_time(queued, told_s, expected):
    link = LinkSpeed(bytes_per_s=1_000.0, setup_s=0.0)

    assert read_queue_s({"queued_bytes": queued}, link, told_s) == expected


QUEUED = 40_000_000  # bytes; 40 s at the speed of the links below


def met_queues(*sources_with, workers=1):
    """A dispatcher for workers that hold nothing, and the clock: a long prefix lies on "s0" and
    "s1", of which those named have a long queue, by what every worker's node says."""
    clock = ManualClock()
    view = View(clock)
    for number, node in enumerate(["s0", "s1"]):
        member = Membership(node, 1, number)
        view.apply(IndexEvent("join", member))
        view.apply(IndexEvent("publish", member, tuple(CHAIN)))
    links = {
        node: {"bytes_per_s": 1e6, "setup_s": 0.0, "queued_bytes": QUEUED * (node in sources_with)}
        for node in ["s0", "s1"]
    }
    names = [f"w{number}" for number in range(workers)]
    told = {name: NodeRecord(node=name, host="h", stats={"links": links}) for name in names}
    dispatcher = Dispatcher(view, Book(clock), lambda: told, b"k" * 32, clock, lambda n: 0)
    return dispatcher, clock, [worker_on(name) for name in names]


def decided(dispatcher, workers):
    tokens = 1 + len(CHAIN) * NAMESPACE.block_tokens
    return dispatcher.decide(Prompt(tokens=tokens), {KIND: CHAIN}, workers)


@pytest.mark.parametrize("workers", [1, 9])
def test_the_source_without_a_queue_sends_and_where_all_have_one_nobody_does(workers):
    for queued, source in [((), "s0"), (("s0",), "s1"), (("s1",), "s0")]:
        dispatcher, _, all_of_them = met_queues(*queued, workers=workers)
        assert decided(dispatcher, all_of_them).source.node == source

    dispatcher, _, all_of_them = met_queues("s0", "s1", workers=workers)
    assert decided(dispatcher, all_of_them).source is None


def test_an_old_queue_counts_no_longer():
    dispatcher, clock, workers = met_queues("s0", "s1")
    assert decided(dispatcher, workers).source is None

    clock.advance(QUEUED / 1e6)

    assert decided(dispatcher, workers).source is not None


@pytest.mark.parametrize(("planned_s", "expected"), [(0.0, 40.0), (30.0, 40.0), (50.0, 50.0)])
def test_a_pull_that_was_planned_here_and_met_there_is_counted_once(planned_s, expected):
    links = {"s": {"bytes_per_s": 1e6, "setup_s": 0.0, "queued_bytes": QUEUED}}
    source = Source(node="s", epoch=1, blocks=1, link=UNMEASURED, wait_s=planned_s)

    (seen,) = over_links("w", links, [source])

    assert (seen.wait_s, seen.link.bytes_per_s) == (expected, 1e6)


def test_a_plan_can_be_read_however_slow_a_node_says_that_it_is():
    clock, chain = ManualClock(), chain_of("long", 1_000)
    view = View(clock)
    for number, blocks in enumerate([len(chain) - 100, len(chain)]):
        member = Membership(f"n{number}", 1, number)
        view.apply(IndexEvent("join", member))
        view.apply(IndexEvent("publish", member, tuple(chain[:blocks])))
    kinds = {KIND.hex(): {"block_s": math.inf}}
    slow = {"n0": NodeRecord(node="n0", host="h", stats={"kinds": kinds})}
    dispatcher = Dispatcher(view, Book(clock), lambda: slow, b"k" * 32, clock)
    worker, chains = worker_on("n0"), {KIND: chain}

    prompt = Prompt(tokens=1 + len(chain) * worker.block_tokens)
    decision = dispatcher.decide(prompt, chains, [worker])
    plan = dispatcher.bind("r", decision, chains, [worker]).plan

    assert (plan.source, plan.blocks) == ("n1", len(chain))
    assert PullPlan.from_map(asdict(plan)) == plan


def test_a_prefill_is_learned_without_the_seconds_of_loading(dispatcher):
    worker = worker_on("n5")
    prompt, chains = Prompt(tokens=1_000), {KIND: CHAIN[:4]}
    decision = dispatcher.decide(prompt, chains, [worker])
    sent = dispatcher.bind("r", decision, chains, [worker])
    charge = dispatcher.book.charge(worker.name, tokens=1, sequences=1, expected_s=1.0)
    charge.first_byte(charge.started_s + decision.load_s + decision.prefill_s)

    before = dispatcher.speeds.of(worker.record)
    dispatcher.learn(sent, prompt, charge)

    assert decision.load_s == LOAD_S  # not for 2 s, which the blocks would take
    assert sent.plan.budget_s == LOAD_S
    after = dispatcher.speeds.of(worker.record)
    assert after.samples == 1
    assert after.coefficients == pytest.approx(before.coefficients)


def test_a_first_token_before_all_was_moved_is_no_prefill_in_no_time(dispatcher):
    """The node had the blocks in memory, although its hits are slow as a rule."""
    worker = worker_on("n5")
    prompt, chains = Prompt(tokens=1_000), {KIND: CHAIN[:4]}
    sent = dispatcher.bind("r", dispatcher.decide(prompt, chains, [worker]), chains, [worker])
    charge = dispatcher.book.charge(worker.name, tokens=1, sequences=1, expected_s=1.0)
    charge.first_byte(charge.started_s + sent.decision.load_s / 2)

    before = dispatcher.speeds.of(worker.record)
    dispatcher.learn(sent, prompt, charge)

    assert dispatcher.speeds.of(worker.record) == before


def test_sources_that_are_done_sending_are_forgotten(dispatcher):
    told = set()
    for number in range(3):
        workers = [worker_on(f"elsewhere {number}")]
        decision = dispatcher.decide(Prompt(tokens=1_000), {KIND: CHAIN[:4]}, workers)
        dispatcher.bind("r", decision, {KIND: CHAIN[:4]}, workers)
        told.add(decision.source.node)
    assert set(dispatcher._sending) == told
    assert len(told) == 3

    dispatcher._clock.advance(3_600.0)
    dispatcher.bind("r", decision, {KIND: CHAIN[:4]}, workers)

    assert set(dispatcher._sending) == {decision.source.node}


def test_of_equal_holders_the_least_asked_is_first(dispatcher, seen):
    workers = [worker_on("elsewhere")]
    decision = dispatcher.decide(Prompt(tokens=1_000), {KIND: CHAIN[:4]}, workers)
    dispatcher.bind("r", decision, {KIND: CHAIN[:4]}, workers)
    assert decision.source

    dispatcher.decide(Prompt(tokens=1_000), {KIND: CHAIN[:4]}, workers)

    assert decision.source.node not in {s.node for s in seen["elsewhere"].sources}
