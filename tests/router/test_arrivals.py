"""Requests that find no worker wait for one, within limits."""

import asyncio

import pytest
from aiohttp import web
from eventually import until
from upstreams import answer, storing

from prefixfleet.router import departed
from prefixfleet.router.headers import DEADLINE
from prefixfleet.router.traffic import FAILURES

LONG_S = 300.0  # what waits so long in a test has failed


def waiting(router):
    return router.metrics.waits_for_worker._value.get()


async def waiting_now(rig):
    """As the metrics and as the status say."""
    async with rig.client.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    async with rig.client.get("/status") as response:
        status = await response.json()
    (told,) = [line for line in lines if line.startswith("prefixfleet_waiting_requests ")]
    return float(told.split()[1]), status["waiting"]["without_worker"]


def port_of(engine):
    return int(engine.url.rsplit(":", 1)[1])


async def post_once_waiting(rig, count=1):
    """A request that waits for a worker now."""
    asked = asyncio.create_task(rig.post())
    await until(lambda: waiting(rig.router) == count)
    return asked


async def until_gone(rig, engine):
    """Its lease has ended, and the router has seen that."""
    await rig.announce(engine.record(), ttl_s=0.05)
    await until(lambda: engine.name not in rig.router.roster.names())


async def test_a_request_without_a_worker_is_answered_when_one_comes(rig):
    engine = await rig.engine()
    router = await rig.start(worker_wait_s=LONG_S)

    asked = await post_once_waiting(rig)
    await rig.announce(engine.record())

    assert (await asked)[0] == 200
    assert waiting(router) == 1


async def test_a_request_whose_last_worker_fails_is_sent_again_when_it_is_back(rig):
    engine = await rig.engine()
    await rig.start(engine, worker_wait_s=LONG_S)
    await engine.stop()

    asked = await post_once_waiting(rig)
    async with engine.running(port_of(engine)):
        status, _, _ = await asked

    assert status == 200
    assert len(engine.seen) == 1


async def test_a_model_that_the_first_list_lacks_may_be_announced_yet(rig):
    engine, later = await rig.engine("a"), await rig.engine("b", model="other")
    await rig.start(engine, worker_wait_s=LONG_S)

    asked = asyncio.create_task(rig.post(model="other"))
    await until(lambda: waiting(rig.router) == 1)
    await rig.announce(later.record())

    assert (await asked)[0] == 200


async def test_a_model_that_nobody_announces_is_unknown_in_the_end(rig):
    await rig.start(await rig.engine(), worker_wait_s=0.3)

    status, _, body = await rig.post(model="other")

    assert (status, body["error"]["code"]) == (404, "model_not_found")


async def all_whole(rig, *engines):
    """A router that has these workers and takes its list for whole; it waits a moment only."""
    router = await rig.start(*engines, worker_wait_s=0.3)
    await until(router.roster.is_whole)
    return router


async def test_a_model_whose_workers_are_all_drained_is_not_waited_for(rig):
    """They stay so until somebody takes the order back: a wait would be for nothing."""
    engines = [await rig.engine("a"), await rig.engine("b")]
    router = await all_whole(rig, *engines)
    await rig.lists(*(engine.record(state="draining") for engine in engines))

    status, headers, body = await rig.post()

    assert (status, body["error"]["code"]) == (503, "no_worker")
    assert "prefixfleet resume" in body["error"]["message"]
    assert int(headers["Retry-After"]) >= 1
    assert waiting(router) == 0


async def test_a_drained_worker_that_is_taken_back_serves_again(rig):
    engine = await rig.engine()
    await all_whole(rig, engine)
    await rig.lists(engine.record(state="draining"))
    assert (await rig.post())[0] == 503

    await rig.lists(engine.record())

    assert (await rig.post())[0] == 200


@pytest.mark.parametrize("other", ["leaving", "checking", "missing"])
async def test_who_may_come_back_is_waited_for_beside_drained_ones(rig, other):
    drained, engine = await rig.engine("a"), await rig.engine("b")
    router = await all_whole(rig, drained, engine)
    listed = [drained.record(state="draining")]
    if other == "leaving":
        listed.append(engine.record(state="leaving"))
    elif other == "checking":
        await engine.stop()
        listed.append(engine.record())
    await rig.lists(*listed)
    if other == "checking":
        router.roster.lost("b", "it does not answer")

    assert (await rig.post())[0] == 503

    assert waiting(router) == 1


async def test_the_successor_of_a_worker_that_leaves_serves_who_waits(rig):
    engine, successor = await rig.engine("a"), await rig.engine("b")
    router = await rig.start(engine, worker_wait_s=LONG_S)
    await until(lambda: router.roster.is_ready("a"))
    router.roster._workers._whole_s = 0.0
    await rig.lists(engine.record(state="leaving"))

    asked = await post_once_waiting(rig)
    await rig.lists(successor.record())

    assert (await asked)[0] == 200
    assert len(successor.seen) == 1


async def test_nobody_waits_longer_than_the_setting(rig):
    router = await rig.start(worker_wait_s=0.05)

    status, headers, body = await rig.post()

    assert (status, body["error"]["code"]) == (503, "no_worker")
    assert int(headers["Retry-After"]) >= 1
    assert waiting(router) == 1


async def test_nobody_waits_longer_than_the_clients_own_deadline(rig):
    await rig.start(worker_wait_s=LONG_S)
    body = {"model": "tiny", "prompt": "hello"}
    headers = {DEADLINE: "50"}

    async with rig.client.post("/v1/completions", json=body, headers=headers) as response:
        assert response.status == 503


async def test_nobody_waits_longer_than_the_limit_on_the_first_token(rig):
    await rig.start(worker_wait_s=LONG_S, ttft_slo_s=0.05)

    assert (await rig.post())[0] == 503


async def test_those_who_wait_leave_room_for_other_models(rig):
    engine, leaving = await rig.engine("a"), await rig.engine("b", model="other")
    router = await rig.start(
        engine,
        leaving,
        records=[engine.record(), leaving.record()],
        worker_wait_s=LONG_S,
        max_in_flight=8,
    )
    await until_gone(rig, leaving)
    waiters = [asyncio.create_task(rig.post(model="other")) for _ in range(2)]
    await until(lambda: router.without_worker == 2)

    refused = [(await rig.post(model="other"))[0] for _ in range(8)]

    assert refused == [503] * 8
    assert (await rig.post())[0] == 200
    await rig.announce(leaving.record())
    assert [(await waiter)[0] for waiter in waiters] == [200, 200]


async def test_a_client_that_leaves_waits_no_longer(rig):
    router = await rig.start(worker_wait_s=LONG_S)

    asked = await post_once_waiting(rig)
    assert await waiting_now(rig) == (1.0, 1)
    asked.cancel()

    await until(lambda: router.in_flight == 0)
    assert await waiting_now(rig) == (0.0, 0)


async def test_a_worker_that_refuses_is_not_waited_for(rig):
    async def unavailable(engine, request, asked):
        return web.json_response({}, status=503)

    engine = await rig.engine(behave=unavailable)
    router = await rig.start(engine, worker_wait_s=LONG_S)

    status, _, body = await rig.post()

    assert (status, body["error"]["code"]) == (502, "upstream_failed")
    assert len(engine.seen) == 1
    assert waiting(router) == 0


async def test_an_ejected_worker_is_the_last_resort(rig):
    first, second = await rig.engine("a"), await rig.engine("b")
    router = await rig.start(first, second)
    for _ in range(FAILURES):
        router.traffic.failed("b")
    assert router.traffic.is_ejected("b")
    await first.stop()

    status, headers, _ = await rig.post()

    assert (status, headers["x-prefixfleet-node"]) == (200, "node-b")


async def test_a_request_is_sent_three_times_at_most(rig):
    """It may be the request that kills its engine."""
    sent = []

    async def dying(engine, request, asked):
        sent.append(engine.name)
        request.transport.abort()
        await asyncio.Event().wait()

    engine = await rig.engine(behave=dying)
    await rig.start(engine, worker_wait_s=LONG_S)

    status, _, body = await rig.post()

    assert (status, body["error"]["code"]) == (502, "upstream_failed")
    assert len(sent) == 3


@pytest.mark.parametrize(("model", "expected"), [("other", 503), ("third", 404)])
async def test_a_model_whose_workers_all_left_is_not_unknown(rig, model, expected):
    """404 would tell clients that it is no use to ask again."""
    engine, leaving = await rig.engine("a"), await rig.engine("b", model="other")
    await rig.start(engine, leaving, records=[engine.record(), leaving.record()])
    await until_gone(rig, leaving)

    assert (await rig.post(model=model))[0] == expected


async def test_a_model_that_is_gone_for_good_is_unknown_and_nobody_waits_for_it(rig, monkeypatch):
    monkeypatch.setattr(departed, "GONE_S", 0.0)
    engine, leaving = await rig.engine("a"), await rig.engine("b", model="other")
    router = await rig.start(
        engine, leaving, records=[engine.record(), leaving.record()], worker_wait_s=0.5
    )
    router.reload()
    await until_gone(rig, leaving)
    for _ in range(2):
        router.reload()
    await until(router.roster.is_whole)

    assert (await rig.post(model="other"))[0] == 404
    assert waiting(router) == 0


async def test_who_waits_for_a_busy_worker_goes_to_one_that_comes(rig):
    """A fleet that grows under load serves with it what waits already."""
    held = asyncio.Event()

    async def busy(engine, request, asked):
        await held.wait()
        return await answer(engine, request, asked)

    old = await rig.engine("a", behave=busy, prefill_tokens_per_s=1.0)
    router = await rig.start(old)
    asked = [asyncio.create_task(rig.post()) for _ in range(4)]
    await until(lambda: len(router.turns) == 3)

    new = await rig.engine("b", prefill_tokens_per_s=1.0)
    await rig.announce(new.record())
    done, _ = await asyncio.wait(asked[1:], timeout=20)

    assert {task.result()[1]["x-prefixfleet-node"] for task in done} == {"node-b"}
    assert len(done) == 3
    held.set()
    assert (await asked[0])[0] == 200


async def test_who_waits_for_the_worker_of_a_response_goes_to_nobody_who_comes(rig):
    held = asyncio.Event()

    async def busy(engine, request, asked):
        if asked["input"] == "wait":
            await held.wait()
        return await storing(engine, request, asked)

    old = await rig.engine("a", behave=busy, prefill_tokens_per_s=1.0)
    router = await rig.start(old)
    body = {"input": "hello"}
    _, _, first = await rig.post("/v1/responses", **body)
    blocking = asyncio.create_task(rig.post("/v1/responses", input="wait"))
    await until(lambda: len(old.seen) == 2)
    bound = asyncio.create_task(rig.post("/v1/responses", **body, previous_response_id=first["id"]))
    await until(lambda: len(router.turns) == 1)

    new = await rig.engine("b", behave=storing)
    await rig.announce(new.record())
    await rig.until_ready(2)
    await asyncio.sleep(0.1)
    assert len(router.turns) == 1
    held.set()
    assert (await bound)[2]["served_by"] == "a"
    assert (await blocking)[0] == 200
