"""Estimates learn from what was observed."""

import random

import pytest

from prefixfleet.router.estimate import (
    LinkSpeed,
    Prefills,
    first_guess,
    pull_seconds,
)
from prefixfleet.router.estimate import observe as observe_all

TRUE = (0.02, 0.8, 0.05)  # s, s per 1,000 tokens, s per million


def true_seconds(tokens, cached):
    n, p = tokens / 1_000, cached / 1_000
    return TRUE[0] + TRUE[1] * (n - p) + TRUE[2] * (n * n - p * p)


def observe(model, tokens, cached, seconds):
    one = Prefills()
    one.add(tokens, cached, seconds)
    return observe_all(model, one)


def test_the_first_guess_is_the_workers_own_figure():
    assert first_guess(2_000.0).seconds(1_000, 500) == pytest.approx(0.25)


def test_a_worker_that_measured_nothing_is_no_division_by_zero():
    assert first_guess(0.0).seconds(10, 0) == pytest.approx(10.0)


@pytest.mark.parametrize("tokens_per_s", [300.0, 1_000.0, 5_000.0])
def test_estimates_come_close_after_fifty_noisy_prefills(tokens_per_s):
    rng = random.Random(3)
    model = first_guess(tokens_per_s)

    for _ in range(50):
        tokens = rng.randrange(100, 8_000)
        cached = rng.randrange(0, tokens)
        seconds = true_seconds(tokens, cached) * rng.uniform(0.9, 1.1)
        model = observe(model, tokens, cached, seconds)

    for tokens, cached in [(500, 0), (4_000, 0), (4_000, 3_500), (7_500, 100)]:
        assert model.seconds(tokens, cached) == pytest.approx(true_seconds(tokens, cached), rel=0.2)


def test_a_worker_that_slows_down_is_followed():
    rng = random.Random(4)
    model = first_guess(1_000.0)
    for factor in (1.0, 3.0):
        for _ in range(100):
            tokens = rng.randrange(100, 4_000)
            model = observe(model, tokens, 0, factor * true_seconds(tokens, 0))

    assert model.seconds(2_000, 0) == pytest.approx(3 * true_seconds(2_000, 0), rel=0.15)


def test_estimates_stay_positive_whatever_is_observed():
    rng = random.Random(5)
    model = first_guess(1_000.0)

    for _ in range(500):
        model = observe(model, rng.randrange(1, 9_000), 0, rng.choice([0.0, 1e-6, 50.0]))

        assert all(c >= 0 for c in model.coefficients)
        assert model.seconds(5_000, 0) > 0


def test_equal_prompts_only_do_not_blow_up_the_model():
    model = first_guess(1_000.0)

    for _ in range(5_000):
        model = observe(model, 1_000, 0, 2.0)

    assert model.seconds(1_000, 0) == pytest.approx(2.0, rel=0.05)
    assert 0 < model.seconds(2_000, 0) < 20


@pytest.mark.parametrize("tokens_per_s", [3e3, 1e6])
@pytest.mark.parametrize("most_s", [0.03, 0.3, 30.0])
def test_prompts_that_are_nearly_alike_never_drive_the_estimate_out_of_what_was_seen(
    tokens_per_s, most_s
):
    """Their noise lies in directions that they tell nothing of."""
    for seed in range(5):
        rng = random.Random(seed)
        model = first_guess(tokens_per_s)
        for number in range(1_000):
            tokens = rng.choice((745, 746, 761))
            cached = 720 - rng.choice((0, 0, 16))
            model = observe(model, tokens, cached, rng.uniform(most_s / 20, most_s))
            assert number < 50 or most_s / 20 < model.seconds(tokens, cached) < 2 * most_s

        assert model.seconds(761, 0) < 30 * most_s + 761 / tokens_per_s


def test_one_hiccup_is_no_speed():
    model = first_guess(1e6)
    for _ in range(30):
        model = observe(model, 500, 0, 0.1)
    after = observe(model, 500, 0, 300.0)

    assert after.seconds(500, 0) < 0.2
    for _ in range(30):
        after = observe(after, 500, 0, 0.1)
    assert after.seconds(500, 0) == pytest.approx(0.1, rel=0.1)


def test_an_estimate_that_is_far_too_high_comes_down_in_a_few_prefills():
    model = first_guess(50.0)  # 10 s for 500 tokens
    for _ in range(20):
        model = observe(model, 500, 0, 0.1)

    assert model.seconds(500, 0) < 0.2


def test_prefills_in_a_row_tell_as_much_together_as_one_by_one():
    """Whoever of a batch answered first: only their sum is known."""
    rng = random.Random(6)
    model = first_guess(1_000.0)
    for _ in range(100):
        row, seconds = Prefills(), 0.0
        for _ in range(rng.randrange(1, 8)):
            tokens = rng.randrange(100, 8_000)
            cached = rng.randrange(0, tokens)
            seconds += true_seconds(tokens, cached)
            row.add(tokens, cached, 0.0)
        row.seconds = seconds
        model = observe_all(model, row)

    for tokens, cached in [(500, 0), (4_000, 0), (4_000, 3_500), (7_500, 100)]:
        assert model.seconds(tokens, cached) == pytest.approx(true_seconds(tokens, cached), rel=0.1)


def test_nothing_is_pulled_in_no_time():
    assert pull_seconds(0, LinkSpeed(1.0, 9.0)) == 0.0
    assert pull_seconds(10, LinkSpeed(5.0, 1.0)) == 3.0
