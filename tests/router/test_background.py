"""What engines compute behind their answer is load of theirs until it is done, as far as known."""

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest
from aiohttp import web
from eventually import until
from stored_responses import create, fleet
from upstreams import events_of, for_ever, storing, streaming

from prefixfleet.router import background as backgrounds
from prefixfleet.router.background import OF_ONE_WORKER, UNTOLD, Background
from prefixfleet.router.book import Book
from prefixfleet.router.charge import NO_LOAD
from prefixfleet.router.degraded import Degraded


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(backgrounds, "LOOK_S", 0.001)


class Engines:
    """What engines say of the responses that are asked for; a book of what they compute."""

    def __init__(self, clock):
        self.clock, self.book, self.degraded = clock, Book(clock), Degraded(clock)
        self.running, self.asked, self.hung = set(), [], set()
        self.background = Background(
            self.still_runs, self.book.release, lambda: None, self.degraded, clock
        )

    async def still_runs(self, url):
        self.asked.append(url)
        if url.split("/")[0] in self.hung:
            await for_ever()
        return url in self.running

    def goes_on(self, name, worker="w"):
        charge = self.book.charge(worker, tokens=9, sequences=1, expected_s=1.0, streamed=False)
        charge.goes_on = f"{worker}/{name}"
        self.running.add(charge.goes_on)
        self.background.follow(charge)

    @asynccontextmanager
    async def looking(self):
        task = asyncio.create_task(self.background.run())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


@pytest.fixture
def engines(clock):
    return Engines(clock)


async def test_whose_prefill_is_over_holds_up_nobody_elses(engines, clock):
    for number in range(20):
        engines.goes_on(str(number))
    assert engines.book.load("w").busy_s == 20.0

    async with engines.looking():
        clock.advance(21.0)
        await until(lambda: engines.book.load("w").decoding == 20)
        stream = engines.book.charge("w", tokens=9, sequences=1, expected_s=1.0, streamed=True)
        waits = engines.book.load("w")
        clock.advance(0.5)
        stream.first_byte(clock())  # after which the sum of all was waited for once more

        assert (waits.queued_requests, waits.busy_s) == (1, 1.0)
        assert engines.book.load("w").busy_s == 0.0
        assert engines.book.load("w").decoding == 21
        assert engines.book.decode_s == 0.0
        engines.running.clear()
        await until(lambda: engines.book.load("w").decoding == 1)
    engines.book.release(stream)
    assert engines.book.load("w") == NO_LOAD


async def test_who_is_still_computed_by_the_estimates_is_load_of_as_many_seconds(engines, clock):
    for number in range(20):
        engines.goes_on(str(number))
    async with engines.looking():
        clock.advance(10.5)
        await until(lambda: engines.book.load("w").decoding == 10)

    assert engines.book.load("w").busy_s == 9.5


async def test_each_is_charged_until_its_engine_is_done_with_it(engines):
    engines.goes_on("a")
    engines.goes_on("b")
    async with engines.looking():
        await until(lambda: len(engines.asked) > 6)
        assert engines.book.load("w").queued_requests == len(engines.background) == 2

        engines.running.remove("w/a")
        await until(lambda: len(engines.background) == 1)
        assert engines.book.load("w").queued_requests == 1
        engines.running.clear()
        await until(lambda: engines.book.load("w") == NO_LOAD)

        engines.goes_on("c")
        await until(lambda: engines.asked[-1] == "w/c")


async def test_nothing_is_charged_for_ever(engines, monkeypatch):
    engines.hung.add("w")
    engines.goes_on("a")
    async with engines.looking():
        engines.clock.advance(backgrounds.MOST_S - 1)
        await until(lambda: engines.asked)
        engines.goes_on("b")
        engines.clock.advance(1)
        await until(lambda: len(engines.background) == 1)

    assert engines.book.load("w").queued_requests == 1


async def test_of_too_many_the_oldest_count_as_done_and_it_is_told(engines, monkeypatch):
    monkeypatch.setattr(backgrounds, "MOST_FOLLOWED", 4)
    for number in range(6):
        engines.goes_on(number)
        engines.clock.advance(1)
    assert engines.book.load("w").queued_requests == len(engines.background) == 4
    assert [mode.name for mode in engines.degraded.modes()] == [backgrounds.MODE]

    async with engines.looking():
        await until(lambda: len(set(engines.asked)) == 4)
        assert set(engines.asked) == {f"w/{number}" for number in range(2, 6)}
        engines.running.clear()
        await until(lambda: not engines.degraded.modes())


async def test_an_engine_that_does_not_answer_keeps_nobody_elses_waiting(engines):
    engines.hung.add("hung")
    for number in range(100):
        engines.goes_on(number, "hung")
    engines.goes_on("a")
    engines.running.remove("w/a")
    async with engines.looking():
        await until(lambda: engines.book.load("w") == NO_LOAD)

    assert sum(url.startswith("hung/") for url in engines.asked) == OF_ONE_WORKER


def running(engine, name):
    """Its response goes on in the background until somebody takes it out of `stored`."""

    async def read(engine, request, asked):
        status = "in_progress" if engine.stored.get(name) else "completed"
        return web.json_response({"id": name, "output": ["x" * 100], "status": status})

    engine.read = read


async def queued(engine, request, asked):
    name = f"resp {engine.name}/1"
    engine.stored[name] = engine.name
    running(engine, name)
    return web.json_response({"id": name, "status": "queued", "served_by": engine.name})


async def test_the_next_request_finds_the_worker_busy(rig):
    engines = await fleet(rig)
    for engine in engines.values():
        engine.behave = queued
    prompts = ("hello " * 500, "world " * 500)
    made = [(await create(rig, background=True, input=prompt))[2] for prompt in prompts]
    assert {response["served_by"] for response in made} == {"a", "b"}
    assert [rig.router.book.load(name).queued_requests for name in "ab"] == [1, 1]
    async with rig.client.get("/metrics") as metrics:
        assert "prefixfleet_background_responses 2.0" in await metrics.text()

    for engine in engines.values():
        engine.stored.clear()
    await until(lambda: rig.router.book.workers() == [])
    assert len(rig.router.background) == 0


async def test_a_stream_goes_on_when_its_client_leaves(rig):
    """Before its first token: nobody will hear it, and nobody is silent for that."""

    async def begin(engine, request, asked):
        engine.stored["resp_s"] = engine.name
        running(engine, "resp_s")
        return await streaming(*events_of(engine, "resp_s")[:1], then=for_ever)(
            engine, request, asked
        )

    engines = await fleet(rig, "a")
    engines["a"].behave = begin
    body = {"model": "tiny", "input": "hello", "stream": True, "background": True}
    async with rig.client.post("/v1/responses", json=body) as answer:
        await answer.content.readuntil(b"\n\n")
        answer.close()
    await until(lambda: len(rig.router.background) == 1)
    book = rig.router.book
    assert (book.load("a").queued_requests, book.streams_waiting("a")) == (1, 0)

    engines["a"].stored.clear()
    await until(lambda: book.workers() == [])
    assert not book._pages


@pytest.mark.parametrize("fields", [{"stream": True}, {"background": False}, {"store": False}])
async def test_what_has_come_is_not_asked_for(rig, fields):
    """All of a stream, an answer that is none of the background's, one that nobody keeps."""
    await fleet(rig, "a")
    body = {"model": "tiny", "input": "hello", "background": True} | fields

    async with rig.client.post("/v1/responses", json=body) as answer:
        assert answer.status == 200
        await answer.read()

    await until(lambda: rig.router.book.workers() == [])
    assert len(rig.router.background) == 0


async def test_what_is_refused_does_not_go_on(rig):
    async def refuse(engine, request, asked):
        return web.json_response({"id": "resp_a", "error": {"message": "no"}}, status=400)

    engines = await fleet(rig, "a")
    engines["a"].behave = refuse

    assert (await create(rig, background=True))[0] == 400
    assert rig.router.book.workers() == []


async def nonsense(engine, request, asked):
    return web.Response(body=b"\xff" * 100)


async def no_status(engine, request, asked):
    return web.json_response({"error": {"message": "who are you?"}}, status=401)


async def endless(engine, request, asked):
    return web.Response(body=b'{"output":"%s","status":"queued"}' % (b"x" * backgrounds.MAX_BYTES))


async def breaks_off(engine, request, asked):
    request.transport.close()
    return web.Response()


@pytest.mark.parametrize("said", [nonsense, no_status, endless, breaks_off])
async def test_who_does_not_say_is_asked_a_few_times(rig, monkeypatch, said):
    monkeypatch.setattr(backgrounds, "MAX_BYTES", 1_000)
    asked = []

    async def read(engine, request, question):
        asked.append(request.path)
        return await said(engine, request, question)

    engines = await fleet(rig, "a")
    engines["a"].behave = queued
    create_one = asyncio.create_task(create(rig, background=True))
    await until(lambda: engines["a"].stored)
    engines["a"].read = read
    await create_one
    await until(lambda: rig.router.book.workers() == [])

    async with rig.client.get("/metrics") as metrics:
        told = await metrics.text()
    assert 'prefixfleet_stored_responses_total{asked="follow",result="untold"} 1.0' in told
    assert UNTOLD <= len(asked) <= 2 * UNTOLD  # what broke off may be asked again at once
    assert set(asked) == {"/v1/responses/resp a/1"}


async def test_a_response_that_its_engine_does_not_know_is_done(rig):
    """It was started again meanwhile."""
    engines = await fleet(rig, "a")

    async def forget(engine, request, asked):
        answer = await storing(engine, request, asked)
        engine.stored.clear()
        return answer

    engines["a"].behave = forget
    assert (await create(rig, background=True))[0] == 200

    await until(lambda: rig.router.book.workers() == [])
