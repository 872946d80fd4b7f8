"""Plain engines from a file: routed by their own KV events, never taken for a fleet worker."""

import hashlib
import json

import pytest
from engine_publisher import EnginePublisher, removed
from eventually import until
from router_rig import chain_of
from static_entries import entry, write

from prefixfleet.router import engine_feed
from prefixfleet.router.engine_feed import SILENT_PROMPTS
from prefixfleet.router.static_workers import StaticWorkers
from prefixfleet.store.engine_mirror import EngineMirror
from prefixfleet.store.errors import ConfigError

LONG = "The prefix cache keeps what a node computed before. " * 20


@pytest.fixture
def path(tmp_path):
    return tmp_path / "workers.json"


async def plain_fleet(rig, path, *publishers, **settings):
    """Two plain engines behind a router; the first publishers tell the events of the first ones."""
    engines = [await rig.engine(name, plain=True) for name in "ab"]
    entries = [
        entry(engine, publishers[i] if i < len(publishers) else None)
        for i, engine in enumerate(engines)
    ]
    await rig.start(records=[], ready=2, workers_file=write(path, *entries), **settings)
    return engines


async def test_a_prompt_goes_where_the_events_say_its_prefix_is(rig, path):
    async with EnginePublisher() as publisher:
        engines = await plain_fleet(rig, path, publisher)
        await publisher.heard()
        ids = engines[0].tokens.of_text(LONG)
        await publisher.publish(publisher.stored(ids))
        await until(lambda: len(rig.router.engines.view) == len(ids) // 16)

        answers = [await rig.post(prompt=LONG) for _ in range(4)]

        assert [status for status, _, _ in answers] == [200] * 4
        assert {headers["x-prefixfleet-node"] for _, headers, _ in answers} == {"static:a"}
        assert answers[0][1]["x-prefixfleet-hit-tokens"] == str(len(ids) // 16 * 16)
        await publisher.publish(removed(*range(publisher.names)))
        await until(lambda: len(rig.router.engines.view) == 0)


async def test_what_an_engine_held_before_the_router_started_is_known(rig, path):
    async with EnginePublisher() as publisher:
        ids = (await rig.engine("x")).tokens.of_text(LONG)
        await publisher.publish(publisher.stored(ids))

        await plain_fleet(rig, path, publisher)
        await until(lambda: len(rig.router.engines.view) > 0)
        _, headers, _ = await rig.post(prompt=LONG)

        assert headers["x-prefixfleet-node"] == "static:a"


async def test_after_a_fault_in_following_all_is_replayed(rig, path, monkeypatch):
    monkeypatch.setattr(engine_feed, "RESTART_S", 0.05)
    follow, faults = EngineMirror.follow, [KeyError("a fault")]

    def fault_once(mirror, batch):
        if batch.sequence == 1 and faults:
            raise faults.pop()
        return follow(mirror, batch)

    monkeypatch.setattr(EngineMirror, "follow", fault_once)
    async with EnginePublisher() as publisher:
        await plain_fleet(rig, path, publisher)
        await publisher.heard()
        await publisher.publish(publisher.stored(range(32)))
        await until(lambda: len(rig.router.engines.view) == 2)

        await publisher.publish(publisher.stored(range(100, 116)))

        await until(lambda: len(rig.router.engines.view) == 3)
        assert not faults
        assert not rig.router.degraded.modes()


async def test_a_plain_engine_gets_no_plan_and_no_clients_transfer_params(rig, path):
    engines = await plain_fleet(rig, path)

    for params in ({}, {"kv_transfer_params": {"remote_host": "10.0.0.1", "do_remote_prefill": 1}}):
        status, _, _ = await rig.post(prompt="hello", **params)
        assert status == 200

    asked = [asked for engine in engines for asked in engine.seen]
    assert len(asked) == 2
    assert not any(asked.get("kv_transfer_params") for asked in asked)


async def p2p_fleet(rig, path, publisher, *p2p, **options):
    """Two plain engines of which `a` holds the prompt and is busy; ``p2p`` are their addresses."""
    engines = [await rig.engine(name, plain=True, **options) for name in "ab"]
    entries = [
        entry(engine, publisher if engine.name == "a" else None, **fields)
        for engine, fields in zip(engines, p2p, strict=True)
    ]
    await rig.start(records=[], ready=2, workers_file=write(path, *entries))
    await publisher.heard()
    await publisher.publish(publisher.stored(engines[0].tokens.of_text(LONG)))
    await until(lambda: len(rig.router.engines.view) > 0)
    rig.stack.enter_context(rig.router.book.charged("a", tokens=90_000, sequences=1, expected_s=90))
    return engines


HAS_P2P = {"p2p": "10.0.0.1:5710", "block_bytes": 1_000}


async def test_stock_vllm_is_told_from_which_engine_to_pull(rig, path):
    async with EnginePublisher() as publisher, EnginePublisher() as other:
        p2p_of_b = HAS_P2P | {"p2p": "10.0.0.2:5710", "events": other.events}
        engines = await p2p_fleet(rig, path, publisher, HAS_P2P, p2p_of_b)

        params = {"kv_transfer_params": {"remote_kv_source": {"remote_host": "evil"}}}
        status, headers, _ = await rig.post(prompt=LONG, **params)

        assert status == 200
        assert engines[1].seen[0]["kv_transfer_params"] == {
            "remote_kv_source": {
                "kv_request_id": headers["x-prefixfleet-request"],
                "remote_host": "10.0.0.1",
                "remote_port": 5710,
            }
        }
        assert int(headers["x-prefixfleet-pulled-tokens"]) > 0


async def test_an_adapter_of_plain_engines_is_pulled_from_nobody(rig, path):
    """vLLM names its blocks by name and path: the files may differ from host to host."""
    async with EnginePublisher() as publisher, EnginePublisher() as other:
        p2p_of_b = HAS_P2P | {"p2p": "10.0.0.2:5710", "events": other.events}
        engines = await p2p_fleet(rig, path, publisher, HAS_P2P, p2p_of_b, adapters={"sql": ""})
        ids = engines[0].tokens.of_text(LONG)
        known = len(rig.router.engines.view)
        await publisher.publish(publisher.stored(ids, lora_name="sql"))
        await until(lambda: len(rig.router.engines.view) == 2 * known)

        for model, pulled in (("tiny", True), ("sql", False)):
            _, headers, _ = await rig.post(model=model, prompt=LONG)
            assert headers["x-prefixfleet-node"] == "static:b"
            assert (headers["x-prefixfleet-pulled-tokens"] != "0") == pulled
            assert ("kv_transfer_params" in engines[1].seen[-1]) == pulled


@pytest.mark.parametrize(("a", "b"), [(HAS_P2P, {}), ({}, HAS_P2P)])
async def test_an_engine_without_the_tier_neither_pulls_nor_is_pulled_from(rig, path, a, b):
    async with EnginePublisher() as publisher, EnginePublisher() as other:
        b = b | {"events": other.events}
        engines = await p2p_fleet(rig, path, publisher, a, b)

        _, headers, _ = await rig.post(prompt=LONG)

        assert headers["x-prefixfleet-pulled-tokens"] == "0"
        assert "kv_transfer_params" not in engines[1].seen[0]


@pytest.mark.parametrize(
    "fields", [{"block_bytes": 0}, {"events": ""}, {"engine": "sglang"}, {"p2p": "10.0.0.1"}]
)
def test_an_entry_with_half_a_tier_is_refused(path, fields):
    good = {"name": "a", "url": "http://x", "model": "m", "model_path": "/m"}
    good |= HAS_P2P | {"events": "tcp://x:1"}
    path.write_text(json.dumps({"workers": [good | fields]}))

    with pytest.raises(ConfigError, match="p2p"):
        StaticWorkers(path).load()


async def test_a_tenants_prefix_on_a_plain_engine_is_found_by_that_tenant_only(rig, path, tmp_path):
    """The salt that the router sends comes back in the events, and is part of the chain."""
    keys = tmp_path / "keys.json"
    tenants = [
        {"name": n, "tenant": n, "sha256": hashlib.sha256(f"key-{n}".encode()).hexdigest()}
        for n in ("one", "two")
    ]
    keys.write_text(json.dumps({"keys": tenants}))
    async with EnginePublisher() as publisher:
        engines = await plain_fleet(rig, path, publisher, keys_file=keys)
        await publisher.heard()
        ids = engines[0].tokens.of_text(LONG)

        async def ask(tenant):
            asked = {"model": "tiny", "prompt": LONG}
            headers = {"Authorization": f"Bearer key-{tenant}"}
            async with rig.client.post("/v1/completions", json=asked, headers=headers) as response:
                await response.read()
                return int(response.headers["x-prefixfleet-hit-tokens"])

        await ask("one")
        salt = next(asked["cache_salt"] for engine in engines for asked in engine.seen)
        blocks = len(ids) // 16
        extra_keys = [[salt], *[None] * (blocks - 1)]
        await publisher.publish(publisher.stored(ids, extra_keys=extra_keys))
        await until(lambda: len(rig.router.engines.view) == blocks)

        assert await ask("one") > 0
        assert await ask("two") == 0


async def test_nobody_pulls_from_a_plain_engine_and_a_reloaded_index_leaves_its_blocks(rig, path):
    async with EnginePublisher() as publisher:
        engines = await plain_fleet(rig, path, publisher)
        await publisher.heard()
        ids = engines[0].tokens.of_text(LONG)
        await publisher.publish(publisher.stored(ids))
        await until(lambda: len(rig.router.engines.view) > 0)
        fleet_worker = await rig.engine("fleet")
        await rig.announce(fleet_worker.record())
        await rig.until_ready(3)
        await rig.holds(fleet_worker, [])

        _, headers, _ = await rig.post(prompt=LONG)
        assert headers["x-prefixfleet-node"] == "static:a"
        for _ in rig.router.view.load(await rig.index.snapshot()):
            pass
        _, headers, _ = await rig.post(prompt=LONG)

        assert headers["x-prefixfleet-node"] == "static:a"
        assert headers["x-prefixfleet-pulled-tokens"] == "0"
        assert chain_of(ids)  # the fleet's own chain of the prompt is another one
        assert rig.router.view.leading(chain_of(ids)) == {}


async def test_an_engine_without_events_says_so(rig, path):
    """Dynamo 11194: events off gave no hits, and no word about it."""
    async with EnginePublisher() as publisher:
        engine = await rig.engine("a", plain=True)
        await rig.start(records=[], ready=1, workers_file=write(path, entry(engine, publisher)))
        for _ in range(SILENT_PROMPTS):
            await rig.post(prompt=LONG)

        modes = [mode.name for mode in rig.router.degraded.modes()]
        await publisher.publish(publisher.stored(engine.tokens.of_text(LONG)))
        await until(lambda: "events of a" not in [m.name for m in rig.router.degraded.modes()])

    assert "events of a" in modes


async def test_another_block_size_than_the_entrys_is_named(rig, path):
    """Dynamo 659: two block sizes match nothing, and nobody sees why."""
    async with EnginePublisher(block_tokens=32) as publisher:
        engines = await plain_fleet(rig, path, publisher)
        await publisher.heard()
        await publisher.publish(publisher.stored(engines[0].tokens.of_text(LONG)))

        mode = await until(
            lambda: next((m for m in rig.router.degraded.modes() if m.name == "events of a"), None)
        )

    assert "32 tokens" in mode.reason
    assert "block_tokens to 32" in mode.remedy


async def test_an_engine_that_tokenises_otherwise_is_refused(rig, path):
    engine = await rig.engine("a", plain=True)
    engine.tokens.of_text = lambda text, **_: [1]
    await rig.start(records=[], ready=0, workers_file=write(path, entry(engine)))

    (standing,) = await until(
        lambda: [s for s in rig.router.roster.standings() if s.state == "refused"]
    )
    assert "tokens of" in standing.reason


async def test_the_file_is_read_again_when_it_changes(rig, path):
    engines = [await rig.engine(name, plain=True) for name in "ab"]
    await rig.start(records=[], ready=1, workers_file=write(path, entry(engines[0])))

    write(path, *map(entry, engines))
    rig.router.reload()
    await rig.until_ready(2)
    path.write_text("{")
    rig.router.reload()
    rig.router.reload()

    assert [m.name for m in rig.router.degraded.modes()] == ["static workers"]
    assert len(rig.router.files.static.by_name) == 2
    write(path, entry(engines[1]))
    rig.router.reload()
    await rig.until_ready(1)
    assert rig.router.degraded.modes() == []


async def test_a_speed_that_the_entry_does_not_say_is_measured(rig, path):
    engine = await rig.engine("a", plain=True)
    entries = write(path, entry(engine, prefill_tokens_per_s=0))

    await rig.start(records=[], ready=1, workers_file=entries)

    (worker,) = rig.router.roster.openings.ready("tiny")
    assert worker.record.prefill_tokens_per_s > 0


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "truncated"),
        ('{"workers": [{"name": "a"}]}', "url"),
        ('{"workers": [], "worker": []}', "worker"),
        ('{"workers": [{"name": "a", "url": "ftp://x", "model": "m", "model_path": "p"}]}', "url"),
        (
            '{"workers": [{"name": "a", "url": "http://x", "model": "m", "model_path": "p", '
            '"events": "10.0.0.1:5557"}]}',
            "events",
        ),
        (
            '{"workers": ['
            + ", ".join(['{"name": "a", "url": "http://x", "model": "m", "model_path": "p"}'] * 2)
            + "]}",
            "twice",
        ),
    ],
)
def test_a_wrong_file_stops_the_start(path, content, named):
    path.write_text(content)

    with pytest.raises(ConfigError, match=named) as caught:
        StaticWorkers(path).load()

    assert "PREFIXFLEET_ROUTER_WORKERS_FILE" in str(caught.value)


def test_an_absent_file_stops_the_start(path):
    with pytest.raises(ConfigError, match="workers"):
        StaticWorkers(path).load()
