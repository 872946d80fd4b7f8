"""Stored responses through routers: asked of the worker that keeps them, by their tenant."""

import asyncio
import gzip
import hashlib
import json
from contextlib import ExitStack
from urllib.parse import quote

import openai
import pytest
from aiohttp import web
from eventually import until
from router_rig import Rig
from upstreams import events_of, for_ever, storing, streaming
from yarl import URL

from prefixfleet.router.stored import PREVIOUS
from prefixfleet.store.stored_responses import StoredResponses

ODD = ["a b", "a/b", "..", "Straße世界", "%2F", "a?b#c", '"\\', "{x}", "x" * 256]


@pytest.fixture
def keys_file(tmp_path):
    path = tmp_path / "keys.json"
    keys = [
        {"name": n, "tenant": n, "sha256": hashlib.sha256(f"key-{n}".encode()).hexdigest()} | limits
        for n, limits in {"one": {}, "two": {}, "few": {"requests_per_s": 0.001}}.items()
    ]
    path.write_text(json.dumps({"keys": keys}))
    return path


async def fleet(rig, names="ab", **settings):
    """Engines that store, with a router in front of them."""
    engines = {name: await rig.engine(name, behave=storing) for name in names}
    await rig.start(*engines.values(), **settings)
    return engines


async def replica(rig, engines, **settings):
    """Another router of the same fleet."""
    other = Rig(rig.folder, rig.stack, rig.redis_url, fleet=rig.fleet)
    await other.start(*engines.values(), **settings)
    return other


def of(tenant):
    return {"Authorization": f"Bearer key-{tenant}"} if tenant else {}


async def create(rig, tenant="", **fields):
    """Status, headers and answer of a response."""
    body = {"model": "tiny", "input": "hello"} | fields
    async with rig.client.post("/v1/responses", json=body, headers=of(tenant)) as answer:
        return answer.status, answer.headers, await answer.json()


async def create_on(rig, name):
    """A response that this one of the workers a, b and c makes: the others are busy."""
    with ExitStack() as stack:
        for other in {*"abc"} - {name}:
            busy = rig.router.book.charged(other, tokens=50_000, sequences=1, expected_s=50)
            stack.enter_context(busy)
        return (await create(rig))[2]


async def ask(rig, path, method="GET", tenant="", **options):
    """Status, headers and bytes of an answer."""
    headers = of(tenant) | options.pop("headers", {})
    async with rig.client.request(method, path, headers=headers, **options) as answer:
        return answer.status, answer.headers, await answer.read()


def error(raw):
    return json.loads(raw)["error"]


def path_of(response):
    return f"/v1/responses/{quote(response, safe='')}"


def count(rig, asked, result):
    return rig.router.metrics.stored_responses.labels(asked, result)._value.get()


async def test_reading_and_cancelling_go_to_the_worker_that_keeps_it(rig):
    """Whichever router is asked, with the query as it came."""
    engines = await fleet(rig, "abc")
    other = await replica(rig, engines)
    made = [await create_on(rig, name) for name in "abcabc"]

    for router in (rig, other):
        for response in made:
            path = f"/v1/responses/{response['id']}"
            status, headers, raw = await ask(router, path + "?a=a%20b&x=%C3%9F")
            assert (status, json.loads(raw)["served_by"]) == (200, response["served_by"])
            assert headers["x-prefixfleet-node"] == f"node-{response['served_by']}"
            assert engines[response["served_by"]].paths[-1] == path + "?a=a%20b&x=%C3%9F"
            status, _, raw = await ask(router, path + "/cancel", "POST")
            assert (status, json.loads(raw)["status"]) == (200, "cancelled")
            assert json.loads(raw)["served_by"] == response["served_by"]
    assert "".join(response["served_by"] for response in made) == "abcabc"
    assert count(other, "cancel", "found") == 6


async def test_what_goes_on_from_a_response_goes_to_its_worker(rig, caplog):
    """Though another one has nothing to do; the answer, the log and a counter say so."""
    caplog.set_level("INFO", logger="prefixfleet.router.decisions")
    engines = await fleet(rig, "abc")
    other = await replica(rig, engines)
    _, headers, first = await create(rig)
    assert "x-prefixfleet-bound" not in headers
    keeper = first["served_by"]

    for router in (rig, other):
        with router.router.book.charged(keeper, tokens=50_000, sequences=1, expected_s=0.05):
            status, headers, second = await create(router, previous_response_id=first["id"])
        assert (status, second["served_by"]) == (200, keeper)
        assert headers["x-prefixfleet-bound"] == PREVIOUS
        assert engines[keeper].seen[-1][PREVIOUS] == first["id"]
        assert count(router, "previous", "found") == 1
        router.router.afterwards.catch_up()
        line = caplog.messages[-1]
        assert line.endswith(f"; no choice: it keeps the response that {PREVIOUS} names")
    (third,) = [await create(other, previous_response_id=second["id"], stream=False)]
    assert third[2]["served_by"] == keeper


async def test_the_id_of_a_stream_is_noted_when_its_first_event_has_come(rig):
    async def begin(engine, request, asked):
        engine.stored["resp_s"] = engine.name
        first = events_of(engine, "resp_s")[0]
        return await streaming(first[:30], first[30:], then=for_ever)(engine, request, asked)

    engines = await fleet(rig)
    other = await replica(rig, engines)
    for engine in engines.values():
        engine.behave = begin
    body = {"model": "tiny", "input": "hello", "stream": True}

    async with rig.client.post("/v1/responses", json=body) as answer:
        await answer.content.readuntil(b"\n\n")
        status, headers, _ = await ask(other, path_of("resp_s"))
        assert (status, headers["x-prefixfleet-node"]) == (
            200,
            answer.headers["x-prefixfleet-node"],
        )
        answer.close()
    await until(lambda: rig.router.in_flight == 0)
    assert rig.router.metrics.unread_response_ids._value.get() == 0


async def test_a_streams_bytes_stay_as_they_are_and_can_be_read_again(rig):
    engines = await fleet(rig)
    body = {"model": "tiny", "input": "hello", "stream": True, "metadata": {"id": "resp_s"}}

    for options in ({"json": body}, {"data": _parts(body)}):  # on either way into the router
        async with rig.client.post("/v1/responses", **options) as answer:
            made = await answer.read()
            node = answer.headers["x-prefixfleet-node"]
        whole = b"".join(events_of(engines[node[-1]], "resp_s"))
        assert made == whole
        status, headers, raw = await ask(rig, "/v1/responses/resp_s?stream=true&starting_after=0")
        assert (status, raw, headers["Content-Type"]) == (200, whole, "text/event-stream")
        assert headers["x-prefixfleet-node"] == node


async def _parts(body):
    yield json.dumps(body).encode()


async def test_a_stream_that_is_cut_anywhere(rig):
    engines = await fleet(rig, "a")
    whole = b"".join(events_of(engines["a"], "resp_s"))

    async def cut(engine, request, asked):
        engine.stored["resp_s"] = engine.name
        return await streaming(*(bytes([b]) for b in whole))(engine, request, asked)

    engines["a"].behave = cut

    async with rig.client.post("/v1/responses", json={"model": "tiny", "stream": True}) as answer:
        assert await answer.read() == whole
    assert (await ask(rig, "/v1/responses/resp_s"))[0] == 200


async def test_an_answer_that_is_too_long_to_be_held_is_noted_too(rig):
    engines = await fleet(rig, "a")

    text = '{"id":"resp_l","x":"%s"}' % ("x" * (2 << 20))

    async def long(engine, request, asked):
        engine.stored["resp_l"] = engine.name
        return web.Response(text=text, content_type="application/json")

    engines["a"].behave = long

    status, _, raw = await ask(rig, "/v1/responses", "POST", json={"model": "tiny"})
    assert (status, raw.decode()) == (200, text)
    assert (await ask(rig, "/v1/responses/resp_l"))[0] == 200


async def test_what_nobody_made_is_not_found(rig):
    engines = await fleet(rig)

    for method, path in (("GET", "resp_1"), ("POST", "resp_1/cancel"), ("GET", "x" * 5_000)):
        status, _, raw = await ask(rig, f"/v1/responses/{path}", method)
        told = error(raw)
        assert (status, told["type"]) == (404, "invalid_request_error")
        assert told["code"] == "response_not_found"
        assert told["message"].endswith(" not found.")
    status, _, told = await create(rig, previous_response_id="resp_1")

    assert status == 404
    assert told["error"] == {
        "message": "Response with id 'resp_1' not found.",
        "type": "invalid_request_error",
        "param": PREVIOUS,
        "code": "previous_response_not_found",
    }
    assert not any(engine.paths for engine in engines.values())
    assert count(rig, "previous", "unknown") == 1


async def test_another_tenants_is_like_one_that_never_was(rig, keys_file):
    """Read, cancelled or gone on from; by either router."""
    engines = await fleet(rig, keys_file=keys_file)
    other = await replica(rig, engines, keys_file=keys_file)
    _, _, mine = await create(rig, "one")
    assert (await ask(other, path_of(mine["id"]), tenant="one"))[0] == 200
    seen = [list(engine.paths) for engine in engines.values()]

    for router in (rig, other):
        for method, end in (("GET", ""), ("HEAD", ""), ("POST", "/cancel")):
            theirs = await ask(router, path_of(mine["id"]) + end, method, "two")
            nobodys = await ask(router, path_of("resp_zz") + end, method, "two")
            assert theirs[0] == nobodys[0] == 404
            assert theirs[2].replace(mine["id"].encode(), b"resp_zz") == nobodys[2]
            assert theirs[1].keys() == nobodys[1].keys()
        status, _, told = await create(router, "two", previous_response_id=mine["id"])
        assert (status, told["error"]["code"]) == (404, "previous_response_not_found")
    assert [list(engine.paths) for engine in engines.values()] == seen


async def test_a_tenant_cannot_take_the_id_of_another_ones(rig, keys_file):
    """vLLM lets a request name its response; the name would be all that tells whose it is."""
    engines = await fleet(rig, keys_file=keys_file)
    _, _, mine = await create(rig, "one")

    status, _, told = await create(rig, "two", request_id=mine["id"], store=False)

    assert (status, told["error"]["param"]) == (400, "request_id")
    assert (await ask(rig, path_of(mine["id"]), tenant="two"))[0] == 404
    assert sum(len(engine.seen) for engine in engines.values()) == 1


async def test_without_keys_a_request_may_name_its_response(rig):
    await fleet(rig)

    status, _, _ = await create(rig, request_id="resp_mine", metadata={"id": "resp_mine"})

    assert status == 200
    assert (await ask(rig, path_of("resp_mine")))[0] == 200


@pytest.mark.parametrize("response", ODD)
async def test_odd_ids(rig, response):
    engines = await fleet(rig)
    other = await replica(rig, engines)
    _, _, made = await create(rig, metadata={"id": response})
    assert made["id"] == response

    for router in (rig, other):
        status, headers, _ = await ask(router, _raw(router, path_of(response)))
        assert headers["x-prefixfleet-node"] == f"node-{made['served_by']}"
        assert status == 200
        status, _, second = await create(router, previous_response_id=response)
        assert (status, second["served_by"]) == (200, made["served_by"])


def _raw(rig, path):
    """A URL that the client leaves as it is."""
    return URL(f"http://127.0.0.1:{rig.runner.addresses[0][1]}{path}", encoded=True)


async def test_one_that_is_too_long_is_not_kept(rig):
    await fleet(rig)

    await create(rig, metadata={"id": "x" * 257})

    assert (await ask(rig, path_of("x" * 257)))[0] == 404
    assert rig.router.metrics.unread_response_ids._value.get() == 1


@pytest.mark.parametrize(
    "lie",
    [
        b"",
        b"no JSON",
        b'{"output":[{"id":"resp_1"}],"id":"resp_2"}',
        b'{"id":7,"x":"\\"id\\":\\"resp_1\\""}',
        b'data: {"delta":"resp_1"}\n\ndata: {"response":{"id":"resp_1"}}\n\n',
    ],
)
async def test_a_body_that_lies_passes_and_is_not_believed(rig, lie):
    engines = await fleet(rig)
    for engine in engines.values():
        engine.stored["resp_1"] = engine.name
        engine.behave = streaming(*filter(None, [lie]))

    status, _, raw = await ask(rig, "/v1/responses", "POST", json={"model": "tiny"})

    assert (status, raw) == (200, lie)
    assert (await ask(rig, path_of("resp_1")))[0] == 404
    assert rig.router.metrics.unread_response_ids._value.get() == 1


async def test_what_shall_not_be_stored_or_failed_is_not_noted(rig):
    engines = await fleet(rig)
    await create(rig, store=False)
    await create(rig, **{PREVIOUS: 7})

    assert len(rig.router.keepers) == 0
    assert engines.keys() == {"a", "b"}
    await create(rig, store=None)
    assert len(rig.router.keepers) == 1


async def test_a_worker_that_is_gone_says_so(rig):
    engines = await fleet(rig)
    _, _, made = await create(rig)
    keeper = made["served_by"]
    await rig.registry.withdraw(keeper)
    await until(lambda: keeper not in rig.router.roster.names())

    status, _, raw = await ask(rig, path_of(made["id"]))
    assert (status, error(raw)["code"]) == (404, "response_not_found")
    assert f"worker {keeper}, which kept it, is gone" in error(raw)["message"]
    status, _, told = await create(rig, previous_response_id=made["id"])

    assert (status, told["error"]["code"]) == (404, "previous_response_not_found")
    assert f"worker {keeper}, which kept it, is gone" in told["error"]["message"]
    assert count(rig, "retrieve", "gone") == count(rig, "previous", "gone") == 1
    await rig.announce(engines[keeper].record())
    await rig.until_ready(2)
    engines[keeper].stored.clear()  # as one that was started again
    status, _, raw = await ask(rig, path_of(made["id"]))
    assert (status, error(raw)["param"]) == (404, "response_id")


async def test_a_worker_that_dies_is_told_of_and_nobody_else_is_asked(rig):
    engines = await fleet(rig)
    _, _, made = await create(rig)
    keeper = made["served_by"]
    await engines[keeper].stop()

    status, headers, told = await create(rig, previous_response_id=made["id"])
    assert (status, told["error"]["code"]) == (503, "response_unavailable")
    assert f"worker {keeper}, which alone keeps the response" in told["error"]["message"]
    assert headers["Retry-After"] == "1"
    status, headers, raw = await ask(rig, path_of(made["id"]))

    assert (status, error(raw)["code"]) == (503, "response_unavailable")
    assert f"kept by worker {keeper}, which is down" in error(raw)["message"]
    assert "Retry-After" in headers
    (alive,) = engines.keys() - {keeper}
    assert engines[alive].seen == []


async def test_a_reader_finds_out_that_a_worker_died(rig):
    engines = await fleet(rig)
    _, _, made = await create(rig)
    keeper = made["served_by"]
    await engines[keeper].stop()

    status, _, raw = await ask(rig, path_of(made["id"]))

    assert (status, error(raw)["code"]) == (503, "response_unavailable")
    assert rig.router.roster.seated(keeper)[0] == "down"


async def test_a_drained_worker_is_read_and_gets_nothing_new(rig, tmp_path):
    """What it began in the background ends there; what goes on from it may wait for `resume`."""
    (tmp_path / "admin").write_text("an admin key that nobody guesses")
    await fleet(rig, admin_key_file=tmp_path / "admin")
    _, _, made = await create(rig)
    keeper = made["served_by"]
    admin = {"Authorization": "Bearer an admin key that nobody guesses"}
    await ask(rig, f"/admin/workers/{keeper}/drain", "POST", headers=admin)

    status, headers, told = await create(rig, previous_response_id=made["id"])
    assert (status, told["error"]["param"]) == (503, PREVIOUS)
    assert f"kept by worker {keeper}, which is draining" in told["error"]["message"]
    assert int(headers["Retry-After"]) >= 1
    assert (await ask(rig, path_of(made["id"])))[0] == 200
    assert (await ask(rig, path_of(made["id"]) + "/cancel", "POST"))[0] == 200
    await ask(rig, f"/admin/workers/{keeper}/resume", "POST", headers=admin)

    assert (await create(rig, previous_response_id=made["id"]))[0] == 200


async def test_of_another_model(rig):
    big = await rig.engine("b", model="big", behave=storing)
    small = await rig.engine("a", behave=storing)
    await rig.start(records=[small.record(), big.record(model="big")])
    _, _, made = await create(rig, model="big")

    status, _, told = await create(rig, previous_response_id=made["id"])

    assert (status, told["error"]["code"]) == (404, "previous_response_not_found")
    assert "it is of 'big'" in told["error"]["message"]


async def test_of_an_adapter(rig):
    """Its engine goes on with it, as that adapter; not as one that it lacks."""
    engine = await rig.engine("a", behave=storing, adapters={"sql": "0a" * 16})
    await rig.start(engine)
    _, _, made = await create(rig, model="sql")

    status, _, _ = await create(rig, model="sql", previous_response_id=made["id"])
    other, _, told = await create(rig, model="law", previous_response_id=made["id"])

    assert (status, engine.seen[-1]["model"]) == (200, "sql")
    assert (other, told["error"]["code"]) == (404, "previous_response_not_found")


async def test_without_redis_a_router_serves_what_it_knows(rig):
    engines = await fleet(rig)
    other = await replica(rig, engines)
    _, _, made = await create(rig)
    for router in (rig, other):
        router.router.keepers.shared = away = StoredResponses("redis://127.0.0.1:1/0", "f")
        rig.stack.push_async_callback(away.close)

    assert (await ask(rig, path_of(made["id"])))[0] == 200
    assert (await create(rig, previous_response_id=made["id"]))[0] == 200
    status, headers, raw = await ask(other, path_of(made["id"]))
    assert (status, error(raw)["code"]) == (503, "response_unavailable")
    assert headers["Retry-After"] == "1"
    assert b"127.0.0.1" not in raw
    status, _, told = await create(other, previous_response_id=made["id"])

    assert (status, told["error"]["param"]) == (503, PREVIOUS)
    _, _, raw = await ask(other, "/status")
    assert "responses" in [mode["mode"] for mode in json.loads(raw)["degraded"]]


async def test_a_router_that_is_started_again_finds_them(rig):
    engines = await fleet(rig)
    _, _, made = await create(rig)
    await until(lambda: not rig.router.keepers.untold)
    _, _, raw = await ask(rig, "/status")
    assert json.loads(raw)["stored_responses"] == {"known": 1, "untold": 0}

    again = await replica(rig, engines)

    assert (await ask(again, path_of(made["id"])))[0] == 200


async def test_a_worker_that_may_be_announcing_itself_still_is_waited_for_by_the_client(rig):
    await fleet(rig, "a", worker_wait_s=600)
    rig.router.keepers.note("default", "resp_1", "later")

    status, headers, raw = await ask(rig, path_of("resp_1"))

    assert (status, error(raw)["code"]) == (503, "response_unavailable")
    assert "kept by worker later, which is not here yet" in error(raw)["message"]
    assert "Retry-After" in headers


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
    head, _, body = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
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


async def test_keys_and_limits_are_those_of_every_path(rig, keys_file):
    await fleet(rig, keys_file=keys_file)
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


async def test_the_key_stays_here_and_the_requests_name_goes_on(rig, keys_file):
    engines = await fleet(rig, "a", keys_file=keys_file)
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

    await asyncio.wait_for(engines["a"].cancelled.wait(), 10)
    await until(lambda: rig.router.in_flight == 0)
