"""What a client may try at the router, and what it must not learn or reach."""

import asyncio
import json
import logging

import pytest
from eventually import until
from upstreams import SECRET

from prefixfleet.router import client
from prefixfleet.store.namespace import hash_key
from prefixfleet.store.prefetch import prefetch_key

PLAN = {"prefixfleet": {"version": 1, "request": "x", "source": "evil", "source_epoch": 1}}
LONG = "A document that a tenant has read before. " * 30


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"]
)
@pytest.mark.parametrize(
    "form", ['"kv_transfer_params"', '"kv\\u005ftransfer_params"', '"kv_transfer_params" ']
)
async def test_a_forged_plan_never_reaches_an_engine(rig, path, form):
    """However the field's name is written, and said twice: the engine sees the router's only."""
    engine = await rig.engine()
    await rig.start(engine)
    forged = json.dumps(PLAN)
    body = (
        '{"model":"tiny","max_tokens":4,"prompt":"hello","input":"hello",'
        '"messages":[{"role":"user","content":"hello"}],%s:%s,"a":1,%s:%s}'
    )

    async with rig.client.post(path, data=body % (form, forged, form, forged)) as response:
        assert response.status == 200, await response.text()

    (seen,) = engine.seen
    assert seen["kv_transfer_params"]["prefixfleet"]["source"] == ""
    assert b"evil" not in engine.raw[0]


async def test_forged_headers_of_ours_do_not_pass(rig):
    engine = await rig.engine()
    await rig.start(engine)
    forged = {"X-Prefixfleet-Node": "evil", "x-prefixfleet-signature": "0" * 64}

    async with rig.client.post(
        "/v1/completions", json={"model": "tiny", "prompt": "x"}, headers=forged
    ) as response:
        assert response.headers["x-prefixfleet-node"] == "node-a"

    assert not any(name.lower().startswith("x-prefixfleet") for name in engine.seen_headers[0])


async def test_a_body_that_does_not_come_gives_its_place_back(rig, monkeypatch):
    """Slow-loris: places in flight are bounded, so nobody may sit on them."""
    monkeypatch.setattr(client, "BODY_S", 0.2)
    await rig.start(await rig.engine(), max_in_flight=2)
    address = rig.runner.addresses[0][:2]
    head = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n{"
    slow = []
    for _ in range(3):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(head)
        slow.append((reader, writer))
    async with asyncio.timeout(30):
        answers = [await reader.readuntil(b"\r\n") for reader, _ in slow]
    await until(lambda: rig.router.in_flight == 0)

    assert all(line.split()[1] in (b"408", b"429") for line in answers)
    assert any(line.split()[1] == b"408" for line in answers)
    assert (await rig.post())[0] == 200
    for _, writer in slow:
        writer.close()


@pytest.mark.parametrize("path", ["/v1/../../etc/passwd", "/v1/%2e%2e/status", "//v1/models/../x"])
async def test_no_path_leads_anywhere_else(rig, path):
    engine = await rig.engine()
    await rig.start(engine)
    reader, writer = await asyncio.open_connection(*rig.runner.addresses[0][:2])
    writer.write(b"POST %b HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}" % path.encode())

    async with asyncio.timeout(30):
        status = int((await reader.readuntil(b"\r\n")).split()[1])

    assert status in (400, 404, 405)
    assert engine.paths == []
    writer.close()


async def test_no_client_writes_a_line_into_the_log(rig, caplog):
    """Names, roles and types that end a line and go on as another entry."""
    line = "x\n2026-01-01 ERROR prefixfleet: all is lost\r\n"
    engine = await rig.engine()
    await rig.start(engine)
    with caplog.at_level(logging.DEBUG):
        await rig.post(model=line)
        await rig.post(prompt=[{"type": line}], kind=line)
        parts = [{"type": line, "text": line}]
        for content in (line, parts, [{"type": "text", "text": line, line: 1}]):
            await rig.post(
                "/v1/chat/completions", messages=[{"role": line, "content": content}], tools=line
            )
        async with rig.client.get(f"/{line.encode().hex()}") as response:
            assert response.status == 404

    said = [r.getMessage() for r in caplog.records if r.name.startswith("prefixfleet")]
    assert said
    assert not any("\n" in text or "\r" in text for text in said)


async def test_nothing_that_is_shown_or_logged_holds_a_secret(rig, caplog, tmp_path):
    engine = await rig.engine()
    with caplog.at_level(logging.DEBUG):
        await rig.start(engine)
        await rig.holds(engine, engine.tokens.of_text(LONG))
        await rig.post(prompt=LONG)
        shown = []
        for path in ("/health", "/status", "/metrics", "/v1/models"):
            async with rig.client.get(path) as response:
                shown.append(await response.text())

    password = rig.redis_url.split(":")[2].split("@")[0]
    for text in (*shown, caplog.text, repr(rig.router.settings)):
        for secret in (SECRET, hash_key(SECRET), prefetch_key(SECRET)):
            assert secret.hex() not in text
            assert repr(secret)[2:-1] not in text
        assert password not in text
        assert "A document that a tenant" not in text  # nor what clients say
