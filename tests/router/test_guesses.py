"""A worker that nobody has learned yet is taken for its like, neither for better nor for worse."""

import random
from collections import Counter
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
from indexes import chain_of
from upstreams import NAMESPACE
from worker_records import worker_record

from prefixfleet.router.book import Book
from prefixfleet.router.dispatch import Dispatcher
from prefixfleet.router.guesses import AT_ONCE
from prefixfleet.router.prompt import Prompt
from prefixfleet.router.speeds import Speeds
from prefixfleet.router.view import View
from prefixfleet.router.worker import Worker
from prefixfleet.store.index import IndexEvent, Membership

KIND = b"n" * 16
BLOCKS = 40
CHAINS = {KIND: chain_of("prompt", BLOCKS)}
PROMPT = Prompt(tokens=BLOCKS * NAMESPACE.block_tokens + 5)
STEP_S, TOKEN_S = 0.05, 0.001  # what a prefill takes of the engines here


def worker(number, speed=1_000.0, namespace=NAMESPACE, block_bytes=1_000):
    record = worker_record(
        number,
        namespace=asdict(namespace),
        block_bytes=block_bytes,
        prefill_tokens_per_s=speed,
    )
    return Worker(record, SimpleNamespace(), KIND, NAMESPACE.block_tokens)


class Fleet:
    """A dispatcher over ``workers``, which compute as fast as the test says."""

    def __init__(self, clock, workers):
        self.clock, self.workers, self.rng = clock, workers, random.Random(1)
        self.view, self.book = View(clock), Book(clock)
        self.dispatcher = Dispatcher(
            self.view, self.book, dict, b"k" * 32, clock, draw=self.rng.randrange
        )
        self.speeds = self.dispatcher.speeds

    def holds(self, number, blocks):
        member = Membership(f"n{number}", 1, number)
        self.view.apply(IndexEvent("join", member))
        self.view.apply(IndexEvent("publish", member, tuple(CHAINS[KIND][:blocks])))

    def computes(self, number, times=1, tokens=PROMPT.tokens, step_s=STEP_S, token_s=TOKEN_S):
        """So many prompts, alone, and the router sees how long they took."""
        served = self.workers[number]
        for _ in range(times):
            charge = self.book.charge(served.name, tokens=tokens, sequences=1, expected_s=0.0)
            self.clock.advance(step_s + token_s * tokens)
            charge.first_byte(self.clock())
            self.speeds.learn(served.record, charge, tokens, 0, 0.0)
            self.book.release(charge)

    def learns(self, number, **engine):
        for tokens in (40, 300, 900) * 20:
            self.computes(number, tokens=tokens, **engine)

    def chosen(self):
        return self.dispatcher.decide(PROMPT, CHAINS, self.workers).worker

    def seconds(self, number, tokens=1_000, cached=0):
        return self.speeds.of(self.workers[number].record).seconds(tokens, cached)


def fleet_of(clock, *speeds, **options):
    workers = [worker(number, speed, **options) for number, speed in enumerate(speeds)]
    return Fleet(clock, workers)


@pytest.mark.parametrize("others", [1, 7])  # compared one by one, and in their standing order
def test_the_holder_of_a_short_prefix_wins_over_who_was_never_learned(clock, others):
    """The others are guessed by their own figures, which know of no step's overhead."""
    fleet = fleet_of(clock, *[1_000.0] * (1 + others), block_bytes=10_000_000)  # dear to pull
    fleet.chosen()  # they stand in their order from before
    fleet.holds(0, blocks=2)
    fleet.learns(0)

    assert {fleet.chosen() for _ in range(20)} == {"w0"}


@pytest.mark.parametrize("samples", range(1, 6))
@pytest.mark.parametrize("noise", [0.6, 1.0, 1.6])
def test_who_was_never_learned_pulls_nothing_that_the_holder_has(clock, samples, noise):
    """Equal prompts, one after the other: the second engine's own figure was noisy too."""
    fleet = fleet_of(clock, 1_000.0, noise * 1_000.0)
    fleet.computes(0)
    fleet.holds(0, blocks=BLOCKS)
    for _ in range(samples):
        fleet.computes(0, tokens=5)

        assert {fleet.chosen() for _ in range(20)} == {"w0"}


def test_guesses_of_another_kind_and_of_nobody_are_the_workers_own_figures(clock):
    other = worker(2, namespace=replace(NAMESPACE, tensor_parallel=2))
    fleet = Fleet(clock, [worker(0), worker(1), other])
    assert fleet.seconds(1) == pytest.approx(1.0)

    fleet.learns(0, step_s=0.5)

    assert fleet.seconds(1) == fleet.seconds(0) == pytest.approx(1.5, rel=0.05)
    assert fleet.seconds(2) == pytest.approx(1.0)


def test_other_weights_are_as_fast(clock):
    """An update that changes nothing else starts with what was learned before it."""
    updated = worker(1, namespace=replace(NAMESPACE, weights="next"))
    fleet = Fleet(clock, [worker(0), updated])

    fleet.learns(0)

    assert fleet.seconds(1) == fleet.seconds(0)


def test_a_newcomer_is_guessed_by_hardware_that_measured_itself_as_fast(clock):
    """Five slow workers and one fast one are there; one of each comes."""
    fleet = fleet_of(clock, *[100.0] * 5, 1_000.0, 110.0, 900.0)
    for number in range(5):
        fleet.learns(number, token_s=0.01)
    fleet.learns(5)

    assert fleet.seconds(6) == pytest.approx(fleet.seconds(0), rel=0.01)
    assert fleet.seconds(7) == fleet.seconds(5)


def test_one_odd_worker_decides_nothing(clock):
    fleet = fleet_of(clock, *[1_000.0] * 4)
    fleet.learns(0)
    fleet.learns(1, step_s=5.0, token_s=0.02)
    fleet.learns(2)

    assert fleet.seconds(3) == pytest.approx(fleet.seconds(0), rel=0.02)


@pytest.mark.parametrize("told", [50_000.0, 20.0])
def test_who_lied_of_its_speed_makes_no_newcomer_fast_or_slow(clock, told):
    """Only the form of its law is taken: which part of a prompt's time is a step's overhead."""
    fleet = fleet_of(clock, told, 1_000.0)
    fleet.learns(0)

    assert fleet.seconds(1) == pytest.approx(1.0)
    assert fleet.seconds(1, 1_000, 1_000) == pytest.approx(STEP_S / (STEP_S + 1.0), rel=0.3)


def test_a_newcomer_gets_its_part_of_the_requests(clock):
    """It is guessed like the others: neither does nobody ask it, nor does everybody."""
    fleet = fleet_of(clock, *[1_000.0] * 5)
    for number in range(4):
        fleet.learns(number)

    chosen = Counter(fleet.chosen() for _ in range(1_000))

    assert chosen.keys() == {f"w{number}" for number in range(5)}
    assert 100 < chosen["w4"] < 400


def test_a_newcomers_own_samples_count_more_than_any_guess(clock):
    fleet = fleet_of(clock, 1_000.0, 1_000.0)
    fleet.learns(0)
    fleet.computes(1, times=3, token_s=0.003)

    assert fleet.seconds(1, PROMPT.tokens) == pytest.approx(STEP_S + 0.003 * PROMPT.tokens, rel=0.1)
    assert fleet.seconds(0) == pytest.approx(STEP_S + 1.0, rel=0.1)


def test_one_observation_changes_few_guesses_and_in_the_end_all(clock):
    changed = []
    speeds, workers = Speeds(None, changed.append), [worker(number) for number in range(100)]
    for one in workers:
        speeds.of(one.record)
    guess = speeds.of(workers[1].record)
    for times in range(1, 11):
        served = SimpleNamespace(alone=True, prefill_s=2.0)
        speeds.learn(workers[0].record, served, 1_000, 0, 0.0)
        assert len(changed) <= times * (1 + AT_ONCE)

    assert {one.name for one in workers} == set(changed)
    assert speeds.of(workers[99].record).seconds(1_000, 0) > 1.5 * guess.seconds(1_000, 0)


def test_who_is_gone_is_no_example_any_more(clock):
    fleet = fleet_of(clock, 1_000.0, 1_000.0, 1_000.0)
    own_s = fleet.seconds(1)
    fleet.learns(0)
    guessed_s = fleet.seconds(1)
    for number in (0, 1):
        fleet.speeds.forget(f"w{number}")
    fleet.speeds.forget("nobody")

    assert fleet.seconds(1) == own_s != guessed_s


@pytest.mark.parametrize("namespace", [{}, {"weights": ["a"], "model": {"of": "no use"}}])
def test_a_worker_that_nobody_could_examine_is_guessed_too(clock, namespace):
    """`status` shows it, whatever its record says."""
    fleet = fleet_of(clock, 1_000.0)
    broken = replace(worker(7).record, namespace=namespace)

    assert fleet.speeds.of(broken).seconds(1_000, 0) == pytest.approx(1.0)
    assert fleet.speeds.of(replace(broken, prefill_tokens_per_s=0.0)).seconds(1, 0) > 0


def test_a_worker_that_comes_back_with_other_settings_is_of_another_kind(clock):
    """Learned or not: its name alone says nothing of its like."""
    fleet = fleet_of(clock, 1_000.0, 1_000.0, 1_000.0)
    fleet.learns(0)
    fleet.seconds(1)
    alone = replace(NAMESPACE, tensor_parallel=4)
    fleet.workers[1] = worker(1, namespace=alone)
    assert fleet.seconds(1) == pytest.approx(1.0)

    fleet.workers[0] = worker(0, namespace=alone)
    fleet.computes(0)

    assert fleet.seconds(1) == fleet.seconds(0)
    assert fleet.seconds(2) != fleet.seconds(0)
