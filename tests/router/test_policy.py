"""The choice: least seconds, with the best of pulling and computing on every worker."""

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from prefixfleet.router.decision import Candidate, Source
from prefixfleet.router.estimate import LinkSpeed, PrefillModel, first_guess, pull_seconds
from prefixfleet.router.policy import choose
from prefixfleet.router.pull_or_compute import LOAD_S, best_for

BLOCK_TOKENS = 16
FAST = LinkSpeed(bytes_per_s=1e9, setup_s=0.001)
SLOW = LinkSpeed(bytes_per_s=1e4, setup_s=0.5)
IDLE = Candidate(
    worker="a",
    node="node-a",
    hit_blocks=0,
    queued_tokens=0,
    queued_requests=0,
    busy_s=0.0,
    prefill=first_guess(1_000.0),
    block_tokens=BLOCK_TOKENS,
    block_bytes=1_000,
)


def source(blocks, link=FAST, node="node-x"):
    return Source(node=node, epoch=1, blocks=blocks, link=link)


def first(_: int) -> int:
    return 0


def test_the_worker_whose_node_holds_the_prefix_wins():
    holder = replace(IDLE, worker="b", node="node-b", hit_blocks=50)

    decision = choose(1_000, [IDLE, holder], first)

    assert (decision.worker, decision.hit_blocks, decision.pull_blocks) == ("b", 50, 0)


def test_a_busy_holder_loses_to_an_idle_worker_that_pulls():
    busy = replace(
        IDLE, worker="b", hit_blocks=60, queued_tokens=50_000, queued_requests=9, busy_s=50
    )
    puller = replace(IDLE, sources=[source(60)])

    decision = choose(1_000, [busy, puller], first)

    assert (decision.worker, decision.pull_blocks, decision.source) == ("a", 60, source(60))


def test_of_equals_the_engine_that_holds_the_prefix_itself_wins():
    loads = replace(IDLE, hit_blocks=50)
    holds = replace(IDLE, worker="b", hit_blocks=50, own_blocks=50)

    for candidates in ([loads, holds], [holds, loads]):
        assert choose(1_000, candidates, first).worker == "b"


def test_an_engine_that_holds_more_than_its_node_need_not_compute_it():
    decision = best_for(1_000, replace(IDLE, hit_blocks=10, own_blocks=50))

    assert (decision.hit_blocks, decision.own_blocks, decision.pull_blocks) == (50, 50, 0)


def test_what_the_engine_holds_itself_is_not_pulled_for():
    decision = best_for(1_000, replace(IDLE, own_blocks=60, sources=[source(60)]))

    assert (decision.hit_blocks, decision.pull_blocks, decision.source) == (60, 0, None)


def test_a_pull_beyond_what_the_engine_holds_starts_where_the_node_ends():
    """The node does not have what the engine has: those blocks travel too, and are counted."""
    candidate = replace(IDLE, hit_blocks=10, own_blocks=20, sources=[source(60)])

    decision = best_for(1_000, candidate)

    assert (decision.hit_blocks, decision.pull_blocks) == (10, 50)
    assert decision.pull_s == pull_seconds(50 * IDLE.block_bytes, FAST)


def test_of_nodes_that_hold_as_much_the_one_whose_blocks_load_faster_wins():
    slow = replace(IDLE, hit_blocks=60, block_s=0.001)
    fast = replace(IDLE, worker="b", node="node-b", hit_blocks=60, block_s=0.0001)

    for candidates in ([slow, fast], [fast, slow]):
        decision = choose(1_000, candidates, first)
        assert (decision.worker, decision.load_s) == ("b", pytest.approx(0.006))


def test_what_the_engine_holds_itself_need_not_be_loaded():
    decision = best_for(1_000, replace(IDLE, hit_blocks=60, own_blocks=50, block_s=0.001))

    assert decision.load_s == pytest.approx(0.010)


def test_a_load_may_take_as_long_as_computing_its_blocks_would():
    """The blocks of one prompt may all lie on disk, on a node whose hits are fast on the whole."""
    decision = best_for(1_000, replace(IDLE, hit_blocks=60, own_blocks=10, block_s=1e-4))

    saved_s = 50 * BLOCK_TOKENS / 1_000.0
    assert decision.load_within_s == pytest.approx(saved_s)
    assert (decision.hit_blocks, decision.load_s) == (60, pytest.approx(50e-4))


def test_of_a_hit_that_is_sooner_computed_than_loaded_counts_what_comes_in_a_moment():
    decision = best_for(1_000, replace(IDLE, hit_blocks=60, own_blocks=10, block_s=0.1))

    assert (decision.hit_blocks, decision.load_s, decision.load_within_s) == (12, LOAD_S, LOAD_S)
    assert decision.total_s == LOAD_S + IDLE.prefill.seconds(1_000, 12 * BLOCK_TOKENS)


@pytest.mark.parametrize("hit", [0, 1])
def test_a_node_has_a_moment_for_what_is_hardly_worth_it(hit):
    assert best_for(1_000, replace(IDLE, hit_blocks=hit, block_s=0.001)).load_within_s == LOAD_S


def test_of_sources_that_hold_as_much_the_one_whose_blocks_are_read_faster_is_pulled_from():
    slow, fast = source(60, node="slow"), source(60, node="fast")
    slow, fast = replace(slow, block_s=0.001), replace(fast, block_s=0.0001)

    decision = best_for(1_000, replace(IDLE, sources=[slow, fast]))

    assert decision.source == fast
    assert decision.pull_s == pytest.approx(0.006 + pull_seconds(60 * IDLE.block_bytes, FAST))


def test_blocks_that_take_longer_to_read_than_to_compute_are_not_pulled():
    decision = best_for(1_000, replace(IDLE, sources=[replace(source(60), block_s=1.0)]))

    assert decision.source is None


def test_a_pull_waits_for_what_the_node_itself_must_load_first():
    candidate = replace(IDLE, hit_blocks=10, block_s=0.01, sources=[source(60)])

    decision = best_for(1_000, candidate)

    assert decision.pull_blocks == 50
    assert decision.total_s == decision.load_s + decision.pull_s + decision.prefill_s


def test_a_slow_link_is_not_used():
    decision = best_for(1_000, replace(IDLE, sources=[source(60, SLOW)]))

    assert decision.pull_blocks == 0
    assert decision.source is None


def test_a_shorter_prefix_over_a_fast_link_beats_a_longer_one_over_a_slow_link():
    near, far = source(50), source(60, SLOW, "node-far")

    decision = best_for(1_000, replace(IDLE, sources=[far, near]))

    assert decision.source == near


def test_what_the_node_has_is_not_pulled():
    decision = best_for(1_000, replace(IDLE, hit_blocks=20, sources=[source(50)]))

    assert (decision.hit_blocks, decision.pull_blocks) == (20, 30)


def test_a_node_is_no_source_for_itself():
    own = source(50, node="node-a")

    assert best_for(1_000, replace(IDLE, sources=[own])).source is None


@pytest.mark.parametrize(("tokens", "usable"), [(0, 0), (1, 0), (16, 0), (17, 1), (32, 1), (33, 2)])
def test_the_last_token_is_always_computed(tokens, usable):
    decision = best_for(tokens, replace(IDLE, hit_blocks=99))

    assert decision.hit_blocks == usable


def test_a_pull_that_the_queue_hides_costs_nothing():
    link = LinkSpeed(bytes_per_s=1e4, setup_s=0.0)  # a block takes 0.1 s to pull, 16 ms to compute
    waiting = replace(
        IDLE, queued_tokens=2_000, queued_requests=1, busy_s=2, sources=[source(60, link)]
    )

    decision = best_for(1_000, waiting)

    assert decision.pull_blocks == 20
    assert decision.pull_s <= decision.queue_s


def test_equal_workers_are_drawn_at_random():
    others = [replace(IDLE, worker=name) for name in "abcd"]
    draw = random.Random(1).randrange

    chosen = {choose(100, others, draw).worker for _ in range(100)}

    assert chosen == set("abcd")


@given(
    hit=st.integers(0, 80),
    held=st.integers(0, 80),
    tokens=st.integers(1, 1_000),
    queued=st.integers(0, 5_000),
    speed=st.floats(1e3, 1e8),
    c2=st.floats(0, 5),
    block_s=st.floats(0, 0.01),
    there_s=st.floats(0, 0.01),
)
def test_no_other_number_of_blocks_would_be_better(
    hit, held, tokens, queued, speed, c2, block_s, there_s
):
    model = dataclasses.replace(first_guess(1_000), coefficients=(0.01, 1.0, c2))
    link = LinkSpeed(bytes_per_s=speed, setup_s=0.01)
    candidate = replace(
        IDLE,
        prefill=model,
        hit_blocks=hit,
        queued_tokens=queued,
        queued_requests=int(queued > 0),
        block_s=block_s,
        sources=[replace(source(held, link), block_s=there_s)],
    )
    usable = (tokens - 1) // BLOCK_TOKENS
    hit = min(hit, usable)

    decision = best_for(tokens, candidate)

    others = [
        total_s(model, decision.queue_s, tokens, hit, pulled, link, block_s, there_s)
        for pulled in range(max(0, min(held, usable) - hit) + 1)
    ]
    # The best real number may lie between two blocks: allow the step of one block
    step = pull_seconds(IDLE.block_bytes, dataclasses.replace(link, setup_s=0.0)) + there_s
    assert decision.total_s <= min(others) + step + 1e-9


def total_s(model: PrefillModel, queue_s, tokens, hit, pulled, link, block_s, there_s):
    pull_s = pull_seconds(pulled * IDLE.block_bytes, link) + pulled * there_s
    ready_s = max(queue_s, hit * block_s + pull_s)
    return ready_s + model.seconds(tokens, (hit + pulled) * BLOCK_TOKENS)


SHARED = (source(40), source(90, SLOW, "n0"), source(30, FAST, "n1"))
STEEP = dataclasses.replace(first_guess(1_000.0), coefficients=(0.2, 0.1, 0.02))
MODELS = (first_guess(1_000.0), first_guess(50_000.0), STEEP)


@st.composite
def fleets(draw):
    """Workers of which many are alike, as in a fleet; some hold, some are busy."""
    count = draw(st.integers(1, 12))
    waits = [0.0, 0.0, 0.5, 0.5000001, 3.0]
    return [
        Candidate(
            worker=f"w{number}",
            node=f"n{number}",
            hit_blocks=draw(st.sampled_from([0, 0, 0, 30, 90])),
            own_blocks=draw(st.sampled_from([0, 0, 0, 40, 95])),
            queued_tokens=0,
            queued_requests=0,
            busy_s=draw(st.sampled_from(waits) | st.floats(0, 5)),
            block_s=draw(st.sampled_from([0.0, 0.0, 0.002])),
            prefill=draw(st.sampled_from(MODELS)),
            block_tokens=draw(st.sampled_from([16, 16, 32])),
            block_bytes=draw(st.sampled_from([1_000, 10_000_000])),
            sources=draw(st.sampled_from([(), SHARED, SHARED, (source(55, SLOW),)])),
        )
        for number in range(count)
    ]


@given(fleets(), st.integers(0, 3_000))
def test_what_need_not_be_looked_at_changes_no_decision(fleet, tokens):
    """The same choices, each as likely, as from the best of every single worker."""
    every = [best_for(tokens, candidate) for candidate in fleet]
    least = min(decision.total_s for decision in every)
    tied = [decision for decision in every if decision.total_s <= least * 1.01 + 1e-6]
    most = max(decision.own_blocks for decision in tied)
    tied = {d.worker: d for d in tied if d.own_blocks == most}

    def drawn(number):
        def draw(count):
            assert count == len(tied)
            return number

        return draw

    found = [choose(tokens, fleet, drawn(number)) for number in range(len(tied))]

    assert {decision.worker: decision for decision in found} == tied
