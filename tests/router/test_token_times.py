"""Time between tokens: learned, predicted for the end of a prefill, and refused above its limit."""

import random

import pytest
from upstreams import EVENTS, streaming

from prefixfleet.router.book import Book
from prefixfleet.router.token_times import Line, TokenTimes


def test_nothing_is_expected_before_the_first_stream():
    assert TokenTimes().seconds("a", 100) == 0.0


def test_a_line_is_found_through_what_was_observed():
    line = Line()
    for sequences in (1, 5, 10, 20, 3, 8):
        line.observe(sequences, 0.01 + 0.002 * sequences)

    assert line.seconds(40) == pytest.approx(0.09)
    assert line.seconds(1) == pytest.approx(0.012)


def test_streams_of_one_number_give_their_mean_for_any():
    line = Line()
    for _ in range(5):
        line.observe(4, 0.05)

    assert line.seconds(400) == pytest.approx(0.05)


def test_more_sequences_are_never_expected_to_be_faster():
    line = Line()
    for sequences, seconds in ((1, 0.5), (10, 0.1)):
        line.observe(sequences, seconds)

    assert line.seconds(100) >= line.seconds(1) >= 0.0


@pytest.mark.parametrize("most", [2, 64, 10_000])
def test_noise_of_streams_that_were_nearly_alike_is_no_steep_line(most):
    rng, line = random.Random(1), Line()
    for _ in range(500):
        line.observe(rng.choice((most - 1, most)), rng.uniform(0.01, 0.03))
        for sequences in (1, most // 2, 2 * most, 10 * most):
            times = max(1.0, sequences / (most - 1))
            assert 0.0 <= line.seconds(sequences) <= 0.031 * times


def test_a_worker_that_changes_is_followed():
    line = Line()
    for _ in range(100):
        line.observe(4, 0.01)
    for _ in range(100):
        line.observe(4, 0.1)

    assert line.seconds(4) == pytest.approx(0.1, rel=0.05)


def test_sequences_at_the_end_of_a_prefill_are_those_that_will_not_have_ended(clock):
    """Who decodes now and ends before is not counted; who is prefilled before is."""
    book = Book(clock)
    with book.charged("w", tokens=1, sequences=1, expected_s=0.1) as quick:
        quick.first_byte(clock())
        clock.advance(4.0)
    assert book.decode_s == 4.0
    with (
        book.charged("w", tokens=1, sequences=2, expected_s=0.1) as old,
        book.charged("w", tokens=1, sequences=3, expected_s=0.1) as young,
        book.charged("w", tokens=1, sequences=5, expected_s=0.1),
    ):
        old.first_byte(clock())
        clock.advance(2.0)
        young.first_byte(clock())

        assert book.sequences_at("w", clock() + 1.0) == 2 + 3 + 5
        assert book.sequences_at("w", clock() + 3.0) == 3 + 5
        assert book.sequences_at("other", clock()) == 0


async def test_streams_teach_and_too_slow_ones_are_refused_before_they_start(rig):
    engine = await rig.engine(behave=streaming(*EVENTS[:1] * 20, EVENTS[-1]))
    router = await rig.start(engine, tbt_slo_s=3_600.0)
    body = {"model": "tiny", "prompt": "x", "stream": True}

    async with rig.client.post("/v1/completions", json=body) as response:
        await response.read()
    learned = router.token_times.seconds("a", 1)
    router.token_times.observe("a", 1, 1e9)
    status, headers, answer = await rig.post()

    assert 0 < learned < 3_600
    assert (status, answer["error"]["code"]) == (429, "overloaded")
    assert int(headers["Retry-After"]) >= 1
    assert len(engine.seen) == 1
