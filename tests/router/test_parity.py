"""A worker that computes something else than the router gets no traffic, and status says why."""

import json
from dataclasses import replace

import pytest
from aiohttp import web
from chats import TEMPLATES, write_model
from eventually import until
from upstreams import NAMESPACE, raw_server, read_request, whole


def standing(router):
    return router.roster.standings()[0]


async def refused_because(rig, engine, record=None):
    router = await rig.start(records=[record or engine.record()], ready=0)
    await until(lambda: standing(router).state == "refused")
    status, _, _ = await rig.post()
    assert status == 503
    assert engine.seen == []
    return standing(router).reason


@pytest.mark.parametrize("template", sorted(TEMPLATES))
async def test_an_engine_that_agrees_is_ready(rig, tmp_path, template):
    rig.folder = write_model(tmp_path, TEMPLATES[template])
    router = await rig.start(await rig.engine())

    assert standing(router).state == "ready"


async def test_an_engine_without_a_chat_template_serves_completions(rig, tmp_path):
    rig.folder = write_model(tmp_path, None)
    await rig.start(await rig.engine())

    status, _, _ = await rig.post()

    assert status == 200


@pytest.mark.parametrize("other", ["headers", "parts"])
async def test_another_chat_template_is_refused(rig, tmp_path, other):
    engine = await rig.engine()
    folder = write_model(tmp_path, TEMPLATES[other])

    reason = await refused_because(rig, engine, engine.record(model_path=str(folder)))

    assert "chat template" in reason


async def test_another_tokenizer_is_refused(rig, tmp_path):
    engine = await rig.engine()
    folder = write_model(tmp_path)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["post_processor"]["special_tokens"]["<|bos|>"]["ids"] = [1]
    path.write_text(json.dumps(tokenizer))

    reason = await refused_because(rig, engine, engine.record(model_path=str(folder)))

    assert "differ at position 0" in reason


@pytest.mark.parametrize(
    "change",
    [
        {"block_tokens": 32},
        {"model": "other"},
        {"weights": "1"},
        {"dtype": "float16"},
        {"layout": "other"},
        {"tensor_parallel": 2},
        {"isa": "avx2"},
        {"engine": "sglang"},
        {"encoding": "fp8"},
    ],
)
async def test_another_namespace_is_refused(rig, change):
    engine = await rig.engine(namespace=replace(NAMESPACE, **change))

    reason = await refused_because(rig, engine)

    assert "hash of the first block" in reason


async def test_another_secret_is_refused_without_naming_it(rig):
    engine = await rig.engine(secret=b"another secret of many bytes")

    reason = await refused_because(rig, engine)

    assert "cluster secret" in reason
    assert "another" not in reason


async def test_an_engine_that_ignores_salts_is_refused(rig):
    async def unsalted(engine, request, asked):
        return await whole(engine, request, {k: v for k, v in asked.items() if k != "cache_salt"})

    reason = await refused_because(rig, await rig.engine(probe=unsalted))

    assert "with a salt" in reason


async def test_an_engine_without_the_connector_is_refused(rig):
    async def plain(engine, request, asked):
        return web.json_response({"choices": [{"text": "x"}]})

    reason = await refused_because(rig, await rig.engine(probe=plain))

    assert "connector" in reason


@pytest.mark.parametrize(
    "change",
    [
        {"namespace": {}},
        {"namespace": {"model": 7}},
        {"model_path": "/nowhere"},
    ],
)
async def test_a_record_that_cannot_be_used_is_refused(rig, change):
    engine = await rig.engine()

    reason = await refused_because(rig, engine, engine.record(**change))

    assert "namespace" in reason or "tokenizer.json" in reason


async def test_an_answer_that_is_no_json_is_refused(rig):
    engine = await rig.engine()

    async def talk(reader, writer):
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")

    async with raw_server(talk) as url:
        reason = await refused_because(rig, engine, engine.record(url=url))

    assert "no JSON" in reason


async def test_a_refused_worker_is_examined_again_when_its_record_changes(rig, tmp_path):
    engine = await rig.engine()
    router = await rig.start(records=[engine.record(model_path=str(tmp_path))], ready=0)
    await until(lambda: standing(router).state == "refused")

    await rig.announce(engine.record())

    await rig.until_ready(1)


async def test_an_engine_that_is_not_up_yet_is_asked_again(rig):
    engine = await rig.engine()
    port = int(engine.url.rsplit(":", 1)[1])
    await engine.stop()
    router = await rig.start(records=[engine.record()], ready=0)
    await until(lambda: standing(router).reason)
    assert standing(router).state == "checking"

    async with engine.running(port):
        await rig.until_ready(1)


async def test_a_worker_of_another_model_is_served_beside(rig, tmp_path):
    other = await rig.engine("b", model="other")
    tiny = await rig.engine("a")
    await rig.start(tiny, other)

    _, _, first = await rig.post(model="tiny")
    _, _, second = await rig.post(model="other")
    async with rig.client.get("/v1/models") as response:
        models = [entry["id"] for entry in (await response.json())["data"]]

    assert (first["choices"][0]["text"], second["choices"][0]["text"]) == ("a", "b")
    assert models == ["other", "tiny"]


async def test_a_draining_worker_finishes_but_gets_nothing_new(rig):
    engines = [await rig.engine(name) for name in "ab"]
    router = await rig.start(*engines)
    await rig.announce(engines[0].record(state="draining"))
    await until(lambda: router.roster.standings()[0].state == "draining")

    answers = [await rig.post() for _ in range(5)]

    assert {headers["x-prefixfleet-node"] for _, headers, _ in answers} == {"node-b"}

    await rig.announce(engines[0].record())
    await rig.until_ready(2)


async def test_a_worker_that_leaves_the_registry_leaves_the_router(rig):
    router = await rig.start(await rig.engine())
    await rig.registry.withdraw("a")

    await until(lambda: router.roster.standings() == [])
    status, _, _ = await rig.post()

    assert status == 503
