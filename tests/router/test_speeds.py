"""Workers' speeds are learned from whatever tells of them, under load too."""

import asyncio
from types import SimpleNamespace

import pytest
from aiohttp import web
from eventually import until
from upstreams import answer

from prefixfleet.router.book import Book
from prefixfleet.router.speeds import ROW, Speeds

WORKER = SimpleNamespace(worker="w", namespace={}, prefill_tokens_per_s=10.0)  # 100 times too slow
TOKENS = 100
TAKES_S = 0.1


@pytest.fixture
def book(clock):
    return Book(clock)


@pytest.fixture
def changed():
    return []


@pytest.fixture
def speeds(changed):
    return Speeds(None, changed.append)


def charge(book):
    return book.charge("w", tokens=TOKENS, sequences=1, expected_s=1.0, streamed=True)


def ends(book, speeds, charge, moving_s=0.0):
    charge.first_byte(book._clock())
    speeds.learn(WORKER, charge, TOKENS, 0, moving_s)
    book.release(charge)


def test_a_worker_that_is_never_idle_is_learned_all_the_same(book, speeds, clock):
    """Else an estimate that is too high would hold requests back for ever: nobody is alone then."""
    queue = [charge(book) for _ in range(4)]
    for _ in range(50):
        clock.advance(TAKES_S)
        ends(book, speeds, queue.pop(0))
        queue.append(charge(book))

    assert speeds.of(WORKER).seconds(TOKENS, 0) == pytest.approx(TAKES_S, rel=0.2)


def test_a_batch_that_answers_in_one_moment_shares_its_time(book, speeds, clock):
    for _ in range(100):
        batch = [charge(book) for _ in range(4)]
        clock.advance(TAKES_S)
        for one in batch:
            ends(book, speeds, one)

    assert speeds.of(WORKER).seconds(TOKENS, 0) == pytest.approx(TAKES_S / 4, rel=0.2)


def test_short_prefills_in_a_row_are_one_observation(book, speeds, changed):
    queue = [charge(book) for _ in range(2 * ROW)]
    for one in queue[:-1]:
        ends(book, speeds, one)
    assert changed == ["w"]

    ends(book, speeds, queue[-1])
    assert changed == ["w", "w"]


def test_what_was_moved_while_others_were_computed_tells_nothing(book, speeds, clock, changed):
    first, second = charge(book), charge(book)
    clock.advance(TAKES_S)
    first.first_byte(clock())
    clock.advance(TAKES_S)
    ends(book, speeds, second, moving_s=0.05)

    assert changed == []


def test_a_worker_that_is_gone_is_forgotten(book, speeds, clock):
    guess = speeds.of(WORKER)
    ends(book, speeds, charge(book))
    assert speeds.of(WORKER) != guess

    speeds.forget("w")
    assert speeds.of(WORKER) == guess


@pytest.mark.parametrize("status", [400, 500])
async def test_a_worker_is_not_learned_from_what_it_refuses(rig, status):
    """Else a client that sends nonsense makes it look idle, and as fast as its checks."""
    slow = asyncio.Event()

    async def behave(engine, request, asked):
        if asked.get("temperature"):
            return web.json_response({"error": {"message": "no"}}, status=status)
        await slow.wait()
        return await answer(engine, request, asked)

    # so slow by its record that no wait here is longer than was expected: that would tell something
    engine = await rig.engine(behave=behave, prefill_tokens_per_s=1.0)
    router = await rig.start(engine)
    router.turns._at_once = True  # several are in flight at the engine
    body = {"model": "tiny", "prompt": "x" * 400, "stream": True}
    long = asyncio.create_task(rig.client.post("/v1/completions", json=body))
    await until(lambda: len(engine.seen) == 1)
    seen_s, charge = router.clock(), next(iter(router.book._pages["a"].waiting))
    for _ in range(5):
        async with rig.client.post("/v1/completions", json=body | {"temperature": 9}) as refused:
            assert refused.status == status
    waited_s = router.clock() - seen_s
    slow.set()
    (await long).close()

    # what an engine that fails had done by then is not known
    assert (charge.prefill_s >= waited_s) if status < 500 else (charge.prefill_s is None)
