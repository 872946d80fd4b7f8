"""Requests through a router: what arrives at the engine, and what comes back."""

import asyncio
import gzip
import json

import pytest
from aiohttp import web
from eventually import until
from multidict import CIMultiDict
from router_rig import chain_of
from upstreams import EVENTS, for_ever, streaming, whole

from prefixfleet.router.charge import Load
from prefixfleet.router.headers import Passing

LONG = "The prefix cache keeps what a node computed before. " * 20


async def test_a_completion_comes_back_as_the_engine_wrote_it(rig):
    engine = await rig.engine()
    await rig.start(engine)

    status, headers, answer = await rig.post(prompt="hello", max_tokens=5)

    assert status == 200
    assert answer["choices"][0]["text"] == "a"
    assert headers["x-prefixfleet-node"] == "node-a"
    assert headers["x-prefixfleet-hit-tokens"] == "0"
    assert headers["x-prefixfleet-pulled-tokens"] == "0"
    assert int(headers["x-prefixfleet-estimate-ms"]) > 0
    plan = engine.seen[0]["kv_transfer_params"]["prefixfleet"]
    assert plan["request"] == headers["x-prefixfleet-request"]
    assert plan["source"] == ""


async def test_every_other_byte_of_the_body_arrives_untouched(rig):
    engine = await rig.engine()
    await rig.start(engine)
    raw = (
        '{ "model" :"tiny",  "prompt":"Stra\\u00dfe 世界", "n":1e0, "x":{"a":[1, 2.50]},'
        '"tools":[{"type":"function"}] }\n'
    ).encode()

    async with rig.client.post("/v1/completions", data=raw) as response:
        assert response.status == 200

    assert engine.raw[0].startswith(raw.rstrip()[:-1])
    assert engine.seen[0] | {"kv_transfer_params": None} == json.loads(raw) | {
        "kv_transfer_params": None
    }


async def test_a_stream_arrives_byte_for_byte(rig):
    engine = await rig.engine()
    await rig.start(engine)

    async with rig.client.post(
        "/v1/chat/completions",
        json={"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "ß"}]},
    ) as response:
        body = await response.read()

    assert response.content_type == "text/event-stream"
    assert body == b"".join(EVENTS)


async def test_events_cut_anywhere_arrive_whole(rig):
    stream = b"".join(EVENTS)
    engine = await rig.engine(behave=streaming(*(bytes([byte]) for byte in stream)))
    await rig.start(engine)

    async with rig.client.post(
        "/v1/completions", json={"model": "tiny", "prompt": "x", "stream": True}
    ) as response:
        body = await response.read()

    assert body == stream
    assert "世界 🙂".replace(" ", "") in body.decode().replace(" ", "").replace(
        '"}]}\n\ndata:{"choices":[{"index":0,"text":"', ""
    )


async def test_the_first_event_does_not_wait_for_the_second(rig):
    engine = await rig.engine(behave=streaming(EVENTS[0], then=for_ever))
    await rig.start(engine)

    async with rig.client.post(
        "/v1/completions", json={"model": "tiny", "prompt": "x", "stream": True}
    ) as response:
        first = await asyncio.wait_for(response.content.readany(), 30)

    assert first == EVENTS[0]


async def test_a_client_that_leaves_a_stream_cancels_it_upstream_and_frees_its_load(rig):
    engine = await rig.engine(behave=streaming(EVENTS[0], then=for_ever))
    router = await rig.start(engine)

    async with rig.client.post(
        "/v1/completions", json={"model": "tiny", "prompt": "x", "stream": True}
    ) as response:
        await response.content.readany()
        assert router.book.load("a") == Load(decoding=1)
        response.close()

    await asyncio.wait_for(engine.cancelled.wait(), 30)
    await until(lambda: router.book.load("a") == Load())
    assert router.in_flight == 0


async def test_a_client_that_leaves_before_the_first_byte_cancels_too(rig):
    started = asyncio.Event()

    async def never(engine, request, asked):
        started.set()
        await for_ever()

    engine = await rig.engine(behave=never)
    router = await rig.start(engine)

    asking = asyncio.create_task(rig.post())
    await asyncio.wait_for(started.wait(), 30)
    assert router.book.load("a").queued_requests == 1
    asking.cancel()

    await asyncio.wait_for(engine.cancelled.wait(), 30)
    await until(lambda: router.book.load("a") == Load())


async def test_the_node_that_holds_the_prefix_gets_the_request(rig):
    engines = [await rig.engine(name) for name in "abc"]
    await rig.start(*engines)
    ids = engines[1].tokens.of_text(LONG)
    for engine in (engines[0], engines[2]):
        await rig.holds(engine, [])
    await rig.holds(engines[1], ids)

    for _ in range(3):
        _, headers, answer = await rig.post(prompt=LONG)

        assert answer["choices"][0]["text"] == "b"
        assert int(headers["x-prefixfleet-hit-tokens"]) == (len(ids) - 1) // 16 * 16


async def test_a_chat_is_matched_as_its_template_renders_it(rig):
    engines = [await rig.engine(name) for name in "ab"]
    await rig.start(*engines)
    chat = [{"role": "user", "content": LONG}]
    tokens = engines[0].tokens
    ids = tokens.of_text(tokens.render(chat), add_special_tokens=False)
    await rig.holds(engines[0], [])
    await rig.holds(engines[1], ids)

    _, headers, _ = await rig.post("/v1/chat/completions", messages=chat)

    assert headers["x-prefixfleet-node"] == "node-b"
    assert int(headers["x-prefixfleet-hit-tokens"]) == (len(ids) - 1) // 16 * 16


async def test_token_ids_are_matched_and_their_order_counts(rig):
    engines = [await rig.engine(name) for name in "ab"]
    await rig.start(*engines)
    ids = list(range(3, 203))
    await rig.holds(engines[0], ids[::-1])
    await rig.holds(engines[1], ids)

    _, forth, _ = await rig.post(prompt=ids)
    _, back, _ = await rig.post(prompt=ids[::-1])
    _, several, _ = await rig.post(prompt=[[5, 6], ids])

    nodes = [headers["x-prefixfleet-node"] for headers in (forth, back, several)]
    assert nodes == ["node-b", "node-a", "node-b"]


async def test_a_busy_holder_is_relieved_by_a_pull_and_the_plan_says_so(rig):
    engines = [await rig.engine(name) for name in "ab"]
    router = await rig.start(*engines)
    ids = engines[0].tokens.of_text(LONG)
    await rig.holds(engines[0], ids)
    await rig.holds(
        engines[1], [], links={"node-a": {"link": "tcp", "bytes_per_s": 1e9, "setup_s": 0.001}}
    )

    with router.book.charged("a", tokens=50_000, sequences=1, expected_s=50):
        _, headers, _ = await rig.post(prompt=LONG)

    blocks = (len(ids) - 1) // 16
    plan = engines[1].seen[0]["kv_transfer_params"]["prefixfleet"]
    assert headers["x-prefixfleet-node"] == "node-b"
    assert headers["x-prefixfleet-pulled-tokens"] == str(blocks * 16)
    assert (plan["source"], plan["blocks"]) == ("node-a", blocks)
    assert plan["source_epoch"] == rig.members["node-a"].epoch
    assert plan["budget_s"] >= 1.0


async def test_a_slow_link_makes_the_router_prefer_computing(rig):
    engines = [await rig.engine(name) for name in "ab"]
    router = await rig.start(*engines)
    await rig.holds(engines[0], engines[0].tokens.of_text(LONG))
    await rig.holds(
        engines[1], [], links={"node-a": {"link": "tcp", "bytes_per_s": 1e3, "setup_s": 1}}
    )

    with router.book.charged("a", tokens=50_000, sequences=1, expected_s=50):
        _, headers, _ = await rig.post(prompt=LONG)

    assert headers["x-prefixfleet-node"] == "node-b"
    assert headers["x-prefixfleet-pulled-tokens"] == "0"


async def test_a_salt_isolates(rig):
    engines = [await rig.engine(name) for name in "ab"]
    await rig.start(*engines)
    await rig.holds(engines[0], engines[0].tokens.of_text(LONG))

    _, salted, _ = await rig.post(prompt=LONG, cache_salt="tenant")
    _, plain, _ = await rig.post(prompt=LONG)

    assert salted["x-prefixfleet-hit-tokens"] == "0"
    assert int(plain["x-prefixfleet-hit-tokens"]) > 0


async def test_siblings_of_a_burst_follow_the_first(rig):
    engines = [await rig.engine(name) for name in "abc"]
    await rig.start(*engines)
    for engine in engines:
        await rig.holds(engine, [])

    nodes = [(await rig.post(prompt=LONG))[1]["x-prefixfleet-node"] for _ in range(5)]

    assert len(set(nodes)) == 1


async def test_load_is_counted_before_the_first_byte(rig):
    """A burst of different cold prompts spreads, though no engine has answered yet."""
    release = asyncio.Event()

    async def wait(engine, request, asked):
        await release.wait()
        return await whole(engine, request, asked)

    # so slow that no estimate says a prefill is over while the burst still comes in
    engines = [await rig.engine(name, behave=wait, prefill_tokens_per_s=1.0) for name in "abcd"]
    await rig.start(*engines)

    asking = [asyncio.create_task(rig.post(prompt=f"{i} {LONG}")) for i in range(4)]
    await until(lambda: sum(len(engine.seen) for engine in engines) == 4)
    counts = [len(engine.seen) for engine in engines]
    release.set()
    await asyncio.gather(*asking)

    assert counts == [1, 1, 1, 1]


async def test_what_a_client_says_about_transfers_is_dropped(rig):
    engine = await rig.engine()
    await rig.start(engine)
    forged = {"prefixfleet": {"source": "evil"}, "do_remote_prefill": True}

    status, _, _ = await rig.post(kv_transfer_params=forged)
    raw = b'{"model":"tiny","prompt":"x","kv\\u005ftransfer_params":{"do_remote_prefill":true}}'
    async with rig.client.post("/v1/completions", data=raw) as response:
        assert response.status == 200

    assert status == 200
    for asked in engine.seen:
        assert list(asked["kv_transfer_params"]) == ["prefixfleet"]
        assert asked["kv_transfer_params"]["prefixfleet"]["source"] == ""
    assert b"do_remote_prefill" not in b"".join(engine.raw)


async def test_headers_pass_but_for_those_of_one_hop_and_ours(rig):
    engine = await rig.engine()
    await rig.start(engine)

    headers = {
        "Authorization": "Bearer key",
        "X-Custom": "Straße",
        "X-Prefixfleet-Node": "forged",
        "Connection": "keep-alive, X-Hop",
        "X-Hop": "1",
        "TE": "trailers",
        "X-Request-Id": "mine",
    }
    url, asked = "/v1/completions?a=%C3%9F&b=1", {"model": "tiny", "prompt": "x"}
    async with rig.client.post(url, json=asked, headers=headers) as response:
        assert response.status == 200

    seen = {name.lower(): value for name, value in engine.seen_headers[0].items()}
    assert seen["authorization"] == "Bearer key"
    assert seen["x-custom"] == "Straße"
    assert seen["x-request-id"] == "mine"
    assert seen["content-type"] == "application/json"
    assert not {"x-prefixfleet-node", "x-hop", "te"} & seen.keys()
    assert engine.paths == ["/v1/completions?a=%C3%9F&b=1"]


@pytest.mark.parametrize("said", [["X-Hop, x-2"], ["keep-alive, X-Hop", "X-2"]])
def test_whatever_a_hop_names_as_its_own_ends_there(said):
    hop = [("Connection", value) for value in said]
    passing = Passing(CIMultiDict([*hop, ("X-Hop", "1"), ("X-2", "2"), ("X-3", "3")]))

    assert passing.lines == "X-3: 3\r\n"


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip"])
async def test_a_gzip_body_is_understood_and_forwarded_plain(rig, encoding):
    engine = await rig.engine()
    await rig.start(engine)
    body = gzip.compress(json.dumps({"model": "tiny", "prompt": "x" * 9_000}).encode())

    async with rig.client.post(
        "/v1/completions", data=body, headers={"Content-Encoding": encoding}
    ) as response:
        status = response.status

    assert status == 200
    assert engine.seen[0]["prompt"] == "x" * 9_000
    assert "Content-Encoding" not in engine.seen_headers[0]


async def test_images_are_routed_by_load_and_counted(rig):
    engine = await rig.engine()
    router = await rig.start(engine)
    parts = [
        {"type": "text", "text": "what?"},
        {"type": "image_url", "image_url": {"url": "data:,"}},
    ]

    status, headers, _ = await rig.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": parts}]
    )

    assert status == 200
    assert headers["x-prefixfleet-hit-tokens"] == "0"
    assert engine.seen[0]["messages"][0]["content"] == parts
    assert b'prefixfleet_blind_prompts_total{route="chat"} 1.0' in router.metrics.render()


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], ["", "a"], None, 7, {"a": 1}, [-1, 5], [2**40] * 20, [1.5], [[1], "a"]]
)
async def test_odd_prompts_go_to_the_engine_which_judges_them(rig, prompt):
    engine = await rig.engine()
    await rig.start(engine)

    status, _, _ = await rig.post(prompt=prompt)

    assert status == 200
    assert engine.seen[0]["prompt"] == prompt


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": None},
        {"messages": "text"},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": "a"}], "tools": [{}]},
        {"messages": [{"role": "user", "content": "a"}], "tools": "x"},
        {"messages": [{"role": "user", "content": "a"}], "chat_template": "{{ 7 }}"},
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"tools": 1}},
        {"messages": [{"role": "user", "content": "a"}], "n": "many"},
    ],
)
async def test_odd_chats_go_to_the_engine_which_judges_them(rig, fields):
    engine = await rig.engine()
    await rig.start(engine)

    status, _, _ = await rig.post("/v1/chat/completions", **fields)

    assert status == 200


async def test_the_engines_own_refusal_passes_through(rig):
    async def refuse(engine, request, asked):
        return web.json_response({"error": {"message": "too long", "type": "x"}}, status=400)

    engine = await rig.engine(behave=refuse)
    router = await rig.start(engine)

    status, headers, answer = await rig.post()

    assert (status, answer["error"]["message"]) == (400, "too long")
    assert headers["x-prefixfleet-node"] == "node-a"
    assert router.hit_ratios.maxlen
    assert not router.hit_ratios


async def test_what_the_engine_reports_is_counted(rig):
    engine = await rig.engine()
    router = await rig.start(engine)

    await rig.post(prompt=LONG)

    metrics = router.metrics.render()
    assert b'prefixfleet_prompt_tokens_total{basis="reported",source="computed"}' in metrics
    assert list(router.hit_ratios) == [0.0]


async def test_the_chains_of_tests_are_those_of_the_engine(rig):
    engine = await rig.engine()
    await rig.start(engine)
    ids = engine.tokens.of_text(LONG)

    _, _, answer = await rig.post(prompt=LONG)

    assert answer["kv_transfer_params"]["prefixfleet"]["head"] == chain_of(ids)[0].hex()
