"""Any client and any engine at a live router: a clear answer or an end, never its own failure."""

import asyncio
import json
import os
from contextlib import AsyncExitStack

import aiohttp
import pytest
from chats import write_model
from fuzz_bytes import edited, hostile_bytes
from fuzz_targets import TARGETS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from router_rig import Rig
from upstreams import raw_server, read_request

from prefixfleet.router.routes import ROUTES

LIMIT_S = 30.0
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "48")) // 4
FEW = settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), database=None)
HEADERS = {
    "Content-Encoding": ["gzip", "deflate", "br", "identity", "\xa0gzip"],
    "X-Prefixfleet-Ttft-Deadline-Ms": ["0", "-1", "\u0661", "9" * 30, "1e3", "5000"],
    "Authorization": ["", "Bearer", "Basic x", "Bearer \xff"],
    "X-Request-Id": ["a\tb", "\xe9", "x" * 3000],
    "Connection": ["close", "keep-alive, Authorization"],
    "Content-Type": ["text/plain", ""],
}
ANSWERS = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"15\r\ndata: {\"choices\":[]}\n\n\r\n0\r\n\r\n",
    b"HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}",
)  # fmt: skip


class Live:
    """A router, its engine, and a loop that a plain function can use."""

    def __init__(self, runner, rig, engine):
        self.runner = runner
        self.rig = rig
        self.engine = engine

    def ask(self, path, body, headers):
        async def ask():
            async with asyncio.timeout(LIMIT_S):
                async with self.rig.client.post(path, data=body, headers=headers) as response:
                    return response.status, await response.read()

        return self.runner.run(ask())

    def say(self, data):
        """What comes back for raw bytes on a fresh connection that then sends no more."""

        async def say():
            address = self.rig.runner.addresses[0][:2]
            async with asyncio.timeout(LIMIT_S):
                reader, writer = await asyncio.open_connection(*address)
                try:
                    writer.write(data)
                    writer.write_eof()
                    return await reader.read()
                except ConnectionError:
                    return b""
                finally:
                    writer.close()

        return self.runner.run(say())


@pytest.fixture(scope="module")
def live(tmp_path_factory, redis_server):
    folder = write_model(tmp_path_factory.mktemp("fuzz-model"))
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()

        async def start():
            rig = Rig(folder, stack, redis_server.url)
            engine = await rig.engine()
            await rig.start(engine, max_body_bytes=1 << 20)
            return Live(runner, rig, engine)

        yield runner.run(start())
        runner.run(stack.aclose())


async def pass_on_probe(engine, writer, head, body):
    """Answer the router's parity probes as the real fake does; whether this was one."""
    if b"kv_transfer_params" in body:
        return False
    path, kind = head.split(b" ")[1].decode(), {"Content-Type": "application/json"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(engine.url + path, data=body, headers=kind) as response,
    ):
        content = await response.read()
    length = b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(content)
    writer.write(b"HTTP/1.1 %d OK\r\n%b%b" % (response.status, length, content))
    return True


headers = st.fixed_dictionaries(
    {}, optional={name: st.sampled_from(some) for name, some in HEADERS.items()}
)


def check_answer(status, content):
    assert b"internal_error" not in content
    if content[:9] == b'{"error":' and b"served_by" not in content:
        error = json.loads(content)["error"]
        assert isinstance(error, dict)
        assert error["message"]
    assert 200 <= status < 600


@FEW
@given(
    path=st.sampled_from([route.path for route in ROUTES]),
    body=hostile_bytes(TARGETS["body"].seeds),
    headers=headers,
)
def test_any_body_gets_a_clear_answer(live, path, body, headers):
    status, content = live.ask(path, body, headers)

    check_answer(status, content)
    assert live.rig.router.book.workers() == []


@FEW
@given(
    data=hostile_bytes(
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 31\r\n\r\n"
            b'{"model": "tiny", "prompt":"x"}',
            b"GET /status HTTP/1.1\r\nHost: h\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"2\r\n{}\r\n0\r\n\r\n",
        )
    )
)
def test_any_bytes_on_a_connection_get_an_answer_or_its_end(live, data):
    check_answer(200, live.say(data))

    assert live.ask("/v1/completions", b'{"model":"tiny","prompt":"x"}', {})[0] == 200


@FEW
@given(data=edited(ANSWERS), streamed=st.booleans())
def test_any_answer_of_an_engine_ends_the_request(live, data, streamed):
    """Cut, garbled or too long: the client gets what is right, an error, or a broken stream."""

    async def talk(reader, writer):
        while True:
            head, body = await read_request(reader)
            if not await pass_on_probe(live.engine, writer, head, body):
                writer.write(data)
                return

    async def ask():
        async with raw_server(talk) as url:
            record = live.engine.record(worker="hostile", url=url, model="hostile")
            await live.rig.announce(record)
            await live.rig.until_ready(2)
            async with asyncio.timeout(LIMIT_S):
                body = {"model": "hostile", "prompt": "x", "stream": streamed}
                try:
                    async with live.rig.client.post("/v1/completions", json=body) as response:
                        check_answer(response.status, await response.read())
                except aiohttp.ClientPayloadError:
                    pass  # a stream that broke: the client is told by its framing
            await live.rig.registry.withdraw("hostile")
            await live.rig.until_ready(1)

    live.runner.run(ask())
    assert live.rig.router.book.workers() == []
