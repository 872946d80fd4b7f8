"""Estimates learn from what was observed."""

import random

import pytest

from prefixfleet.router.estimate import LinkSpeed, first_guess, observe, pull_seconds

TRUE = (0.02, 0.8, 0.05)  # s, s per 1,000 tokens, s per million


def true_seconds(tokens, cached):
    n, p = tokens / 1_000, cached / 1_000
    return TRUE[0] + TRUE[1] * (n - p) + TRUE[2] * (n * n - p * p)


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


def test_nothing_is_pulled_in_no_time():
    assert pull_seconds(0, LinkSpeed(1.0, 9.0)) == 0.0
    assert pull_seconds(10, LinkSpeed(5.0, 1.0)) == 3.0
