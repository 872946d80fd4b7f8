"""Faults of workers, nodes and clients, each one reported by users of other routers."""

import asyncio
import contextlib
import json
import socket
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web
from eventually import until
from upstreams import (
    EVENTS,
    for_ever,
    raw_server,
    read_request,
    streaming,
    whole,
)

from prefixfleet.router.charge import Load
from prefixfleet.router.upstream import may_resend

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
STREAM = {"model": "tiny", "prompt": "x", "stream": True}


async def proxy_probes(engine, reader, writer, head, body):
    """Pass a probe on to a real fake engine; True if it was one."""
    if b"kv_transfer_params" in body:
        return False
    path = head.split(b" ")[1].decode()
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            engine.url + path, data=body, headers={"Content-Type": "application/json"}
        ) as response,
    ):
        content = await response.read()
    writer.write(
        b"HTTP/1.1 %d OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
        % (response.status, len(content), content)
    )
    return True


@pytest.mark.parametrize("close_after", ["answer", "request"])
async def test_a_connection_that_the_engine_closed_while_idle_is_no_error(rig, close_after):
    """The engine closes its idle connection just when the router reuses it."""
    engine = await rig.engine()
    served = []

    async def talk(reader, writer):
        prompts = 0
        while True:
            head, body = await read_request(reader)
            if await proxy_probes(engine, reader, writer, head, body):
                continue
            prompts += 1
            if prompts == 2 and close_after == "request":
                return  # it had decided to close before the request arrived
            served.append(body)
            writer.write(OK)
            await writer.drain()
            if close_after == "answer":
                return

    async with raw_server(talk) as url:
        await rig.start(engine, records=[engine.record(url=url)])

        answers = [await rig.post() for _ in range(4)]

    assert [status for status, _, _ in answers] == [200] * 4
    assert len(served) == 4


async def test_a_request_is_resent_to_the_same_worker_once_only(rig):
    engine = await rig.engine()
    arrived = []

    async def talk(reader, writer):
        while True:
            head, body = await read_request(reader)
            if not await proxy_probes(engine, reader, writer, head, body):
                arrived.append(body)
                return  # every prompt finds its connection closed

    async with raw_server(talk) as url:
        await rig.start(engine, records=[engine.record(url=url)])

        status, _, body = await rig.post()

    assert status == 502
    assert body["error"]["code"] == "upstream_failed"
    assert len(arrived) <= 2


@pytest.mark.parametrize(
    ("reused", "answered", "timed_out", "expected"),
    [
        (True, False, False, True),
        (False, False, False, False),
        (True, True, False, False),
        (True, False, True, False),
    ],
)
def test_only_a_reused_connection_that_was_closed_unread_allows_a_resend(
    reused, answered, timed_out, expected
):
    connection = SimpleNamespace(answered=answered, timed_out=timed_out)

    assert may_resend(connection, reused=reused) is expected


async def test_a_worker_that_is_gone_is_replaced_before_the_first_byte(rig):
    engines = [await rig.engine(name) for name in "ab"]
    router = await rig.start(*engines)
    await engines[0].stop()

    answers = [await rig.post() for _ in range(4)]

    assert [status for status, _, _ in answers] == [200] * 4
    assert {headers["x-prefixfleet-node"] for _, headers, _ in answers} == {"node-b"}
    standing = next(s for s in router.roster.standings() if s.record.worker == "a")
    assert standing.state in ("down", "ready")  # ready: it was not even tried
    assert router.book.workers() == []


async def test_a_worker_that_came_back_is_examined_and_used_again(rig):
    engine = await rig.engine()
    router = await rig.start(engine)
    port = int(engine.url.rsplit(":", 1)[1])
    await engine.stop()

    status, _, _ = await rig.post()
    assert status == 502
    assert router.roster.standings()[0].state == "down"
    status, _, body = await rig.post()
    assert (status, body["error"]["code"]) == (503, "no_worker")

    async with engine.running(port):
        await rig.until_ready(1)
        status, _, _ = await rig.post()

    assert status == 200


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_a_worker_that_says_unavailable_is_replaced(rig, status):
    async def unavailable(engine, request, asked):
        return web.json_response({}, status=status)

    bad, good = await rig.engine("a", behave=unavailable), await rig.engine("b")
    await rig.start(bad, good)
    with rig.asked_first(bad, good):
        answered, headers, _ = await rig.post()

    assert (answered, headers["x-prefixfleet-node"]) == (200, "node-b")
    assert len(bad.seen) == 1


@pytest.mark.parametrize(
    ("said", "told"), [(["30", "17"], "17"), (["30"], "30"), ([""], "1"), (["a date"], "1")]
)
async def test_when_all_refuse_the_client_hears_when_to_come_back(rig, said, told):
    def refusing(after):
        async def behave(engine, request, asked):
            return web.json_response({}, status=503, headers={"Retry-After": after})

        return behave

    names = "ab"[: len(said)]
    pairs = zip(names, said, strict=True)
    await rig.start(*[await rig.engine(name, behave=refusing(after)) for name, after in pairs])

    status, headers, _ = await rig.post()

    assert (status, headers["Retry-After"]) == (502, told)


async def test_a_worker_that_dies_during_the_prefill_is_replaced(rig):
    async def dies(engine, request, asked):
        request.transport.abort()
        await for_ever()

    bad, good = await rig.engine("a", behave=dies), await rig.engine("b")
    await rig.start(bad, good)
    with rig.asked_first(bad, good):
        async with rig.client.post("/v1/completions", json=STREAM) as response:
            body = await response.read()

    assert response.headers["x-prefixfleet-node"] == "node-b"
    assert body == b"".join(EVENTS)


async def test_a_worker_that_dies_in_a_stream_is_not_replaced_and_the_client_is_told(rig):
    died = asyncio.Event()

    async def one_event_then_abort(engine, request, asked):
        async def abort():
            await died.wait()
            request.transport.abort()
            await for_ever()

        return await streaming(EVENTS[0], then=abort)(engine, request, asked)

    bad, good = await rig.engine("a", behave=one_event_then_abort), await rig.engine("b")
    router = await rig.start(bad, good)
    read = []

    async def read_all():
        async with rig.client.post("/v1/completions", json=STREAM) as response:
            async for chunk in response.content.iter_any():
                read.append(chunk)
                died.set()

    with (
        rig.asked_first(bad, good),
        pytest.raises(aiohttp.ClientPayloadError),  # it does not end as a whole answer does
    ):
        await read_all()

    first, told = b"".join(read).split(b"\n\n", 1)
    assert first + b"\n\n" == EVENTS[0]
    error = json.loads(told.removeprefix(b"data: "))["error"]
    assert error["code"] == "upstream_failed"
    assert good.seen == []
    await until(lambda: router.book.workers() == [])
    assert "prefixfleet_broken_streams_total 1.0" in router.metrics.render().decode()


@pytest.mark.parametrize("headers", [{}, {"TE": "trailers"}], ids=["plain", "any"])
async def test_a_client_of_messages_is_told_of_a_broken_stream_as_it_expects(rig, headers):
    """Anthropic's clients pass over an event without a name that they know."""
    event = b'event: message_start\ndata: {"type":"message_start"}\n\n'

    async def one_event_then_abort(engine, request, asked):
        async def abort():
            await until(lambda: read)
            request.transport.abort()
            await for_ever()

        return await streaming(event, then=abort)(engine, request, asked)

    await rig.start(await rig.engine(behave=one_event_then_abort))
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": True}
    read = b""
    async with rig.client.post("/v1/messages", json=asked, headers=headers) as response:
        with contextlib.suppress(aiohttp.ClientPayloadError):
            while part := await response.content.readany():
                read += part

    told = read.removeprefix(event)
    assert told.startswith(b"event: error\ndata: ")
    error = json.loads(told.removeprefix(b"event: error\ndata: "))
    assert (error["type"], error["error"]["type"]) == ("error", "api_error")


async def test_a_whole_answer_that_breaks_off_is_asked_of_another_worker(rig):
    async def breaks(engine, request, asked):
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b"{")
        request.transport.close()
        return response

    bad, good = await rig.engine("a", behave=breaks), await rig.engine("b")
    await rig.start(bad, good)
    with rig.asked_first(bad, good):
        status, headers, _ = await rig.post()

    assert (status, headers["x-prefixfleet-node"]) == (200, "node-b")


async def test_a_worker_that_came_after_the_request_is_asked_when_no_other_is_left(rig):
    """The only worker that was ready is killed while the other one is on its way back."""

    async def ends_when_the_other_is_back(engine, request, asked):
        await rig.announce(back.record())
        await rig.until_ready(2)
        request.transport.close()
        return web.Response()

    last = await rig.engine("a", behave=ends_when_the_other_is_back)
    back = await rig.engine("b")
    await rig.start(last)

    status, headers, _ = await rig.post()

    assert (status, headers["x-prefixfleet-node"]) == (200, "node-b")
    assert len(last.seen) == 1


async def test_no_more_workers_are_tried_than_the_limit(rig):
    async def unavailable(engine, request, asked):
        return web.json_response({}, status=503)

    engines = [await rig.engine(name, behave=unavailable) for name in "abcde"]
    await rig.start(*engines)

    status, headers, _ = await rig.post()

    assert status == 502
    assert int(headers["Retry-After"]) >= 1
    assert sum(len(engine.seen) for engine in engines) == 3


async def test_a_slow_worker_that_came_back_empty_does_not_get_every_cold_prompt(rig):
    """Peers sent cold prompts to the smallest cache: a death spiral for a slow, empty worker."""
    release = asyncio.Event()

    async def wait(engine, request, asked):
        await release.wait()
        return await whole(engine, request, asked)

    slow = await rig.engine("slow", behave=wait, prefill_tokens_per_s=100.0)
    fast = await rig.engine("fast", behave=wait, prefill_tokens_per_s=1_000.0)
    await rig.start(slow, fast)
    await rig.holds(slow, [])
    await rig.holds(fast, fast.tokens.of_text("something else " * 50))

    asking = [asyncio.create_task(rig.post(prompt=f"{i} cold " * 40)) for i in range(22)]
    await until(lambda: len(slow.seen) + len(fast.seen) == 22)
    counts = len(slow.seen), len(fast.seen)
    release.set()
    await asyncio.gather(*asking)

    assert counts[0] <= 4


async def test_load_follows_the_sequences_that_are_generated(rig):
    engine = await rig.engine(behave=streaming(EVENTS[0], then=for_ever))
    router = await rig.start(engine)

    async with rig.client.post("/v1/completions", json=STREAM | {"n": 3}) as response:
        await response.content.readany()

        assert router.book.load("a") == Load(decoding=3)


async def test_a_thousand_streams_at_once(rig):
    arrived = asyncio.Event()
    waiting = 0

    async def all_there():
        nonlocal waiting
        waiting += 1
        if waiting == 1_000:
            arrived.set()
        await arrived.wait()

    async def behave(engine, request, asked):
        return await streaming(*EVENTS[:2], then=all_there)(engine, request, asked)

    engines = [await rig.engine(name, behave=behave) for name in "ab"]
    # client, router and engines share one thread here: accepting a thousand takes it a while
    router = await rig.start(*engines, connect_timeout_s=60)

    async def ask(session):
        async with session.post("/v1/completions", json=STREAM) as response:
            return response.status, await response.read()

    base = str(rig.client._base_url)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(base, connector=connector) as session:
        answers = await asyncio.gather(*[ask(session) for _ in range(1_000)])

    assert set(answers) == {(200, b"".join(EVENTS[:2]))}
    assert router.book.workers() == []
    assert router.in_flight == 0


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"x" * 100_000,
        b"",
    ],
)
async def test_a_worker_that_speaks_no_http_is_an_upstream_failure(rig, answer):
    engine = await rig.engine()

    async def talk(reader, writer):
        while await proxy_probes(engine, reader, writer, *await read_request(reader)):
            pass
        writer.write(answer)

    async with raw_server(talk) as url:
        router = await rig.start(engine, records=[engine.record(url=url)])

        status, _, body = await rig.post()

    assert status == 502
    assert body["error"]["code"] == "upstream_failed"
    assert router.book.workers() == []


async def test_a_worker_that_falls_silent_is_given_up(rig):
    async def silent(engine, request, asked):
        await for_ever()

    engine = await rig.engine(behave=silent)
    await rig.start(engine, silence_timeout_s=0.2)

    status, _, body = await rig.post()

    assert status == 502
    assert "nothing came" in body["error"]["message"]


async def test_a_worker_that_falls_silent_on_a_used_connection_is_given_up(rig):
    async def silent(engine, request, asked):
        await for_ever()

    engine = await rig.engine()
    router = await rig.start(engine, silence_timeout_s=60)
    assert [(await rig.post())[0] for _ in range(2)] == [200, 200]
    engine.behave = silent
    (used,) = router.pool._idle[engine.url]
    used._stop_watching()  # it looks again after the time it knew
    used._silence_s = 0.2

    status, _, body = await rig.post()

    assert status == 502
    assert "nothing came" in body["error"]["message"]


async def test_a_stream_that_ends_with_its_connection_is_whole(rig):
    engine = await rig.engine()

    async def talk(reader, writer):
        while await proxy_probes(engine, reader, writer, *await read_request(reader)):
            pass
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        writer.write(EVENTS[0] + EVENTS[-1])

    async with raw_server(talk) as url:
        await rig.start(engine, records=[engine.record(url=url)])

        async with rig.client.post("/v1/completions", json=STREAM) as response:
            body = await response.read()

    assert body == EVENTS[0] + EVENTS[-1]


async def test_a_slow_client_slows_its_engine_down(rig):
    """What an engine writes faster than the client reads is not piled up in the router."""
    block = b"data: " + b"x" * 65_536 + b"\n\n"
    written = 0

    async def flood(engine, request, asked):
        nonlocal written
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(2_000):
            await response.write(block)
            written += 1
        return response

    engine = await rig.engine(behave=flood)
    await rig.start(engine)

    async with rig.client.post("/v1/completions", json=STREAM) as response:
        await response.content.readany()
        before = -1
        while before != written:  # until the engine waits
            before = written
            await asyncio.sleep(0.3)

        assert written < 500
        response.close()


async def test_small_events_are_not_held_back_on_either_side(rig):
    """TCP_NODELAY: without it an event waits 40 ms for a delayed acknowledgement."""
    engine = await rig.engine(behave=streaming(EVENTS[0], then=for_ever))
    router = await rig.start(engine)

    async with rig.client.post("/v1/completions", json=STREAM) as response:
        await response.content.readany()
        to_clients = [handler.transport for handler in rig.runner.server.connections]
        to_workers = [connection._transport for connection in router.pool.busy]

        assert to_clients
        assert to_workers
        for transport in to_clients + to_workers:
            connection = transport.get_extra_info("socket")
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
