"""Every route of an engine is reachable; those with a prompt are routed by it."""

import asyncio

import pytest
from eventually import until
from upstreams import NAMESPACE, UNPLANNED, whole

from prefixfleet.router.status import status_of
from prefixfleet.store.index import Snapshot

LONG = "The prefix cache keeps what a node computed before. " * 20
FORMS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/responses": {"input": LONG},
    "/v1/messages": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 5},
}
EQUAL_FORMS = [
    ("/v1/responses", {"input": [{"role": "user", "content": LONG}]}),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": LONG}]}]},
    ),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]}),
]
SYSTEM = "Be very brief, always. " * 10
WITH_SYSTEM = [
    (
        "/v1/chat/completions",
        {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": LONG}]},
    ),
    ("/v1/responses", {"instructions": SYSTEM, "input": LONG}),
    ("/v1/messages", {"system": SYSTEM, "messages": [{"role": "user", "content": LONG}]}),
    (
        "/v1/messages",
        {
            "system": [{"type": "text", "text": SYSTEM}],
            "messages": [{"role": "user", "content": LONG}],
        },
    ),
]
NOT_TEXT = [
    ("/v1/responses", {"input": LONG, "tools": [{"type": "function", "name": "f"}]}),
    ("/v1/responses", {"input": [{"type": "function_call_output", "output": LONG}]}),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
    ("/v1/responses", {"input": []}),
    ("/v1/responses", {"input": 7}),
    ("/v1/messages", {"messages": []}),
    ("/v1/messages", {"messages": [{"role": "system", "content": "x"}]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": []}]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": LONG}], "thinking": {"type": "x"}}),
    ("/v1/messages", {"messages": [{"role": "user", "content": LONG}], "system": [{"type": "x"}]}),
]


async def two_engines(rig, chat):
    """Of two engines the second's node holds the prefix of ``chat``."""
    engines = [await rig.engine(name) for name in "ab"]
    await rig.start(*engines)
    tokens = engines[1].tokens
    await rig.holds(engines[0], [])
    await rig.holds(engines[1], tokens.of_text(tokens.render(chat), add_special_tokens=False))


@pytest.mark.parametrize(("path", "form"), [*FORMS.items(), *EQUAL_FORMS])
async def test_a_chat_is_matched_in_every_form_of_request(rig, path, form):
    await two_engines(rig, [{"role": "user", "content": LONG}])

    status, headers, _ = await rig.post(path, **form)

    assert (status, headers["x-prefixfleet-node"]) == (200, "node-b")
    assert int(headers["x-prefixfleet-hit-tokens"]) > 0


@pytest.mark.parametrize(("path", "form"), WITH_SYSTEM)
async def test_a_system_prompt_is_part_of_the_chat_in_every_form(rig, path, form):
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": LONG}]
    await two_engines(rig, chat)

    _, headers, _ = await rig.post(path, **form)

    assert headers["x-prefixfleet-node"] == "node-b"


@pytest.mark.parametrize(("path", "form"), NOT_TEXT)
async def test_what_is_more_than_text_is_routed_by_load(rig, path, form):
    engine = await rig.engine()
    router = await rig.start(engine)

    status, headers, _ = await rig.post(path, **form)

    assert status == 200
    assert headers["x-prefixfleet-hit-tokens"] == "0"
    assert b"prefixfleet_blind_prompts_total{" in router.metrics.render()


@pytest.mark.parametrize("path", [*UNPLANNED, "/tokenize"])
async def test_requests_without_a_prefix_arrive_as_they_are(rig, path):
    engine = await rig.engine()
    await rig.start(engine)
    raw = b'{"model": "tiny", "input": "Stra\xc3\x9fe", "prompt": "x"}'

    json = {"Content-Type": "application/json"}
    async with rig.client.post(path, data=raw, headers=json) as response:
        status = response.status

    assert status == 200
    if path != "/tokenize":
        assert engine.raw == [raw]


async def test_refusals_of_messages_have_anthropics_shape(rig):
    await rig.start(await rig.engine())

    async with rig.client.post("/v1/messages", data=b"{") as response:
        body = await response.json()

    assert response.status == 400
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "allowed"),
    [("/v1/completions", "OPTIONS,POST"), ("/health", "GET,HEAD,OPTIONS")],
)
async def test_options_names_the_methods(rig, path, allowed):
    await rig.start(await rig.engine())

    async with rig.client.options(path) as response:
        assert response.status == 204
        assert response.headers["Allow"] == allowed
    async with rig.client.options("/nowhere") as response:
        assert response.status == 404


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/status"])
async def test_head_is_get_without_a_body(rig, path):
    await rig.start(await rig.engine())

    async with rig.client.head(path) as response:
        assert response.status == 200
        assert await response.read() == b""


async def test_one_model_can_be_asked_for_by_name(rig):
    engine = await rig.engine()
    await rig.start(records=[engine.record(model="org/tiny")], ready=1)

    async with rig.client.get("/v1/models") as response:
        (listed,) = (await response.json())["data"]
    async with rig.client.get("/v1/models/org/tiny") as response:
        assert await response.json() == listed
    async with rig.client.get("/v1/models/tiny") as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "model_not_found"


async def test_health_follows_the_workers(rig):
    router = await rig.start()

    async with rig.client.get("/health") as response:
        assert response.status == 503
    await rig.announce((await rig.engine()).record())
    await rig.until_ready(1)
    async with rig.client.get("/health") as response:
        assert response.status == 200
        assert (await response.json())["workers"] == {"ready": 1}
    assert router.degraded.modes() == []


async def test_status_says_what_there_is(rig):
    engine = await rig.engine()
    await rig.start(engine)
    await rig.holds(engine, engine.tokens.of_text(LONG))
    await rig.post(prompt=LONG)

    async with rig.client.get("/status") as response:
        status = await response.json()

    assert [node["node"] for node in status["nodes"]] == ["node-a"]
    assert status["workers"][0] | {"url": ""} == {
        "worker": "a",
        "node": "node-a",
        "url": "",
        "model": "tiny",
        "state": "ready",
        "reason": "",
        "load": status["workers"][0]["load"],
        "block_tokens": NAMESPACE.block_tokens,
        "block_bytes": engine.record().block_bytes,
        "adapters": {},
        "prefill": status["workers"][0]["prefill"],
    }
    assert status["workers"][0]["prefill"].keys() >= {"step_s", "s_per_thousand", "samples"}
    assert status["view"]["blocks"] > 0
    assert status["hit_rate"]["count"] == 1
    assert set(status["hit_rate"]) == {"count", "mean", "p50", "p90", "p99"}
    assert status["degraded"] == []


async def test_what_waits_here_for_a_worker_and_how_old_the_view_is_are_shown(rig):
    async def hold(engine, request, asked):
        await may_answer.wait()
        return await whole(engine, request, asked)

    may_answer = asyncio.Event()
    engine = await rig.engine(behave=hold, prefill_tokens_per_s=1.0)
    router = await rig.start(engine)
    asked = [asyncio.create_task(rig.post(prompt=str(number))) for number in range(3)]
    await until(lambda: len(router.turns) == 2)  # the first one is at the engine

    async with rig.client.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    async with rig.client.get("/status") as response:
        status = await response.json()
    may_answer.set()
    await asyncio.gather(*asked)

    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert values["prefixfleet_waiting_requests"] == "2.0"
    assert float(values["prefixfleet_waiting_tokens"]) > 0
    assert float(values["prefixfleet_index_lag_seconds"]) >= 0
    assert values["prefixfleet_index_unpublished_blocks"] == "0.0"
    assert status["waiting"]["queued_requests"] == 2
    assert status["view"]["unpublished_blocks"] == 0


async def test_an_engine_that_hashes_live_traffic_otherwise_is_noticed(rig):
    async def other_hash(engine, request, asked):
        asked = asked | {"cache_salt": "what the router does not know"}
        return await whole(engine, request, asked)

    engine = await rig.engine(behave=other_hash)
    router = await rig.start(engine)

    await rig.post(prompt=LONG)

    assert [mode.name for mode in router.degraded.modes()] == ["drift of completion"]
    assert b'prefixfleet_parity_drift_total{route="completion"} 1.0' in router.metrics.render()


async def test_a_node_that_an_emptied_index_forgot_is_shown_until_it_has_joined_again(rig):
    """Nobody died: its blocks are still found, and `status` does not say that it is gone."""

    def shown():
        nodes = status_of(router)["nodes"]
        return [(n["node"], n["lease"], n["epoch"], sorted(n["stats"])) for n in nodes]

    engine = await rig.engine()
    router = await rig.start(engine)
    await rig.holds(engine, range(64), links={"other": {}})
    node, member = engine.record().node, rig.members[engine.record().node]
    assert shown() == [(node, "held", member.epoch, ["links"])]

    list(router.view.load(Snapshot((), {}, "0-1")))
    await rig.index.leave(member)
    before = router.feed.records
    await until(lambda: router.feed.records is not before)

    assert shown() == [(node, "awaited", None, ["links"])]

    await rig.holds(engine, range(64), links={"other": {}})

    assert shown() == [(node, "held", rig.members[node].epoch, ["links"])]
