"""A real vLLM server without our connector behind the router: its own KV events say what it has."""

import json
from contextlib import AsyncExitStack

import pytest
from engines import Engine
from eventually import until
from router_rig import Rig
from tiny_adapter import write_adapter

from prefixfleet.cluster.engine_command import BLOCK_TOKENS
from prefixfleet.cluster.model import default_cache_dir, demo_model
from prefixfleet.cluster.ports import hold_port
from prefixfleet.cluster.settings import WorkerSettings

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

WORDS = "Every node keeps the blocks that it computed, and an index knows who has which. " * 30


@pytest.fixture(scope="module")
def model():
    return demo_model(default_cache_dir(), lambda _: None)


@pytest.fixture(scope="module")
def plain_engine(tmp_path_factory, model):
    """The server, and the endpoints of its events."""
    folder = tmp_path_factory.mktemp("p")
    settings = WorkerSettings(
        name="plain",
        node="plain",
        model=model,
        served_name="model",
        socket_path=folder / "unused.sock",
        log_file=folder / "plain.log",
        kv_cache_bytes=256 << 20,
        max_model_tokens=2048,
    )
    adapter = write_adapter(folder / "sql", model, seed=1)
    with hold_port("127.0.0.1") as one, hold_port("127.0.0.1") as two:
        events, replay = (f"tcp://*:{held.getsockname()[1]}" for held in (one, two))
        config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events}
        config["replay_endpoint"] = replay
        options = ["--kv-events-config", json.dumps(config), "--enable-lora", "--max-lora-rank"]
        options += ["8", "--lora-modules", f"sql={adapter}"]
        engine = Engine(settings, options, plain=True)
        try:
            yield engine, *(at.replace("*", "127.0.0.1") for at in (events, replay))
        finally:
            engine.stop()


async def test_its_events_lead_prompts_to_it_and_name_every_block(
    plain_engine, model, redis_url, tmp_path
):
    workers = _workers_file(tmp_path, plain_engine, model)
    async with AsyncExitStack() as stack:
        rig = Rig(model, stack, redis_url)
        router = await rig.start(records=[], ready=1, workers_file=workers)

        (node,) = (entry.node for entry in router.entries().values())

        async def told(salt="", model="model"):
            """The engine's events have told of every block of that prompt; what is known from now
            on is known from them."""
            chain = rig.chain("plain", WORDS, model, salt)
            await until(lambda: router.engines.view.leading(chain) == {node: len(chain)})
            router.view._assumed.drop(node)

        async def ask(salt="", model="model"):
            body = {"model": model, "prompt": WORDS, "max_tokens": 4, "temperature": 0}
            salted = {"cache_salt": salt} if salt else {}
            status, headers, answer = await rig.post(**body | salted)
            assert status == 200, answer
            cached = (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
            return int(headers["x-prefixfleet-hit-tokens"]), cached, answer["choices"][0]["text"]

        hit, cached, cold = await ask()
        assert (hit, cached) == (0, 0)
        await told()
        hit, cached, warm = await ask()
        assert warm == cold
        assert hit == cached > 0
        assert hit >= (len(rig.chain("plain", WORDS, "model")) - 1) * BLOCK_TOKENS

        assert (await ask("a tenant's own"))[:2] == (0, 0)
        await told("a tenant's own")
        hit, cached, _ = await ask("a tenant's own")
        assert hit == cached > 0

        for salt in ("", "a tenant's own"):  # an adapter's are its own too
            assert (await ask(salt, "sql"))[:2] == (0, 0)
            await told(salt, "sql")
            hit, cached, _ = await ask(salt, "sql")
            assert hit == cached > 0
        (numbers,) = router.engines.numbers().values()
        assert numbers["whole"]
        assert router.degraded.modes() == []


async def test_a_response_that_it_keeps_is_found_again(plain_engine, model, redis_url, tmp_path):
    """Each form in which vLLM gives a response's id, and what it says to those who come back."""
    workers = _workers_file(tmp_path, plain_engine, model)
    async with AsyncExitStack() as stack:
        rigs = [Rig(model, stack, redis_url)]
        rigs.append(Rig(model, stack, redis_url, fleet=rigs[0].fleet))
        for rig in rigs:
            await rig.start(records=[], ready=1, workers_file=workers)
        one, other = rigs
        asked = {"model": "model", "input": "Hello", "max_output_tokens": 4, "temperature": 0}

        async def create(**fields):
            return (await one.post("/v1/responses", **asked | fields))[::2]

        async def ask(path, method="GET"):
            async with other.client.request(method, f"/v1/responses/{path}") as answer:
                return answer.status, await answer.read()

        status, first = await create()
        assert status == 200, first
        status, read = await ask(first["id"])
        assert (status, json.loads(read)["output"]) == (200, first["output"])
        status, told = await ask(f"{first['id']}/cancel", "POST")
        assert (status, json.loads(told)["error"]["param"]) == (400, "response_id")
        status, second = await create(previous_response_id=first["id"])
        assert status == 200, second
        assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]

        async with one.client.post("/v1/responses", json=asked | {"stream": True}) as answer:
            events = (await answer.read()).decode()
        (name,) = {event.partition('"')[0] for event in events.split('"id":"resp_')[1:]}
        assert (await ask(f"resp_{name}"))[0] == 200

        status, queued = await create(background=True, stream=False)
        assert (status, queued["status"]) == (200, "queued")

        async def ended():
            status = json.loads((await ask(queued["id"]))[1])["status"]
            return status not in ("queued", "in_progress")

        await until(ended)
        assert one.router.metrics.unread_response_ids._value.get() == 0


def _workers_file(folder, plain_engine, model):
    engine, events, replay = plain_engine
    worker = {
        "name": "plain",
        "url": engine.url,
        "model": "model",
        "model_path": str(model),
        "events": events,
        "replay": replay,
        "block_tokens": BLOCK_TOKENS,
    }
    path = folder / "workers.json"
    path.write_text(json.dumps({"workers": [worker]}))
    return path
