"""Stored responses through routers: asked of the worker that keeps them, by whichever router."""

import json

from aiohttp import web
from eventually import until
from stored_responses import ask, count, create, create_on, error, fleet, path_of, replica
from upstreams import events_of, for_ever, streaming

from prefixfleet.router.stored import PREVIOUS
from prefixfleet.store.stored_responses import StoredResponses


async def test_reading_and_cancelling_go_to_the_worker_that_keeps_it(rig):
    """Whichever router is asked, with the query as it came."""
    engines = await fleet(rig, "abc")
    other = await replica(rig, engines)
    made = [await create_on(rig, name) for name in "abcabc"]

    for router in (rig, other):
        for response in made:
            path = f"/v1/responses/{response['id']}"
            status, headers, raw = await ask(router, path + "?a=a%20b&x=%C3%9F")
            assert (status, json.loads(raw)["served_by"]) == (200, response["served_by"])
            assert headers["x-prefixfleet-node"] == f"node-{response['served_by']}"
            assert engines[response["served_by"]].paths[-1] == path + "?a=a%20b&x=%C3%9F"
            status, _, raw = await ask(router, path + "/cancel", "POST")
            assert (status, json.loads(raw)["status"]) == (200, "cancelled")
            assert json.loads(raw)["served_by"] == response["served_by"]
    assert "".join(response["served_by"] for response in made) == "abcabc"
    assert count(other, "cancel", "found") == 6


async def test_what_goes_on_from_a_response_goes_to_its_worker(rig, caplog):
    """Though another one has nothing to do; the answer, the log and a counter say so."""
    caplog.set_level("INFO", logger="prefixfleet.router.decisions")
    engines = await fleet(rig, "abc")
    other = await replica(rig, engines)
    _, headers, first = await create(rig)
    assert "x-prefixfleet-bound" not in headers
    keeper = first["served_by"]

    for router in (rig, other):
        with router.router.book.charged(keeper, tokens=50_000, sequences=1, expected_s=0.05):
            status, headers, second = await create(router, previous_response_id=first["id"])
        assert (status, second["served_by"]) == (200, keeper)
        assert headers["x-prefixfleet-bound"] == PREVIOUS
        assert engines[keeper].seen[-1][PREVIOUS] == first["id"]
        assert count(router, "previous", "found") == 1
        router.router.afterwards.catch_up()
        line = caplog.messages[-1]
        assert line.endswith(f"; no choice: it keeps the response that {PREVIOUS} names")
    (third,) = [await create(other, previous_response_id=second["id"], stream=False)]
    assert third[2]["served_by"] == keeper


async def test_the_id_of_a_stream_is_noted_when_its_first_event_has_come(rig):
    async def begin(engine, request, asked):
        engine.stored["resp_s"] = engine.name
        first = events_of(engine, "resp_s")[0]
        return await streaming(first[:30], first[30:], then=for_ever)(engine, request, asked)

    engines = await fleet(rig)
    other = await replica(rig, engines)
    for engine in engines.values():
        engine.behave = begin
    body = {"model": "tiny", "input": "hello", "stream": True}

    async with rig.client.post("/v1/responses", json=body) as answer:
        await answer.content.readuntil(b"\n\n")
        status, headers, _ = await ask(other, path_of("resp_s"))
        assert (status, headers["x-prefixfleet-node"]) == (
            200,
            answer.headers["x-prefixfleet-node"],
        )
        answer.close()
    await until(lambda: rig.router.in_flight == 0)
    assert rig.router.metrics.unread_response_ids._value.get() == 0


async def test_a_streams_bytes_stay_as_they_are_and_can_be_read_again(rig):
    engines = await fleet(rig)
    body = {"model": "tiny", "input": "hello", "stream": True, "metadata": {"id": "resp_s"}}

    for options in ({"json": body}, {"data": _parts(body)}):  # on either way into the router
        async with rig.client.post("/v1/responses", **options) as answer:
            made = await answer.read()
            node = answer.headers["x-prefixfleet-node"]
        whole = b"".join(events_of(engines[node[-1]], "resp_s"))
        assert made == whole
        status, headers, raw = await ask(rig, "/v1/responses/resp_s?stream=true&starting_after=0")
        assert (status, raw, headers["Content-Type"]) == (200, whole, "text/event-stream")
        assert headers["x-prefixfleet-node"] == node


async def _parts(body):
    yield json.dumps(body).encode()


async def test_a_stream_that_is_cut_anywhere(rig):
    engines = await fleet(rig, "a")
    whole = b"".join(events_of(engines["a"], "resp_s"))

    async def cut(engine, request, asked):
        engine.stored["resp_s"] = engine.name
        return await streaming(*(bytes([b]) for b in whole))(engine, request, asked)

    engines["a"].behave = cut

    async with rig.client.post("/v1/responses", json={"model": "tiny", "stream": True}) as answer:
        assert await answer.read() == whole
    assert (await ask(rig, "/v1/responses/resp_s"))[0] == 200


async def test_an_answer_that_is_too_long_to_be_held_is_noted_too(rig):
    engines = await fleet(rig, "a")

    text = '{"id":"resp_l","x":"%s"}' % ("x" * (2 << 20))

    async def long(engine, request, asked):
        engine.stored["resp_l"] = engine.name
        return web.Response(text=text, content_type="application/json")

    engines["a"].behave = long

    status, _, raw = await ask(rig, "/v1/responses", "POST", json={"model": "tiny"})
    assert (status, raw.decode()) == (200, text)
    assert (await ask(rig, "/v1/responses/resp_l"))[0] == 200


async def test_without_redis_a_router_serves_what_it_knows(rig):
    engines = await fleet(rig)
    other = await replica(rig, engines)
    _, _, made = await create(rig)
    for router in (rig, other):
        router.router.keepers.shared = away = StoredResponses("redis://127.0.0.1:1/0", "f")
        rig.stack.push_async_callback(away.close)

    assert (await ask(rig, path_of(made["id"])))[0] == 200
    assert (await create(rig, previous_response_id=made["id"]))[0] == 200
    status, headers, raw = await ask(other, path_of(made["id"]))
    assert (status, error(raw)["code"]) == (503, "response_unavailable")
    assert headers["Retry-After"] == "1"
    assert b"127.0.0.1" not in raw
    status, _, told = await create(other, previous_response_id=made["id"])

    assert (status, told["error"]["param"]) == (503, PREVIOUS)
    _, _, raw = await ask(other, "/status")
    assert "responses" in [mode["mode"] for mode in json.loads(raw)["degraded"]]


async def test_a_router_that_is_started_again_finds_them(rig):
    engines = await fleet(rig)
    _, _, made = await create(rig)
    await until(lambda: not rig.router.keepers.untold)
    _, _, raw = await ask(rig, "/status")
    assert json.loads(raw)["stored_responses"] == {"known": 1, "untold": 0}

    again = await replica(rig, engines)

    assert (await ask(again, path_of(made["id"])))[0] == 200


async def test_a_worker_that_may_be_announcing_itself_still_is_waited_for_by_the_client(rig):
    await fleet(rig, "a", worker_wait_s=600)
    rig.router.keepers.note("default", "resp_1", "later")

    status, headers, raw = await ask(rig, path_of("resp_1"))

    assert (status, error(raw)["code"]) == (503, "response_unavailable")
    assert "kept by worker later, which is not here yet" in error(raw)["message"]
    assert "Retry-After" in headers
