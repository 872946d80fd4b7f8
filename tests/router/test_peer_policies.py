"""Other systems' rules, each as published: the cases in which they differ."""

import random

import msgspec
import pytest

from prefixfleet.router.decision import Candidate, Source
from prefixfleet.router.estimate import LinkSpeed, first_guess
from prefixfleet.router.peer_policies import PEERS, STICKY_PENALTY_S, RoundRobin
from prefixfleet.router.policy import choose

FAST, SLOW = LinkSpeed(1e12, 0.0), LinkSpeed(1e3, 0.0)
TOKENS_PER_S = 1000.0


def candidate(name, *, hit=0, queued=0, sources=()):
    return Candidate(
        worker=name,
        node=name,
        hit_blocks=hit,
        queued_tokens=queued,
        queued_requests=1 if queued else 0,
        busy_s=queued / TOKENS_PER_S,
        prefill=first_guess(TOKENS_PER_S),
        block_tokens=10,
        block_bytes=1000,
        sources=sources,
    )


def source(node, blocks, link=FAST):
    return Source(node=node, epoch=1, blocks=blocks, link=link)


def decide(name, candidates, tokens=101):
    return PEERS[name]()(tokens, candidates, random.Random(0).randrange)


def test_round_robin_takes_each_worker_in_turn_whatever_the_order():
    policy = RoundRobin()
    a, b = candidate("a"), candidate("b")

    taken = [policy(101, pair, lambda n: 0).worker for pair in ((a, b), (b, a), (a, b))]

    assert taken == ["a", "b", "a"]


def test_least_tokens_ignores_what_is_cached():
    assert decide("least-tokens", [candidate("a", hit=10, queued=1), candidate("b")]).worker == "b"


def test_local_aware_weighs_queue_against_its_own_cache():
    cached = candidate("a", hit=10, queued=50)

    assert decide("local-aware", [cached, candidate("b")]).worker == "a"
    assert decide("local-aware", [candidate("a", hit=10, queued=500), candidate("b")]).worker == "b"


def test_algorithm_1_pulls_even_over_a_link_that_is_slower_than_computing():
    """The fixed ratio does not know the link: ours does."""
    target = candidate("b", sources=[source("a", 10, SLOW)])

    assert decide("algorithm-1", [target]).pull_blocks == 10
    assert choose(101, [target], lambda n: 0).pull_blocks == 0


def test_algorithm_1_does_not_pull_below_its_ratio():
    target = candidate("b", hit=9, sources=[source("a", 10)])

    assert decide("algorithm-1", [target]).pull_blocks == 0


def test_dynamo_counts_blocks_and_never_pulls():
    cached = candidate("a", hit=5, queued=40, sources=[source("c", 10)])

    decision = decide("dynamo", [cached, candidate("b")])

    assert (decision.worker, decision.pull_blocks) == ("a", 0)


def test_sticky_stays_with_the_cache_until_the_penalty_is_exceeded():
    tokens = int(STICKY_PENALTY_S * TOKENS_PER_S)
    holder = candidate("a", hit=9, queued=tokens)

    assert decide("sticky", [holder, candidate("b")]).worker == "a"
    holder = candidate("a", hit=9, queued=tokens + 100)
    assert decide("sticky", [holder, candidate("b")]).worker == "b"


@pytest.mark.parametrize("name", sorted(PEERS))
def test_every_policy_takes_one_of_the_candidates_for_any_prompt(name):
    candidates = [candidate("a", hit=3), candidate("b", queued=7, sources=[source("a", 3)])]

    for tokens in (0, 1, 9, 10, 11, 10_000):
        decision = decide(name, candidates, tokens)
        assert decision.worker in ("a", "b")
        assert (decision.hit_blocks + decision.pull_blocks) * 10 < max(1, tokens)


def test_round_robin_takes_turns_among_the_workers_of_each_model():
    """One count for all would send every other request, of one model, to the same worker."""
    policy, one, other = RoundRobin(), "ab", "cd"

    taken = [
        policy(101, [candidate(name) for name in names], lambda n: 0).worker
        for names in (one, other) * 2
    ]

    assert taken == ["a", "c", "b", "d"]


def test_round_robin_forgets_workers_of_long_ago(monkeypatch):
    monkeypatch.setattr("prefixfleet.router.peer_policies.MAX_REMEMBERED", 2)
    policy = RoundRobin()

    taken = [policy(101, [candidate(name)], lambda n: 0).worker for name in "abc"]

    assert taken == ["a", "b", "c"]
    assert list(policy._named) == ["b", "c"]


@pytest.mark.parametrize("name", sorted(PEERS))
def test_what_only_the_engine_has_counts_as_found(name):
    engine = msgspec.structs.replace(candidate("a"), own_blocks=10)

    decision = decide(name, [engine])

    assert (decision.hit_blocks, decision.own_blocks, decision.load_s) == (10, 10, 0.0)


@pytest.mark.parametrize("name", sorted(PEERS))
def test_a_load_may_not_take_longer_than_computing(name):
    """Their rules say nothing of disks: the node gets the time that it gets by ours."""
    holder = msgspec.structs.replace(candidate("a", hit=10), block_s=60.0)

    assert decide(name, [holder]).load_within_s == pytest.approx(0.25)
    long = msgspec.structs.replace(candidate("a", hit=1_000), block_s=60.0)
    assert decide(name, [long], tokens=10_001).load_within_s == pytest.approx(10.0)
