"""Plain requests go the short way, others the long one; nobody can tell which by the answer."""

import asyncio
import json

import pytest
from eventually import until
from upstreams import EVENTS, for_ever, streaming

BODY = json.dumps({"model": "tiny", "prompt": "hello"}).encode()
LIMIT_S = 30


def request(body=BODY, *extra):
    head = [
        "POST /v1/completions HTTP/1.1",
        "Host: x",
        f"Content-Length: {len(body)}",
        "Content-Type: application/json",
        *extra,
    ]
    return "\r\n".join([*head, "", ""]).encode() + body


@pytest.fixture
async def talk(rig):
    """Opens a raw connection to the router."""

    async def connect():
        pair = await asyncio.open_connection(*rig.runner.addresses[0][:2])
        rig.stack.callback(pair[1].close)
        return pair

    return connect


async def read_answer(reader):
    """Status and headers of an answer with a length, and its body."""
    async with asyncio.timeout(LIMIT_S):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lines = head.split("\r\n")
        headers = {n.lower(): v for n, _, v in (line.partition(": ") for line in lines[1:] if line)}
        body = await reader.readexactly(int(headers["content-length"]))
    return int(lines[0].split()[1]), headers, body


async def test_both_ways_answer_with_the_same_status_headers_and_body(rig, talk):
    await rig.start(await rig.engine())
    answers = []
    for extra in ([], ["Expect:"], ["TE: trailers"]):  # the full parser gets the latter two
        reader, writer = await talk()
        writer.write(request(BODY, *extra))
        answers.append(await read_answer(reader))

    names = [set(headers) for _, headers, _ in answers]
    assert [status for status, _, _ in answers] == [200, 200, 200]
    assert names[0] == names[1] == names[2]
    said = [json.loads(body)["choices"] for _, _, body in answers]
    assert said[0] == said[1] == said[2]


async def test_a_request_that_comes_byte_by_byte_is_one_request(rig, talk):
    engine = await rig.engine()
    await rig.start(engine)
    reader, writer = await talk()

    for byte in request():
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0)

    assert (await read_answer(reader))[0] == 200
    assert len(engine.seen) == 1


async def test_a_body_that_takes_its_time_is_waited_for(rig, talk, monkeypatch):
    monkeypatch.setattr("prefixfleet.router.lane.PATIENCE_S", 0.0)
    router = await rig.start(await rig.engine())
    reader, writer = await talk()

    writer.write(request()[:-5])
    await until(lambda: router.in_flight == 1)  # aiohttp has it now
    writer.write(request()[-5:])

    assert (await read_answer(reader))[0] == 200


async def test_requests_sent_ahead_are_answered_in_order(rig, talk):
    engine = await rig.engine()
    await rig.start(engine)
    reader, writer = await talk()
    bodies = [json.dumps({"model": "tiny", "prompt": f"{n}"}).encode() for n in range(5)]
    odd = request(bodies[3], "TE: trailers")

    writer.write(b"".join([*map(request, bodies[:3]), odd, request(bodies[4])]))
    statuses = [(await read_answer(reader))[0] for _ in bodies]

    assert statuses == [200] * 5
    assert [seen["prompt"] for seen in engine.seen] == ["0", "1", "2", "3", "4"]


async def test_who_sends_far_ahead_is_read_no_further(rig, talk, monkeypatch):
    monkeypatch.setattr("prefixfleet.router.lane.MAX_AHEAD_BYTES", 1_000)
    engine = await rig.engine()
    await rig.start(engine)
    reader, writer = await talk()
    count = 40

    for _ in range(count):
        writer.write(request())
    statuses = [(await read_answer(reader))[0] for _ in range(count)]

    assert statuses == [200] * count
    assert len(engine.seen) == count


async def test_another_path_on_the_same_connection_is_served(rig, talk):
    await rig.start(await rig.engine())
    reader, writer = await talk()

    writer.write(request())
    assert (await read_answer(reader))[0] == 200
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await read_answer(reader))[0] == 200
    writer.write(request())
    assert (await read_answer(reader))[0] == 200


async def test_a_client_that_leaves_a_short_way_cancels_its_request(rig, talk):
    engine = await rig.engine(behave=streaming(EVENTS[0], then=for_ever))
    router = await rig.start(engine)
    reader, writer = await talk()
    writer.write(request(b'{"model":"tiny","prompt":"x","stream":true}'))
    await asyncio.wait_for(reader.readuntil(b"\n\n"), LIMIT_S)

    writer.close()

    await until(lambda: router.in_flight == 0 and not router.book.workers())
    await until(lambda: not router.pool.busy)


async def test_a_router_that_stops_lets_an_answer_end(rig, talk):
    go_on = asyncio.Event()
    engine = await rig.engine(behave=streaming(EVENTS[0], then=go_on.wait))
    await rig.start(engine)
    reader, writer = await talk()
    writer.write(request(b'{"model":"tiny","prompt":"x","stream":true}'))
    await asyncio.wait_for(reader.readuntil(b"\n\n"), LIMIT_S)

    stopping = asyncio.create_task(rig.runner.cleanup())
    await until(lambda: rig.runner.server is None or not rig.runner.sites)
    go_on.set()
    rest = await asyncio.wait_for(reader.read(), LIMIT_S)
    await stopping

    assert rest.endswith(b"0\r\n\r\n")
