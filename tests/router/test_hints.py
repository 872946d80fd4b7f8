"""The target node hears of a plan at the moment of the decision."""

import asyncio

import pytest
from aiohttp import web
from eventually import until
from upstreams import SECRET, for_ever, raw_server

from prefixfleet.router.on_the_way import OnTheWay
from prefixfleet.store.prefetch import (
    PREFETCH_PATH,
    SIGNATURE_HEADER,
    open_prefetch,
    prefetch_key,
)

LONG = "The prefix cache keeps what a node computed before. " * 20
FAST = {"node-a": {"link": "tcp", "bytes_per_s": 1e9, "setup_s": 0.001}}


@pytest.fixture
async def node_face(rig):
    """A node's HTTP face: what it received."""
    received: asyncio.Queue = asyncio.Queue()

    async def prefetch(request):
        received.put_nowait((await request.read(), request.headers[SIGNATURE_HEADER]))
        return web.Response(status=202)

    return await rig.node_face(PREFETCH_PATH, prefetch), received


async def pulling_fleet(rig, http):
    """A holder `a` that is busy, and `b` that will pull from it."""
    engines = [await rig.engine(name) for name in "ab"]
    router = await rig.start(*engines)
    await rig.holds(engines[0], engines[0].tokens.of_text(LONG))
    await rig.holds(engines[1], [], http=http, links=FAST)
    rig.stack.enter_context(router.book.charged("a", tokens=90_000, sequences=1, expected_s=90))
    return engines, router


async def test_the_hint_is_the_plan_with_the_hashes_that_it_wants(rig, node_face):
    url, received = node_face
    engines, _ = await pulling_fleet(rig, url)

    await rig.post(prompt=LONG)
    body, signature = await asyncio.wait_for(received.get(), 30)

    hint = open_prefetch(body, signature, prefetch_key(SECRET))
    plan = engines[1].seen[0]["kv_transfer_params"]["prefixfleet"]
    assert hint.plan.request == plan["request"]
    assert len(hint.chain) == hint.plan.blocks == plan["blocks"] > 0


async def test_a_place_that_does_not_answer_keeps_nothing_from_the_others():
    on_the_way, arrived = OnTheWay(2), []

    async def hangs():
        await for_ever()

    async def arrives():
        arrived.append(1)

    assert [on_the_way.start("hung", hangs) for _ in range(4)] == [True, True, False, False]
    for _ in range(9):
        await until(lambda: on_the_way.start("other", arrives))
    await until(lambda: len(arrived) == 9)
    await on_the_way.close()
    assert on_the_way.start("hung", arrives)


async def test_nothing_to_pull_is_nothing_to_say(rig, node_face):
    url, received = node_face
    engine = await rig.engine()
    router = await rig.start(engine)
    await rig.holds(engine, [], http=url)

    await rig.post(prompt=LONG)

    assert b"hints_total{" not in router.metrics.render()
    assert received.empty()


async def test_a_node_that_refuses_connections_is_suspected_and_the_request_is_served(rig):
    async def talk(reader, writer):
        pass

    async with raw_server(talk) as url:
        pass  # nobody listens there any more
    _, router = await pulling_fleet(rig, url)

    status, _, _ = await rig.post(prompt=LONG)

    assert status == 200
    await until(lambda: router.view.is_suspect("node-b"))
    assert b'hints_total{result="connect"} 1.0' in router.metrics.render()


async def test_a_node_that_never_answers_delays_nobody(rig):
    async def talk(reader, writer):
        await asyncio.Event().wait()

    async with raw_server(talk) as url:
        await pulling_fleet(rig, url)

        status, _, _ = await rig.post(prompt=LONG)

    assert status == 200
