"""Whatever a client sends gets a clear answer in the OpenAI error shape; a mistake is no 5xx."""

import asyncio
import gzip
import json

import pytest
from eventually import until
from upstreams import for_ever

LIMIT_S = 30


async def ask(rig, data=b"", path="/v1/completions", method="POST", **options):
    async with rig.client.request(method, path, data=data, **options) as response:
        raw = await response.read()
        return response, json.loads(raw) if raw else None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b"null",
        b'"text"',
        b'{"model":"tiny","prompt":"x"}}',
        b'{"model":"tiny","prompt":"x",}',
        b'{"prompt":"x"}',
        b'{"model":null,"prompt":"x"}',
        b'{"model":7,"prompt":"x"}',
        b'{"model":"tiny","prompt":"\\ud800"}',
        b"\xff\xfe{}",
        b'{"model":"tiny","prompt":NaN}',
        b'{"model":"tiny","prompt":"x","n":16385}',
        b'{"model":"tiny","prompt":"x","n":1' + b"0" * 400 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_what_is_no_request_is_the_clients_mistake(rig, data, path):
    engine = await rig.engine()
    await rig.start(engine)

    response, body = await ask(rig, data, path)

    assert response.status == 400
    assert body["error"]["type"] == "invalid_request_error"
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert engine.seen == []


async def test_an_encoding_that_nobody_understands_is_415(rig):
    await rig.start(await rig.engine())

    response, body = await ask(rig, b"x", headers={"Content-Encoding": "br"})

    assert response.status == 415
    assert "gzip" in body["error"]["message"]


async def test_broken_gzip_is_the_clients_mistake(rig):
    await rig.start(await rig.engine())

    for data in (
        b"",
        b"not gzip",
        gzip.compress(b"{}") + b"more",
        gzip.compress(b'{"model":"tiny"}')[:-9],
    ):
        response, body = await ask(rig, data, headers={"Content-Encoding": "gzip"})

        assert response.status == 400
        assert body["error"]["type"] == "invalid_request_error"


async def test_an_unknown_model_is_404_and_says_which_there_are(rig):
    await rig.start(await rig.engine())

    response, body = await ask(rig, b'{"model":"gpt-99\xc3\x9f","prompt":"x"}')

    assert response.status == 404
    assert body["error"]["code"] == "model_not_found"
    assert "tiny" in body["error"]["message"]


async def test_without_workers_the_answer_is_503(rig):
    await rig.start()

    response, body = await ask(rig, b'{"model":"tiny","prompt":"x"}')

    assert response.status == 503
    assert body["error"]["code"] == "no_worker"
    assert int(response.headers["Retry-After"]) >= 1


@pytest.mark.parametrize("size", [2_000, 200_000])
async def test_a_body_over_the_limit_is_413(rig, size):
    engine = await rig.engine()
    await rig.start(engine, max_body_bytes=1_024)

    response, body = await ask(rig, json.dumps({"model": "tiny", "prompt": "x" * size}).encode())

    assert response.status == 413
    assert body["error"]["code"] == "request_too_large"
    assert "PREFIXFLEET_ROUTER_MAX_BODY_BYTES" in body["error"]["message"]
    assert engine.seen == []


WAITS = b"Expect: 100-continue\r\n"


@pytest.fixture
async def announce(rig):
    """Sends the head of a request on a connection of its own; its reader, its writer, and the
    first line that comes back."""

    async def announce(length, *headers):
        reader, writer = await asyncio.open_connection(*rig.runner.addresses[0][:2])
        rig.stack.callback(writer.close)
        length = b"Content-Length: %d\r\n" % length
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + length + b"".join(headers)
        writer.write(head + b"\r\n")
        async with asyncio.timeout(LIMIT_S):
            return reader, writer, await reader.readline()

    return announce


@pytest.mark.parametrize("headers", [[], [WAITS]], ids=["sends", "waits"])
async def test_a_body_that_is_announced_too_large_need_not_come(rig, announce, headers):
    await rig.start(await rig.engine(), max_body_bytes=1_024)

    _, _, line = await announce(1_025, *headers)

    assert line.startswith(b"HTTP/1.1 413 ")


async def test_who_asks_first_is_admitted_first(rig, announce, tenants_file):
    engine = await rig.engine()
    await rig.start(engine, keys_file=tenants_file)
    body = json.dumps({"model": "tiny", "prompt": "x"}).encode()

    reader, _, line = await announce(len(body), WAITS)
    assert line.startswith(b"HTTP/1.1 401 ")
    async with asyncio.timeout(LIMIT_S):
        assert b"\r\nConnection: close\r\n" in await reader.readuntil(b"\r\n\r\n")
    reader, writer, line = await announce(len(body), WAITS, b"Authorization: Bearer key-one\r\n")
    assert line.startswith(b"HTTP/1.1 100 ")
    writer.write(body)
    async with asyncio.timeout(LIMIT_S):
        assert await reader.readline() == b"\r\n"
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    assert len(engine.seen) == 1


async def test_a_text_that_was_cut_within_a_character_is_named(rig):
    await rig.start(await rig.engine())

    response, body = await ask(rig, b'{"model":"tiny","prompt":"caf\\ud83d","user":"u"}')

    assert response.status == 400
    assert "\\ud83d without its second part" in body["error"]["message"]


async def test_what_only_looks_like_half_a_character_is_a_bad_request_too(rig):
    await rig.start(await rig.engine())

    response, body = await ask(rig, b'{"model":"tiny","prompt":"caf\\ud8\xff\xff"}')

    assert response.status == 400
    assert "half of a character" not in body["error"]["message"]


async def test_a_small_body_that_unpacks_over_the_limit_is_413(rig):
    await rig.start(await rig.engine(), max_body_bytes=4_096)
    bomb = gzip.compress(b'{"model":"tiny","prompt":"' + b"x" * 1_000_000 + b'"}')

    response, _ = await ask(rig, bomb, headers={"Content-Encoding": "gzip"})

    assert response.status == 413


async def test_a_prompt_of_a_million_characters_under_the_limit_is_served(rig):
    engine = await rig.engine()
    await rig.start(engine)

    status, headers, _ = await rig.post(prompt="many words here " * 62_500)

    assert status == 200
    assert len(engine.seen[0]["prompt"]) == 1_000_000
    assert headers["x-prefixfleet-hit-tokens"] == "0"


async def test_a_full_router_is_429_with_a_time_to_come_back(rig):
    async def never(engine, request, asked):
        await for_ever()

    engine = await rig.engine(behave=never)
    router = await rig.start(engine, max_in_flight=2)
    waiting = [asyncio.create_task(rig.post()) for _ in range(2)]
    await until(lambda: len(engine.seen) == 2)

    response, body = await ask(rig, b'{"model":"tiny","prompt":"x"}')

    assert response.status == 429
    assert body["error"]["code"] == "overloaded"
    assert int(response.headers["Retry-After"]) >= 1
    for task in waiting:
        task.cancel()
    await until(lambda: router.in_flight == 0)


async def test_a_request_that_would_be_late_is_429_at_once(rig):
    engine = await rig.engine(prefill_tokens_per_s=10.0)
    await rig.start(engine, ttft_slo_s=2.0)

    response, body = await ask(
        rig, json.dumps({"model": "tiny", "prompt": list(range(100))}).encode()
    )

    assert response.status == 429
    assert "10.0" in body["error"]["message"]
    assert int(response.headers["Retry-After"]) == 8
    assert engine.seen == []


@pytest.mark.parametrize("path", ["/", "/v1", "/v2/completions", "/v1/completions/x", "/%00"])
async def test_an_unknown_path_is_404_in_shape(rig, path):
    await rig.start(await rig.engine())

    response, body = await ask(rig, path=path)

    assert response.status == 404
    assert body["error"]["code"] == "not_found"


async def test_a_wrong_method_is_405_and_names_the_right_one(rig):
    await rig.start(await rig.engine())

    response, body = await ask(rig, method="GET")

    assert response.status == 405
    assert response.headers["Allow"] == "OPTIONS,POST"
    assert body["error"]["type"] == "invalid_request_error"


async def test_a_fault_of_the_router_is_500_in_shape_and_logged(rig, monkeypatch, caplog):
    router = await rig.start(await rig.engine())
    monkeypatch.setattr(router.dispatcher, "decide", lambda *_: 1 / 0)

    response, body = await ask(rig, b'{"model":"tiny","prompt":"x"}')

    assert response.status == 500
    assert "ZeroDivisionError" in caplog.text
    assert "ZeroDivision" not in body["error"]["message"]
    assert router.book.workers() == []


async def test_a_loop_of_the_router_that_fails_is_seen_and_begins_anew(rig, monkeypatch, caplog):
    router = await rig.start(await rig.engine())
    reload, rounds = router.reload, []
    monkeypatch.setattr(router, "reload", lambda: rounds.append(1 / len(rounds)))
    await until(lambda: "ZeroDivisionError" in caplog.text)

    monkeypatch.setattr(router, "reload", lambda: (rounds.append(1), reload()))
    await until(lambda: rounds)

    async with rig.client.get("/status") as response:
        modes = [entry["mode"] for entry in (await response.json())["degraded"]]
    assert modes == ["loop files"]


async def test_metrics_have_bounded_labels_whatever_clients_send(rig):
    router = await rig.start(await rig.engine())
    for i in range(50):
        await ask(rig, path=f"/v1/{i}")
        await ask(rig, json.dumps({"model": f"m{i}", "prompt": "x"}).encode())
        await ask(rig, method="GET", path=f"/health?x={i}")

    lines = router.metrics.render().decode().splitlines()

    assert sum(line.startswith("prefixfleet_requests_total{") for line in lines) <= 4
