"""A real vLLM engine with LoRA adapters on a real node daemon, behind a router."""

import asyncio
import os
from contextlib import AsyncExitStack

import aiohttp
import pytest
from engines import Engine, Node
from eventually import until
from router_rig import Rig
from tiny_adapter import write_adapter
from upstreams import SECRET

from prefixfleet.cluster.engine_probe import EngineProbe
from prefixfleet.cluster.model import default_cache_dir, demo_model
from prefixfleet.cluster.settings import WorkerSettings
from prefixfleet.cluster.worker_adapters import WorkerAdapters
from prefixfleet.store.records import WorkerRecord

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

WORDS = "Every node keeps the blocks that it computed, and an index knows who has which. " * 20
NAMES = ("sql", "law")


@pytest.fixture
async def rig(redis_url):
    async with AsyncExitStack() as stack:
        yield Rig(demo_model(default_cache_dir(), lambda _: None), stack, redis_url)


@pytest.fixture
def folder(tmp_path_factory):
    """Of a short name: sockets are made in it."""
    return tmp_path_factory.mktemp("e")


@pytest.fixture
def node(rig, folder):
    (folder / "secret").write_bytes(SECRET)
    environ = {
        "PREFIXFLEET_REDIS_URL": rig.redis_url,
        "PREFIXFLEET_FLEET": rig.fleet,
        "PREFIXFLEET_SECRET_FILE": str(folder / "secret"),
    }
    node = Node("a", folder, environ, 256 << 20)
    node.start()
    yield node
    node.stop()


@pytest.fixture
def engine(rig, node, folder, monkeypatch):
    """An engine with the adapters `NAMES`, and a folder with one more."""
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    folders = {
        name: write_adapter(folder / name, rig.folder, seed)
        for seed, name in enumerate((*NAMES, "tax"))
    }
    settings = WorkerSettings(
        name="engine",
        node="a",
        model=rig.folder,
        served_name="model",
        socket_path=node.socket,
        log_file=folder / "engine.log",
        kv_cache_bytes=256 << 20,
        max_model_tokens=2048,
        cpu_cores=str(min(os.sched_getaffinity(0))),
    )
    modules = [f"{name}={folders[name]}" for name in NAMES]
    options = ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "2"]
    engine = Engine(settings, [*options, "--lora-modules", *modules])
    node.wait_for_engines()
    yield engine
    engine.stop()


async def test_adapters_are_found_told_apart_and_never_change_an_answer(rig, node, engine, folder):
    session = await rig.stack.enter_async_context(aiohttp.ClientSession())
    probe = EngineProbe(engine.url, "model", session)
    adapters = WorkerAdapters(probe.adapters, probe.greet, folder / "cache")
    (kind,) = (await asyncio.to_thread(node.status))["stats"]["kinds"].values()

    async def record():
        await adapters.look()
        return WorkerRecord(
            worker="engine",
            node="a",
            url=engine.url,
            model="model",
            model_path=str(rig.folder),
            namespace=kind["namespace"],
            block_bytes=kind["slot_bytes"],
            max_model_tokens=2048,
            prefill_tokens_per_s=500.0,
            adapters=adapters.found,
        )

    router = await rig.start(records=[await record()])
    assert set(adapters.found) == set(NAMES)

    async def ask(model):
        """Tokens that the router expected, that the engine found, and the text."""
        body = {"model": model, "prompt": WORDS, "max_tokens": 8, "temperature": 0}
        code, headers, answer = await rig.post(**body)
        assert code == 200, answer
        cached = (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        return int(headers["x-prefixfleet-hit-tokens"]), cached, answer["choices"][0]["text"]

    async def change(what, **question):
        url = f"{engine.url}/v1/{what}_lora_adapter"
        async with session.post(url, json=question) as response:
            assert response.status == 200, await response.text()

    cold = {model: await ask(model) for model in ("model", *NAMES)}
    assert [answer[:2] for answer in cold.values()] == [(0, 0)] * 3
    assert len({text for _, _, text in cold.values()}) == 3

    await asyncio.to_thread(node.wait_idle, engine)
    for model in cold:
        chain = rig.chain("engine", WORDS, model)
        await until(lambda chain=chain: router.view.leading(chain) == {"a": len(chain)})
    router.view._assumed.drop("a")  # what is known from now on is known from the index
    for model, (_, _, text) in cold.items():
        hit, cached, warm = await ask(model)
        assert warm == text
        assert hit == cached > 0

    await change("load", lora_name="tax", lora_path=str(folder / "tax"))
    await rig.announce(await record())
    await until(lambda: "tax" in router.roster._seats["engine"].serves)
    assert (await ask("tax"))[:2] == (0, 0)
    assert (await ask("tax"))[0] > 0

    await change("unload", lora_name="tax")
    await rig.announce(await record())
    await until(lambda: "tax" not in router.roster._seats["engine"].serves)
    assert (await rig.post(model="tax"))[0] == 404
    router.afterwards.catch_up()
    assert router.degraded.modes() == []
