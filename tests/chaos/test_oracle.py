"""The judge of a chaos run sees a wrong answer, a stream that stops as if it were whole, and an
error that does not say what it is; a skewed clock is a wrong clock."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest
import skewed_clock
from aiohttp import web
from aiohttp.test_utils import TestServer
from chaos_client import OK, RESET, STREAM_CUT, STREAM_TOLD, WRONG, replied
from chaos_model import cold_answer
from chaos_oracle import Oracle

PROMPT = list(range(1, 40))
RIGHT = cold_answer(PROMPT)


def event(text):
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text}]}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
TOLD = b'data: {"error": {"message": "m", "type": "t", "code": "upstream_failed"}}\n\n'


async def judge(answer, *, stream):
    """What the oracle says of an answer that ``answer`` writes."""
    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        oracle = Oracle([str(server.make_url("")).rstrip("/")], 1)
        sending = oracle._send(session, oracle.urls[0], PROMPT, stream)
        return await replied(sending, 30)


def streaming(*chunks, cut=False):
    async def answer(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        if cut:
            request.transport.abort()
            await asyncio.Event().wait()
        return response

    return answer


@pytest.mark.parametrize(
    ("answer", "how"),
    [
        (streaming(event(RIGHT[:9]), event(RIGHT[9:]), DONE), OK),
        (streaming(event(RIGHT[:-1]), DONE), WRONG),
        (streaming(event(RIGHT[:9])), "unclear: a stream ended as if it were whole"),
        (streaming(event(RIGHT[:9]), TOLD), STREAM_TOLD),
        (streaming(event(RIGHT[:9]), cut=True), STREAM_CUT),
        (streaming(cut=True), STREAM_CUT),
    ],
)
async def test_streams(answer, how):
    reply = await judge(answer, stream=True)

    assert (reply.how, reply.again) == (how, False)


def whole(status, body, **headers):
    async def answer(request):
        return web.json_response(body, status=status, headers=headers)

    return answer


ERROR = {"error": {"message": "m", "type": "server_error", "code": "no_worker"}}
SILENT = {"error": {"message": "", "type": "server_error", "code": "x"}}


@pytest.mark.parametrize(
    ("answer", "how", "again"),
    [
        (whole(503, ERROR), "503 no_worker", True),
        (whole(404, ERROR), "404 no_worker", False),
        (whole(502, {}), "unclear: 502 without an error object", False),
        (whole(500, SILENT), "unclear: 500 without an error object", False),
    ],
)
async def test_refusals(answer, how, again):
    reply = await judge(answer, stream=False)

    assert (reply.how, reply.again) == (how, again)


async def test_an_answer_of_other_kv_is_wrong():
    outcome = {"local_blocks": 1, "pulled_blocks": 0, "prompt_blocks": 2}
    body = {"kv_transfer_params": {"prefixfleet": outcome}}

    for text, how in ((RIGHT, OK), (RIGHT[::-1], WRONG)):
        answer = whole(200, body | {"choices": [{"index": 0, "text": text}]})
        assert (await judge(answer, stream=False)).how == how


async def test_a_connection_that_breaks_before_the_answer_is_asked_again():
    async def answer(request):
        request.transport.abort()
        await asyncio.Event().wait()

    reply = await judge(answer, stream=False)

    assert (reply.how, reply.again) == (RESET, True)


def test_a_skewed_clock_is_wrong_by_what_was_set(tmp_path):
    path = tmp_path / "skew"
    skewed_clock.set_skew(path, -86_400.0)
    code = (
        "import sys, time; from pathlib import Path; from skewed_clock import install, set_skew\n"
        "true, true_ns = time.time, time.time_ns; install(Path(sys.argv[1]))\n"
        "print(round(time.time() - true()), round((time.time_ns() - true_ns()) / 1e9))\n"
        "set_skew(Path(sys.argv[1]), 0.0); print(round(time.time() - true()))"
    )
    command = [sys.executable, "-c", code, str(path)]
    said = subprocess.run(
        command, cwd=Path(skewed_clock.__file__).parent, capture_output=True, text=True, check=True
    )

    assert said.stdout.split() == ["-86400", "-86400", "0"]
