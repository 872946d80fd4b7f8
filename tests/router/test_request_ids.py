"""What a client calls its request is in the answer, in the log and at the engine; or our own id."""

import logging

import pytest
from aiohttp import web

BODY = {"model": "tiny", "prompt": "hello"}


def identified(rig, called):
    return {"X-Request-Id": called} if called else {}


@pytest.mark.parametrize("called", ["", "mine-1"])
@pytest.mark.parametrize("way", [{}, {"TE": "trailers"}], ids=["plain", "any"])
@pytest.mark.parametrize("body", [BODY, BODY | {"stream": True}, {"model": "none"}, {"prompt": ""}])
async def test_every_answer_carries_an_id(rig, called, way, body):
    engine = await rig.engine()
    await rig.start(engine)

    headers = way | identified(rig, called)
    async with rig.client.post("/v1/completions", json=body, headers=headers) as response:
        await response.read()

    (got,) = response.headers.getall("x-request-id")
    assert got == called if called else len(got) == 28
    if response.status == 200:
        seen = {name.lower(): value for name, value in engine.seen_headers[0].items()}
        assert seen["x-request-id"] == got
        if not called:
            assert response.headers["x-prefixfleet-request"] == got


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/models"), ("GET", "/no"), ("PUT", "/")])
async def test_answers_of_other_routes_carry_it_too(rig, method, path):
    await rig.start(await rig.engine())
    async with rig.client.request(method, path, headers={"X-Request-Id": "mine"}) as response:
        assert response.headers.getall("x-request-id") == ["mine"]


@pytest.mark.parametrize("called", ["x" * 129, "Straße", "a\tb"])
@pytest.mark.parametrize("way", [{}, {"TE": "trailers"}], ids=["plain", "any"])
async def test_a_name_that_may_not_be_repeated_is_replaced(rig, called, way):
    engine = await rig.engine()
    await rig.start(engine)

    headers = {"X-Request-Id": called} | way
    async with rig.client.post("/v1/completions", json=BODY, headers=headers) as response:
        (got,) = response.headers.getall("x-request-id")

    assert response.status == 200
    assert got == response.headers["x-prefixfleet-request"]
    seen = {name.lower(): value for name, value in engine.seen_headers[0].items()}
    assert seen["x-request-id"] == got


async def test_the_log_has_the_clients_name(rig, caplog):
    engine = await rig.engine()
    await rig.start(engine)
    caplog.set_level(logging.INFO)

    headers = {"X-Request-Id": "mine-2"}
    async with rig.client.post("/v1/completions", json=BODY, headers=headers) as response:
        assert response.status == 200
    rig.router.afterwards.catch_up()

    assert [line for line in caplog.messages if "mine-2" in line and "tokens to a" in line]


async def test_an_engine_that_says_it_too_does_not_double_it(rig):
    async def behave(engine, request, asked):
        return web.json_response({"id": "x"}, headers={"X-Request-Id": "the engine's"})

    engine = await rig.engine(behave=behave)
    await rig.start(engine)
    async with rig.client.post("/v1/completions", json=BODY) as response:
        assert response.headers.getall("x-request-id") == [
            response.headers["x-prefixfleet-request"]
        ]
