"""What clients may send on the paths of stored responses, and what engines say there."""

import asyncio
import gzip

import openai
import pytest
from aiohttp import web
from eventually import until
from stored_responses import ask, create, error, fleet, path_of, replica
from upstreams import for_ever, streaming


@pytest.mark.parametrize("status", [400, 404, 500, 503])
async def test_what_the_engine_says_to_a_reader_passes(rig, status):
    """But for what is not its own word: that it has no time."""
    engines = await fleet(rig, "a")
    _, _, made = await create(rig)

    async def refuse(engine, request, asked):
        return web.json_response({"error": {"message": "its own"}}, status=status)

    engines["a"].read = refuse

    told, _, raw = await ask(rig, path_of(made["id"]))

    assert told == status
    if status == 503:
        assert error(raw)["code"] == "response_unavailable"
    else:
        assert error(raw) == {"message": "its own"}
    assert rig.router.roster.is_ready("a")


@pytest.mark.parametrize(
    ("encoding", "body", "expected"),
    [("gzip", b"no gzip", 400), ("br", b"x", 415), ("gzip", gzip.compress(b"x" * 3_000), 413)],
)
async def test_a_body_that_cannot_be_read(rig, encoding, body, expected):
    await fleet(rig, "a", max_body_bytes=2_000)
    _, _, made = await create(rig)

    status, _, raw = await ask(
        rig,
        path_of(made["id"]) + "/cancel",
        "POST",
        data=body,
        headers={"Content-Encoding": encoding},
    )

    assert (status, error(raw)["type"]) == (expected, "invalid_request_error")


@pytest.mark.parametrize(
    "target",
    [
        b"/v1/responses/%00",
        b"/v1/responses/%FF%FE",
        b"/v1/responses/%ED%A0%80/cancel",
        b"/v1/responses/\xe4\xb8\x96",
        b"/v1/responses/\xff",
        b"/v1/responses/%0d%0aX-A:%20b",
        b"/v1/responses/..",
        b"/v1/responses/x?stream=%FF&stream=&=&&\xff",
        b"/v1/responses/x#y?z",
        b"/v1/responses/" + b"x" * 7_000,
        b"//v1/responses/x",
    ],
)
@pytest.mark.parametrize("method", [b"GET", b"HEAD", b"POST", b"DELETE", b"OPTIONS"])
async def test_no_path_is_a_fault_of_ours(rig, method, target):
    await fleet(rig, "a")
    reader, writer = await asyncio.open_connection(*rig.runner.addresses[0][:2])

    writer.write(
        b"%b %b HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        % (method, target)
    )
    head, _, body = (await asyncio.wait_for(reader.read(), 30)).partition(b"\r\n\r\n")
    writer.close()

    status = int(head.split()[1])
    assert status in (204, 400, 404, 405)
    if method != b"HEAD" and status != 204:
        assert error(body)["type"] == "invalid_request_error"


async def test_the_official_client_reads_resumes_and_cancels(rig):
    other = await replica(rig, await fleet(rig))
    bases = [f"http://127.0.0.1:{r.runner.addresses[0][1]}/v1" for r in (rig, other)]
    one, two = (openai.AsyncOpenAI(base_url=b, api_key="any", max_retries=0) for b in bases)
    async with one, two:
        made = await one.responses.create(model="tiny", input="hello")
        more = await two.responses.create(model="tiny", input="x", previous_response_id=made.id)
        assert (await two.responses.retrieve(more.id)).id == more.id
        assert (await two.responses.cancel(made.id)).status == "cancelled"
        async with await two.responses.retrieve(made.id, stream=True, starting_after=0) as events:
            kinds = [event.type async for event in events]
        assert kinds == ["response.created", "response.in_progress", "response.completed"]
        with pytest.raises(openai.NotFoundError) as refused:
            await one.responses.create(model="tiny", input="x", previous_response_id="resp_zz")
        assert refused.value.code == "previous_response_not_found"
        with pytest.raises(openai.NotFoundError, match="resp_zz"):
            await two.responses.retrieve("resp_zz")


async def test_keys_and_limits_are_those_of_every_path(rig, tenants_file):
    await fleet(rig, keys_file=tenants_file)
    _, _, made = await create(rig, "one")
    path = path_of(made["id"])

    for method, end in (("GET", ""), ("POST", "/cancel")):
        assert (await ask(rig, path + end, method))[0] == 401
        assert (await ask(rig, path + end, method, "wrong"))[0] == 401
    by_header = {"X-Api-Key": "key-one"}
    assert (await ask(rig, path, headers=by_header))[0] == 200
    assert (await ask(rig, path, tenant="few"))[0] == 404
    status, headers, raw = await ask(rig, path, tenant="few")
    assert (status, error(raw)["type"]) == (429, "rate_limit_error")
    assert "Retry-After" in headers
    rig.router.in_flight += rig.router.settings.max_in_flight
    assert (await ask(rig, path, tenant="one"))[0] == 429
    rig.router.in_flight -= rig.router.settings.max_in_flight


async def test_the_key_stays_here_and_the_requests_name_goes_on(rig, tenants_file):
    engines = await fleet(rig, "a", keys_file=tenants_file)
    _, _, made = await create(rig, "one")

    _, headers, _ = await ask(
        rig, path_of(made["id"]), tenant="one", headers={"X-Request-Id": "mine", "X-A": "b"}
    )

    seen = {name.lower(): value for name, value in engines["a"].seen_headers[-1].items()}
    assert "authorization" not in seen
    assert (seen["x-request-id"], seen["x-a"]) == ("mine", "b")
    assert headers["x-request-id"] == "mine"
    assert "content-length" not in seen


async def test_other_methods(rig):
    engines = await fleet(rig)
    _, _, made = await create(rig)
    path = path_of(made["id"])

    status, headers, raw = await ask(rig, path, "HEAD")
    assert (status, raw) == (200, b"")
    assert headers["x-prefixfleet-node"] == f"node-{made['served_by']}"
    assert int(headers["Content-Length"]) > 2
    status, headers, raw = await ask(rig, path + "?stream=true", "HEAD")
    assert (status, raw, headers["Content-Type"]) == (200, b"", "text/event-stream")
    for target, allowed in ((path, "GET,HEAD,OPTIONS"), (path + "/cancel", "OPTIONS,POST")):
        status, headers, raw = await ask(rig, target, "OPTIONS")
        assert (status, headers["Allow"], raw) == (204, allowed, b"")
    for target, method in ((path, "DELETE"), (path, "POST"), (path + "/cancel", "GET")):
        status, headers, raw = await ask(rig, target, method)
        assert (status, error(raw)["type"]) == (405, "invalid_request_error")
        assert headers["Allow"]
    for target in ("/v1/responses/", path + "/input_items", "/v1/responses//cancel"):
        assert (await ask(rig, target))[0] in (404, 405)
    assert sum(len(e.paths) for e in engines.values()) == 3
    assert (await ask(rig, path))[0] == 200  # connections are whole


async def test_a_reader_that_leaves_cancels_at_the_engine(rig):
    engines = await fleet(rig, "a")
    _, _, made = await create(rig)
    engines["a"].read = streaming(b"data: 1\n\n", then=for_ever)

    async with rig.client.get(path_of(made["id"])) as answer:
        assert await answer.content.readany() == b"data: 1\n\n"
        answer.close()

    await asyncio.wait_for(engines["a"].cancelled.wait(), 30)
    await until(lambda: rig.router.in_flight == 0)
