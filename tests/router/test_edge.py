"""What a client's connection may do outside of any route: how that is answered, counted, logged."""

import asyncio
import json
import logging
import socket

import pytest
from eventually import until
from upstreams import streaming

JSON_HEAD = b"Host: x\r\nContent-Type: application/json\r\n"
UNREADABLE = {
    "length that is no number": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: abc",
    "two lengths": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n"
    b"Content-Length: 2",
    "negative length": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1",
    "length and chunks": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n"
    b"Transfer-Encoding: chunked",
    "chunk without a size": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    b"Transfer-Encoding: chunked\r\n\r\nzz",
    "long header": b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 9_000,
    "unknown method": b"FOO /health HTTP/1.1\r\nHost: x",
    "raw bytes in the query": "GET /health?ä HTTP/1.1\r\nHost: x".encode(),
    "many headers": b"GET /health HTTP/1.1\r\nHost: x"
    + b"".join(b"\r\nA%d: a" % n for n in range(300)),
    "expectation": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nExpect: foo",
}
LIMIT_S = 60


async def answer_to(rig, data):
    """Status line, headers and body of the answer that ends the connection."""
    reader, writer = await asyncio.open_connection(*rig.runner.addresses[0][:2])
    try:
        writer.write(data + b"\r\n\r\n")
        async with asyncio.timeout(LIMIT_S):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    line, *fields = head.decode().split("\r\n")
    return line, {n.lower(): v for n, _, v in (f.partition(": ") for f in fields)}, body


@pytest.mark.parametrize("what", UNREADABLE)
async def test_what_cannot_be_read_is_refused_in_shape_counted_and_not_logged(rig, caplog, what):
    await rig.start(await rig.engine())
    caplog.set_level(logging.INFO)
    caplog.clear()

    line, headers, body = await answer_to(rig, UNREADABLE[what])

    status = 417 if what == "expectation" else 400
    assert line.startswith(f"HTTP/1.1 {status} ")
    assert headers["content-type"].startswith("application/json")
    assert headers["x-request-id"]
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert not [record for record in caplog.records if "aiohttp" in record.name or record.exc_info]
    rig.router.afterwards.catch_up()
    counted = rig.router.metrics.render().decode()
    assert f'status="{status}"}} 1.0' in counted


@pytest.mark.parametrize("head", [b"", b"TE: trailers\r\n"], ids=["plain", "any"])
async def test_who_does_not_read_its_answer_loses_its_place(rig, head):
    engine = await rig.engine()
    engine.behave = streaming(*[b"data: " + b"x" * 65_536 + b"\n\n"] * 640)
    await rig.start(engine)
    rig.runner.lanes._edge.unread_s = 0.5  # the setting is the engines' silence too
    body = json.dumps({"model": "tiny", "prompt": "hello", "stream": True}).encode()
    with socket.create_connection(rig.runner.addresses[0][:2]) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        length = b"Content-Length: %d\r\n\r\n" % len(body)
        deaf.sendall(b"POST /v1/completions HTTP/1.1\r\n" + JSON_HEAD + head + length + body)

        await until(lambda: engine.seen)
        await until(lambda: rig.router.in_flight == 0)

        assert rig.router.book.load("a").decoding == 0
        assert not rig.router.pool.busy
        assert 'cut_clients_total{reason="unread"} 1.0' in rig.router.metrics.render().decode()
