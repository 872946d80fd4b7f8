"""The client of a chaos run asks as the official ones do, and says what each kind of client saw."""

import asyncio
import random

import pytest
from chaos_client import (
    HUNG,
    OK,
    REFUSED,
    RESET,
    STREAM_CUT,
    WRONG,
    Ended,
    Reply,
    Request,
    ask,
    errors,
    replied,
    reply_of,
)
from chaos_verdict import failures, judged


@pytest.fixture
def waits(monkeypatch):
    waited = []

    async def sleep(seconds):
        waited.append(seconds)

    monkeypatch.setattr("chaos_client.asyncio.sleep", sleep)
    return waited


async def asked(*replies, first=0, routers=2):
    """The request that got ``replies``, and the routers that it went to."""
    left = list(replies)

    async def send(router):
        return left.pop(0)

    request = await ask(send, routers, first, lambda: 0.0, random.Random(1))
    assert left == []
    return request


async def test_an_answer_is_asked_for_once(waits):
    request = await asked(Reply(OK), first=1)

    assert [(s.router, s.how) for s in request.sent] == [(1, OK)]
    assert waits == []


async def test_a_router_that_refuses_is_passed_over_without_waiting(waits):
    request = await asked(Reply(REFUSED, again=True), Reply(OK), first=1)

    assert [s.router for s in request.sent] == [1, 0]
    assert (request.plain, request.balanced, request.official) == (REFUSED, OK, OK)
    assert waits == []


async def test_what_got_no_answer_is_asked_again_twice(waits):
    request = await asked(*[Reply(RESET, again=True)] * 3)

    assert request.official == RESET
    assert len(request.sent) == 3
    assert 0.375 <= waits[0] <= 0.5
    assert 0.75 <= waits[1] <= 1.0


async def test_retry_after_is_heeded(waits):
    await asked(Reply("503 no_worker", again=True, after_s=5.0), Reply(OK))

    assert waits == [5.0]


@pytest.mark.parametrize("how", [WRONG, HUNG, STREAM_CUT, "404 model_not_found"])
async def test_what_no_retry_mends_is_the_end(how, waits):
    assert (await asked(Reply(how))).official == how


@pytest.mark.parametrize(
    ("status", "again"),
    [(400, False), (404, False), (408, True), (409, True), (429, True), (500, True), (503, True)],
)
def test_which_answers_are_asked_for_again(status, again):
    assert reply_of(status, {"Retry-After": "2"}, "x") == Reply("x", again, 2.0)
    assert reply_of(status, {"Retry-After": "61"}, "x").after_s == 0.0


async def test_what_never_ends_hangs():
    async def never():
        await asyncio.Event().wait()

    assert await replied(never(), 0.01) == Reply(HUNG)


def request(*hows):
    return Request(tuple(Ended(0.0, 1.0, 0, how) for how in hows))


def test_what_each_kind_of_client_saw():
    seen = judged([request(REFUSED, OK), request(RESET, OK), request(STREAM_CUT), request(OK)])

    assert seen["errors_plain"] == {REFUSED: 1, RESET: 1}
    assert seen["errors_behind_a_balancer"] == {RESET: 1}
    assert seen["errors_official"] == {}
    assert seen["streams_broken"] == {STREAM_CUT: 1}
    assert errors([OK, OK]) == {}


def good_report(**changes):
    empty = dict.fromkeys(
        ("wrong", "hung", "unclear", "errors_official", "errors_without_a_fault", "leaked",
         "left_behind", "exit_codes", "tracebacks_in")
    )  # fmt: skip
    return {
        **empty,
        "hit_rate_returned": True,
        "books": {"balanced": True},
        "outages": [],
    } | changes


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"wrong": 1}, ["wrong"]),
        ({"errors_official": {RESET: 1}}, ["errors_official"]),
        ({"leaked": ["n0: 1 descriptors before, 99 at rest"]}, ["leaked"]),
        (
            {"hit_rate_returned": False, "books": {"balanced": False}},
            ["hit_rate_returned", "books"],
        ),
    ],
)
def test_what_fails_a_run(changes, expected):
    assert failures(good_report(**changes)) == expected


def test_an_outage_may_cost_errors_but_nothing_may_hang_or_stay_away():
    outage = {"outage": "kill routers", "wrong": 0, "hung": 0, "unclear": 0, "recovered": True}
    assert failures(good_report(outages=[outage | {"errors_official": {REFUSED: 9}}])) == []

    bad = outage | {"hung": 1, "recovered": False}
    assert failures(good_report(outages=[bad])) == ["kill routers: hung", "kill routers: recovered"]
