"""A worker that takes requests and computes nothing does not draw all of them."""

import asyncio

import pytest
from eventually import until
from upstreams import answer, for_ever

from prefixfleet.router import book as books
from prefixfleet.router.book import SILENT, SILENT_S, Book


def prefill(book, **other):
    return book.charge("w", **{"tokens": 1, "sequences": 1, "expected_s": 1.0} | other)


def test_a_worker_is_silent_when_nothing_came_for_far_longer_than_all_should_take(clock):
    book = Book(clock)
    first, second = prefill(book), prefill(book)
    clock.advance(SILENT_S + 2 * SILENT)
    assert not book.silent()
    clock.advance(1.0)
    assert book.silent() == {"w": SILENT_S + 2 * SILENT + 1}

    first.first_byte(clock())
    assert not book.silent()
    clock.advance(SILENT_S + SILENT + 1)
    prefill(book).first_byte(clock(), refused=True)
    assert book.silent().keys() == {"w"}
    book.release(second)
    assert not book.silent()


def test_of_whole_answers_nobody_knows(clock):
    book = Book(clock)
    prefill(book, streamed=False)
    clock.advance(1000.0)

    assert not book.silent()


@pytest.mark.parametrize("policy", ["ours", "least-tokens"])
async def test_others_get_what_a_hanging_engine_would(rig, monkeypatch, policy):
    """It answers its health checks; what it has is lost only when it is given up."""
    monkeypatch.setattr(books, "SILENT_S", 2.0)  # longer than an answer on a busy machine

    async def hangs(engine, request, asked):
        await for_ever()

    engines = [await rig.engine(name, prefill_tokens_per_s=1e5) for name in "ab"]
    router = await rig.start(*engines, policy=policy)
    engines[0].behave = hangs
    stuck = []
    while not engines[0].seen:
        stuck.append(asyncio.create_task(rig.post(stream=True)))
        await asyncio.sleep(0.05)
    await until(lambda: router.eligible.shunned == {"a"})
    async with rig.client.get("/status") as status:
        modes = [mode["mode"] for mode in (await status.json())["degraded"]]
    assert modes == ["silence of a"]

    before = len(engines[0].seen)
    for _ in range(10):
        async with rig.client.post("/v1/completions", json={"model": "tiny", "prompt": "x"}) as one:
            assert one.headers["x-prefixfleet-node"] == "node-b"
    assert len(engines[0].seen) == before

    for task in stuck:
        task.cancel()
    await asyncio.gather(*stuck, return_exceptions=True)
    engines[0].behave = answer
    await until(lambda: not router.eligible.shunned)
    assert not router.degraded.modes()
