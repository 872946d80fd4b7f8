"""LoRA adapters by name: who has them serves them, and their prefixes are nobody else's."""

import asyncio

import aiohttp
import pytest
from aiohttp import web
from engine_publisher import EnginePublisher
from eventually import until
from router_process import announced, router_process
from static_entries import entry, write

from prefixfleet.router import adapter_notices
from prefixfleet.store.adapters import MAX_BYTES

LONG = "The prefix cache keeps what a node computed before. " * 20
SQL, LAW = "0a" * 16, "0b" * 16
HIT, NODE = "x-prefixfleet-hit-tokens", "x-prefixfleet-node"


async def models(rig):
    async with rig.client.get("/v1/models") as response:
        return {card["id"]: card.get("parent") for card in (await response.json())["data"]}


async def nodes(rig, count=8, **body):
    answers = [await rig.post(**body) for _ in range(count)]
    assert [status for status, _, _ in answers] == [200] * count, answers
    return {headers[NODE] for _, headers, _ in answers}


async def two(rig, **options):
    """Engines a and b; only b has the adapter `sql`."""
    engines = [await rig.engine("a"), await rig.engine("b", adapters={"sql": SQL})]
    await rig.start(*engines, **options)
    return engines


async def test_an_adapter_is_served_by_who_has_it_as_a_model_of_its_own(rig):
    engines = await two(rig)

    assert await models(rig) == {"tiny": None, "sql": "tiny"}
    assert await nodes(rig, model="sql") == {"node-b"}
    assert {asked["model"] for asked in engines[1].seen} == {"sql"}
    assert await nodes(rig, model="tiny", count=16) == {"node-a", "node-b"}
    async with rig.client.get("/v1/models/sql") as response:
        assert (response.status, (await response.json())["parent"]) == (200, "tiny")


async def test_another_name_is_an_unknown_model(rig):
    await two(rig)

    status, _, body = await rig.post(model="law")

    assert (status, body["error"]["code"]) == (404, "model_not_found")
    assert "['sql', 'tiny']" in body["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_an_adapters_prompt_is_hashed_as_its_engine_does(rig, path):
    """The fake reports the head of the chain that the connector makes; the router compares."""
    engine = await rig.engine("a", adapters={"sql": SQL})
    router = await rig.start(engine)
    ask = {"prompt": LONG} if path == "/v1/completions" else {"messages": [user(LONG)]}
    ask = {"input": LONG} if path == "/v1/responses" else ask

    assert (await rig.post(path, model="sql", **ask))[0] == 200
    router.afterwards.catch_up()
    assert not router.degraded.modes()

    engine.adapters["sql"] = LAW  # the engine loaded other files, and its worker does not know yet
    assert (await rig.post(path, model="sql", **ask))[0] == 200
    router.afterwards.catch_up()
    assert [mode.name for mode in router.degraded.modes()] == ["drift of adapter 'sql'"]
    router.roster.take([engine.record()])  # now it says so
    assert not router.degraded.modes()


def user(text):
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("held", "asked", "hit"),
    [
        (SQL, "sql", True),
        ("", "tiny", True),
        (SQL, "tiny", False),
        ("", "sql", False),
        (LAW, "sql", False),
        (SQL, "law", False),
    ],
)
async def test_a_prefix_is_found_for_its_own_adapter_only(rig, held, asked, hit):
    engines = [await rig.engine(name, adapters={"sql": SQL, "law": LAW}) for name in "ab"]
    await rig.start(*engines)
    ids = engines[0].tokens.of_text(LONG)
    await rig.holds(engines[0], ids, lora=held)

    _, headers, _ = await rig.post(model=asked, prompt=LONG)

    assert (headers[HIT] != "0") == hit
    if hit:
        assert (headers[NODE], headers[HIT]) == ("node-a", str(len(ids) // 16 * 16))


async def test_the_same_name_with_other_files_shares_nothing(rig):
    """Two workers call different adapters the same: what one holds is no hit for the other."""
    engines = [
        await rig.engine("a", adapters={"sql": SQL}),
        await rig.engine("b", adapters={"sql": LAW}),
    ]
    await rig.start(*engines)
    ids = engines[0].tokens.of_text(LONG)
    await rig.holds(engines[0], ids, links={}, lora=SQL)
    rig.stack.enter_context(rig.router.book.charged("a", tokens=9_000, sequences=1, expected_s=90))

    _, headers, _ = await rig.post(model="sql", prompt=LONG)

    assert (headers[NODE], headers[HIT], headers["x-prefixfleet-pulled-tokens"]) == (
        "node-b",
        "0",
        "0",
    )


async def test_an_adapter_whose_files_cannot_be_told_is_placed_by_load(rig):
    engine = await rig.engine("a", adapters={"sql": ""})
    router = await rig.start(engine)
    await rig.holds(engine, engine.tokens.of_text(LONG))

    status, headers, _ = await rig.post(model="sql", prompt=LONG)

    assert (status, headers[HIT]) == (200, "0")
    router.afterwards.catch_up()
    assert not router.degraded.modes()
    async with rig.client.get("/status") as response:
        assert (await response.json())["workers"][0]["adapters"] == {"sql": "by load"}


async def test_adapters_come_and_go_without_another_examination(rig):
    engine = await rig.engine("a")
    router = await rig.start(engine)
    worker, examined = router.roster.openings.ready("tiny")[0], len(engine.paths)

    await rig.lists(engine.record(adapters={"sql": SQL, "law": LAW}))
    sql, law = router.roster.openings.ready("sql")[0], router.roster.openings.ready("law")[0]
    assert await models(rig) == {"tiny": None, "sql": "tiny", "law": "tiny"}
    await rig.lists(engine.record(adapters={"sql": SQL, "law": SQL}))

    assert router.roster.openings.ready("tiny")[0] is worker
    assert router.roster.openings.ready("sql")[0] is sql
    assert router.roster.openings.ready("law")[0] is not law
    await rig.lists(engine.record())
    assert (await rig.post(model="sql"))[0] == 404
    assert (await rig.post(model="tiny"))[0] == 200
    assert len(engine.paths) == examined + 1


async def test_a_request_waits_for_an_adapter_whose_worker_is_away(rig):
    engines = await two(rig, worker_wait_s=300)
    await engines[1].stop()
    rig.router.roster.lost("b", "the test says so")

    asked = asyncio.create_task(rig.post(model="sql"))
    await until(lambda: rig.router.without_worker == 1)
    async with engines[1].running(int(engines[1].url.rsplit(":", 1)[1])):
        assert (await asked)[1][NODE] == "node-b"
    assert {asked["model"] for asked in engines[0].seen} <= {"tiny"}


async def test_an_adapter_that_one_engine_unloaded_is_served_by_another_that_has_it(rig):
    """A worker says it seconds later; the engine is no worse for its other models."""

    async def unloaded(engine, request, asked):
        return web.json_response({"error": {"code": 404}}, status=404)

    gone = await rig.engine("a", adapters={"sql": SQL}, behave=unloaded)
    has = await rig.engine("b", adapters={"sql": SQL})
    router = await rig.start(gone, has)
    for times in range(1, 6):  # more than it takes to eject a worker
        with rig.asked_first(gone, has):
            status, headers, _ = await rig.post(model="sql")
        assert (status, headers[NODE], len(gone.seen)) == (200, "node-b", times)
    assert router.roster.is_ready("a")
    with rig.asked_first(gone, has):  # what it says of a model goes to the client
        assert (await rig.post(model="tiny"))[0] == 404

    has.behave = unloaded
    assert (await rig.post(model="sql"))[0] == 404


async def test_an_adapter_whose_workers_are_all_drained_is_refused_at_once(rig):
    engines = await two(rig, worker_wait_s=0.3)
    await until(lambda: rig.router.roster._workers.is_whole)
    await rig.lists(engines[0].record(), engines[1].record(state="draining"))

    status, _, body = await rig.post(model="sql")

    assert (status, body["error"]["code"]) == (503, "no_worker")
    assert "prefixfleet resume" in body["error"]["message"]
    assert (await rig.post(model="tiny"))[0] == 200


async def test_a_name_that_means_two_things_goes_one_way_and_is_said(rig):
    """Prompts of two models are read otherwise: a choice between them would be by chance."""
    engines = [
        await rig.engine("a", adapters={"both": SQL, "other": SQL}),
        await rig.engine("b", model="other", adapters={"both": SQL}),
    ]
    router = await rig.start(*engines)

    assert await nodes(rig, model="both") == {"node-b"}
    assert await nodes(rig, model="other") == {"node-b"}
    (mode,) = router.degraded.modes()
    assert "['both', 'other']" in mode.reason
    assert await models(rig) == {"tiny": None, "other": None, "both": "other"}
    router.roster.take([engines[0].record(adapters={}), engines[1].record()])
    assert not router.degraded.modes()
    router.roster.take([engines[0].record()])
    assert not router.degraded.modes()
    router.roster.take([engine.record() for engine in engines])  # the model came later
    assert router.degraded.modes()


@pytest.mark.parametrize("model", ["another", "sql"])
async def test_a_refused_worker_takes_no_name_from_others(rig, tmp_path, model):
    """Of a model that comes first, or that is called like another's adapter."""
    engine = await rig.engine("b", adapters={"sql": SQL})
    other = await rig.engine("a", model=model)
    wrong = other.record(model_path=str(tmp_path), adapters={"sql": SQL})
    router = await rig.start(records=[engine.record(), wrong], ready=1)
    await until(lambda: {s.state for s in router.roster.standings()} == {"ready", "refused"})

    assert await nodes(rig, model="sql") == {"node-b"}


async def test_of_too_many_adapters_the_first_are_served(rig, monkeypatch):
    monkeypatch.setattr(adapter_notices, "MAX_ADAPTERS", 2)
    engine = await rig.engine("a", adapters={"c": SQL, "b": SQL, "a": SQL})
    router = await rig.start(engine)

    assert (await rig.post(model="b"))[0] == 200
    assert (await rig.post(model="c"))[0] == 404
    assert [mode.name for mode in router.degraded.modes()] == ["number of adapters of a"]
    router.roster.take([])
    assert not router.degraded.modes()


async def plain(rig, tmp_path, publisher=None, **settings):
    """Plain vLLM servers a and b; only a has the adapter `sql`."""
    engines = [
        await rig.engine("a", plain=True, adapters={"sql": ""}),
        await rig.engine("b", plain=True),
    ]
    entries = [entry(engines[0], publisher), entry(engines[1])]
    await rig.start(records=[], ready=2, workers_file=write(tmp_path / "w", *entries), **settings)
    return engines


async def test_a_plain_engine_is_asked_for_its_adapters(rig, tmp_path):
    engines = await plain(rig, tmp_path)

    assert await models(rig) == {"tiny": None, "sql": "tiny"}
    assert await nodes(rig, model="sql") == {"static:a"}
    assert {asked["model"] for asked in engines[0].seen} == {"sql"}


async def test_a_plain_engines_adapters_that_come_and_go_are_seen_by_health_checks(rig, tmp_path):
    engines = await plain(rig, tmp_path, health_interval_s=0.02)

    engines[1].adapters["law"] = ""
    await until(lambda: "law" in rig.router.roster._seats["b"].serves)
    assert await nodes(rig, model="law", count=2) == {"static:b"}

    del engines[1].adapters["law"]
    await until(lambda: "law" not in rig.router.roster._seats["b"].serves)
    assert (await rig.post(model="law"))[0] == 404


@pytest.mark.parametrize(
    ("told", "hit"),
    [
        ({"lora_name": "sql", "lora_id": 1, "extra_keys": "sql"}, True),
        ({}, False),
        ({"lora_name": "law", "lora_id": 1, "extra_keys": "law"}, False),
        ({"lora_name": "sql", "lora_id": 1, "extra_keys": "law"}, False),
        ({"lora_id": 1}, False),
    ],
)
async def test_a_plain_engines_events_tell_adapters_apart(rig, tmp_path, told, hit):
    async with EnginePublisher() as publisher:
        engines = await plain(rig, tmp_path, publisher)
        await publisher.heard()
        ids = engines[0].tokens.of_text(LONG)
        blocks = len(ids) // 16
        if name := told.get("extra_keys"):
            told = told | {"extra_keys": [[name]] * blocks}
        await publisher.publish(publisher.stored(ids, **told))
        await publisher.publish(publisher.stored(range(32)))  # so that the first was applied
        await until(lambda: len(rig.router.engines.view) >= 2)

        _, headers, _ = await rig.post(model="sql", prompt=LONG)

        assert headers[HIT] == (str(blocks * 16) if hit else "0")


@pytest.mark.parametrize(
    ("status", "body", "degraded"),
    [
        (500, b"", True),
        (200, b"{", True),
        (200, b'{"data": [{"id": 7}]}', True),
        (200, b" " * (MAX_BYTES + 1), True),
        (
            200,
            b'{"data": [{"id": "", "parent": "tiny"}, {"id": "%s", "parent": "x"}]}' % (b"n" * 300),
            False,
        ),
        (404, b"", False),
        (401, b"", False),
    ],
)
async def test_what_is_no_list_of_models_is_said_and_costs_the_engine_nothing(
    rig, tmp_path, status, body, degraded
):
    async def answer(request):
        return web.Response(status=status, body=body)

    engine = await rig.engine("a", plain=True)
    engine._models = answer
    await engine.stop()
    async with engine.running():
        await rig.start(records=[], ready=1, workers_file=write(tmp_path / "w", entry(engine)))

        assert await models(rig) == {"tiny": None}
        assert (await rig.post())[0] == 200
        names = [mode.name for mode in rig.router.degraded.modes()]
        assert names == (["adapters of a"] if degraded else [])


async def test_sglang_takes_adapters_otherwise_so_none_of_its_is_served(rig, tmp_path):
    """Asked for an adapter by its bare name it would answer as the base model."""
    engine = await rig.engine("a", plain=True, adapters={"sql": ""})
    listed = write(tmp_path / "w", entry(engine, engine="sglang"))
    await rig.start(records=[], ready=1, workers_file=listed)

    assert await models(rig) == {"tiny": None}
    assert (await rig.post(model="sql"))[0] == 404


async def test_a_router_process_serves_adapters_of_a_live_fleet(rig, tmp_path):
    engines = [
        await rig.engine("a", adapters={"sql": SQL}),
        await rig.engine("b", adapters={"sql": SQL, "law": LAW}),
        await rig.engine("c"),
    ]
    await announced(rig, *engines)
    async with (
        router_process(rig, tmp_path, slow_start_s=0) as (url, _),
        aiohttp.ClientSession(url) as client,
    ):

        async def ask(model):
            async with client.post(
                "/v1/completions", json={"model": model, "prompt": LONG}
            ) as response:
                return response.status, response.headers.get(NODE)

        await until(lambda: served(client, 3))
        assert {await ask("law") for _ in range(4)} == {(200, "node-b")}
        assert {await ask("sql") for _ in range(24)} <= {(200, "node-a"), (200, "node-b")}
        assert (await ask("none"))[0] == 404
        assert {asked["model"] for asked in engines[2].seen} <= {"tiny"}


async def served(client, count):
    async with client.get("/v1/models") as response:
        ids = {card["id"] for card in (await response.json())["data"]}
    async with client.get("/status") as response:
        workers = (await response.json())["workers"]
    return len(ids) == count and [w["state"] for w in workers] == ["ready"] * 3
