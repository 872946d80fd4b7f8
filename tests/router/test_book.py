"""Whatever way a request ends, its load is gone."""

import asyncio

import pytest

from prefixfleet.router.book import Book
from prefixfleet.router.charge import NEVER, Load


@pytest.fixture
def book(clock):
    clock.now_s = 5.0
    return Book(clock)


def test_a_request_is_charged_before_it_answers(book):
    with book.charged("w", tokens=100, sequences=1, expected_s=0.1):
        assert book.load("w") == Load(queued_tokens=100, queued_requests=1, busy_s=0.1)


def test_after_the_first_byte_only_its_sequences_count(book):
    with book.charged("w", tokens=100, sequences=3, expected_s=0.1) as charge:
        charge.first_byte(6.0)
        charge.first_byte(7.0)

        assert book.load("w") == Load(decoding=3)
        assert charge.first_byte_s == 6.0


@pytest.mark.parametrize("answered", [True, False])
@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError, GeneratorExit])
def test_every_way_out_releases(book, error, answered):
    def serve():
        with book.charged("w", tokens=9, sequences=1, expected_s=0.009) as charge:
            if answered:
                charge.first_byte(6.0)
            raise error

    with pytest.raises(error):
        serve()

    assert book.load("w") == Load()
    assert book.workers() == []


def test_equal_requests_are_released_one_by_one(book):
    with book.charged("w", tokens=9, sequences=1, expected_s=0.009):
        with book.charged("w", tokens=9, sequences=1, expected_s=0.009):
            assert book.load("w").queued_tokens == 18

        assert book.load("w") == Load(queued_tokens=9, queued_requests=1, busy_s=0.009)


def prefill(book, **other):
    return book.charged("w", **{"tokens": 1, "sequences": 1, "expected_s": 0.001} | other)


def test_a_prefill_that_waited_for_another_took_the_time_from_then_on(book, clock):
    with prefill(book) as first, prefill(book) as second:
        for charge in (first, second):
            clock.advance(2.0)
            charge.first_byte(clock())

    assert (first.prefill_s, second.prefill_s) == (2.0, 2.0)
    assert not first.alone
    assert not second.alone
    with prefill(book) as third:
        assert third.alone


def test_what_a_prefill_took_is_not_known_beside_answers_that_come_whole(book, clock):
    with prefill(book, streamed=False), prefill(book) as beside:
        beside.first_byte(clock())
    with prefill(book, expected_s=1.0) as before:
        with prefill(book, streamed=False) as whole:
            clock.advance(1.0)
            whole.first_byte(clock())
        before.first_byte(clock())
    with prefill(book) as after:
        after.first_byte(clock())

    assert (beside.prefill_s, before.prefill_s, after.prefill_s) == (None, None, 0.0)


def test_what_a_prefill_took_is_not_known_when_another_was_abandoned_meanwhile(book, clock):
    with prefill(book, expected_s=1.0) as charge:
        with prefill(book):
            clock.advance(1.0)
        charge.first_byte(clock())

    assert charge.prefill_s is None


def test_where_it_is_not_known_it_took_as_much_as_the_estimates_fall_short_of_the_wait(book, clock):
    """Else a worker that is far slower than it says is filled, and never learned, while some
    answers come whole and some clients leave."""
    with (
        prefill(book, expected_s=1.0, streamed=False),
        prefill(book, expected_s=2.0),
        prefill(book, expected_s=1.0) as charge,
        prefill(book, expected_s=9.0),
    ):
        book.hear({"w": Load(queued_tokens=4, queued_requests=1)})
        clock.advance(80.0)
        charge.first_byte(clock())

    assert charge.prefill_s == 10.0


def test_of_the_time_that_other_routers_prefills_share_a_part_counts(book, clock):
    with prefill(book, tokens=100) as charge:
        book.hear({"w": Load(queued_tokens=300, queued_requests=1)})
        clock.advance(4.0)
        charge.first_byte(clock())

    assert charge.prefill_s == 1.0


def test_a_prefill_that_ends_without_a_first_byte_starts_the_next_ones_time(book, clock):
    """A refused or abandoned request must not make its worker look free while others wait."""
    first = book.charged("w", tokens=9, sequences=1, expected_s=10.0)
    with book.charged("w", tokens=9, sequences=1, expected_s=10.0):
        with first:
            clock.advance(10.0)

        assert book.load("w").busy_s == 10.0


def test_who_waits_for_a_busy_worker_makes_it_busier_until_all_are_judged(book):
    with book.charged("w", tokens=9, sequences=1, expected_s=2.0):
        with book.promising() as promise:
            promise("w", 3.0)
            promise("w", 0.5)
            promise("idle", 3.0)

            assert book.load("w").busy_s == 5.5
            assert book.free_at_s("w") == 10.5
            assert book.load("idle") == Load()
            assert book.free_at_s("idle") == NEVER
        assert book.load("w").busy_s == 2.0
        assert book.free_at_s("w") == 7.0


def test_what_a_worker_refuses_takes_no_time_of_the_others(book, clock):
    """A client can send a hundred of those while one prompt is computed."""
    long = book.charge("a", tokens=10, sequences=1, expected_s=10.0)
    clock.advance(1.0)
    for _ in range(3):
        with book.charged("a", tokens=10, sequences=1, expected_s=1.0) as refused:
            clock.advance(1.0)
            refused.first_byte(clock(), refused=True)
        assert refused.prefill_s is None
    assert book.load("a").busy_s == pytest.approx(6.0)
    assert book.decode_s == 0.0
    long.first_byte(clock())

    assert long.prefill_s == 4.0


def test_whoever_came_behind_a_refused_one_began_when_he_came(book, clock):
    refused = book.charge("a", tokens=10, sequences=1, expected_s=1.0)
    clock.advance(2.0)
    behind = book.charge("a", tokens=10, sequences=1, expected_s=3.0)
    refused.first_byte(clock(), refused=True)

    assert book.load("a").busy_s == 3.0
    clock.advance(3.0)
    behind.first_byte(clock())
    assert behind.prefill_s == 3.0


def test_what_comes_whole_tells_of_no_decode(book, clock):
    with book.charged("a", tokens=10, sequences=1, expected_s=1.0, streamed=False) as whole:
        whole.first_byte(clock())

    with book.charged("a", tokens=10, sequences=1, expected_s=1.0) as streamed:
        streamed.first_byte(clock())
        clock.advance(4.0)

    assert book.decode_s == 4.0


def test_a_streams_first_byte_ends_the_prefills_of_whole_answers_before_it(book, clock):
    whole = book.charge("w", tokens=10, sequences=2, expected_s=4.0, streamed=False)
    clock.advance(1.0)
    stream = book.charge("w", tokens=10, sequences=1, expected_s=1.0)
    clock.advance(1.0)
    behind = book.charge("w", tokens=10, sequences=1, expected_s=3.0)
    later = book.charge("w", tokens=10, sequences=1, expected_s=2.0, streamed=False)
    clock.advance(1.0)
    stream.first_byte(clock())

    assert book.load("w") == Load(20, 2, decoding=3, busy_s=5.0)
    assert (whole.prefill_s, stream.prefill_s) == (None, None)
    book.release(later)
    clock.advance(2.0)
    whole.first_byte(clock())  # all of it, long after its prefill
    assert book.load("w").busy_s == 1.0  # the one behind began when the later one was given up
    for charge in (whole, stream):
        book.release(charge)
    assert book.decode_s == 2.0  # of the stream alone
    book.release(behind)
    assert book.load("w") == Load()
    assert book.workers() == []


def test_what_a_prefill_took_is_known_again_behind_whole_answers_that_only_decode(book, clock):
    whole = book.charge("w", tokens=10, sequences=1, expected_s=9.0, streamed=False)
    clock.advance(1.0)
    stream = book.charge("w", tokens=10, sequences=1, expected_s=1.0)
    clock.advance(1.0)
    behind = book.charge("w", tokens=10, sequences=1, expected_s=1.0)
    stream.first_byte(clock())
    clock.advance(3.0)
    behind.first_byte(clock())

    assert (whole.prefill_s, stream.prefill_s, behind.prefill_s) == (None, None, 3.0)


@pytest.mark.parametrize("first", ["refused", "whole"])
def test_no_other_first_byte_says_that_a_whole_answer_is_prefilled(book, clock, first):
    book.charge("w", tokens=10, sequences=1, expected_s=9.0, streamed=False)
    clock.advance(1.0)
    other = book.charge("w", tokens=10, sequences=1, expected_s=1.0, streamed=first == "refused")
    other.first_byte(clock(), refused=first == "refused")

    assert book.load("w").queued_requests == 1
