"""The daemon's HTTP face: what it shows, and that only a signed hint starts anything."""

import io

import aiohttp
import pytest
from node_rig import NAMESPACE, SECRET, PlainEngine, fresh_chain, running_node, settings_of
from prometheus_client.parser import text_string_to_metric_families

from prefixfleet.store.memory_index import MemoryIndex
from prefixfleet.store.prefetch import (
    SIGNATURE_HEADER,
    Prefetch,
    encode_prefetch,
    prefetch_key,
    sign,
)
from prefixfleet.store.records import Outcome, PullPlan


@pytest.fixture
async def daemon(tmp_path_factory):
    async with running_node(MemoryIndex(), settings_of(tmp_path_factory.mktemp("n"))) as daemon:
        yield daemon


@pytest.fixture
async def engine(daemon):
    async with PlainEngine.connected(daemon.settings.socket_path) as engine:
        yield engine


@pytest.fixture
async def http():
    async with aiohttp.ClientSession() as session:
        yield session


def hint(secret=SECRET, namespace=None, request="r"):
    plan = PullPlan(request=request, source="gone", source_epoch=1, blocks=2, budget_s=0.1)
    body = encode_prefetch(
        Prefetch(
            plan=plan,
            namespace=namespace or NAMESPACE.digest(SECRET),
            chain=tuple(fresh_chain(2)),
        )
    )
    return body, {SIGNATURE_HEADER: sign(body, prefetch_key(secret))}


async def post(http, daemon, body, headers):
    async with http.post(f"{daemon.url}/prefetch", data=body, headers=headers) as response:
        return response.status, await response.json()


async def test_a_signed_hint_is_taken(http, daemon, engine):
    status, _ = await post(http, daemon, *hint())

    assert status == 202
    assert daemon.snapshot()["cache"]["waiting_hints"] == 1


async def test_a_hint_of_somebody_without_the_secret_is_refused(http, daemon, engine):
    status, answer = await post(http, daemon, *hint(secret=b"another secret altogether"))

    assert status == 403
    assert "same cluster secret" in answer["error"]
    assert SECRET.decode() not in answer["error"]


async def test_a_changed_body_is_refused(http, daemon, engine):
    body, headers = hint()

    status, _ = await post(http, daemon, body[:-1] + bytes([body[-1] ^ 1]), headers)

    assert status == 403


async def test_signed_junk_is_refused_as_such(http, daemon, engine):
    body = b"\xc1 no hint"

    status, answer = await post(
        http, daemon, body, {SIGNATURE_HEADER: sign(body, prefetch_key(SECRET))}
    )

    assert (status, "prefetch" in answer["error"]) == (400, True)


async def test_a_hint_for_another_namespace_or_without_an_engine_is_refused(http, daemon):
    status, answer = await post(http, daemon, *hint())

    assert status == 400
    assert "no engine of this namespace" in answer["error"]
    assert daemon.snapshot()["counters"]["refused_hints"] == 1


async def test_too_many_hints_are_told_so(http, daemon, engine, monkeypatch):
    monkeypatch.setattr("prefixfleet.cluster.claims.MAX_EARLY", 1)
    await post(http, daemon, *hint())

    status, _ = await post(http, daemon, *hint(request="another"))

    assert status == 429


async def test_a_body_beyond_the_limit_is_refused(http, daemon, engine):
    async with http.post(f"{daemon.url}/prefetch", data=io.BytesIO(bytes(5 << 20))) as response:
        assert response.status == 413


async def test_status_shows_the_engine_and_what_became_of_its_requests(http, daemon, engine):
    outcome = Outcome(
        request="r", prompt_blocks=9, engine_blocks=1, local_blocks=2, pulled_blocks=3,
        pulled_bytes=4, pull_s=0.5, link="tcp",
    )  # fmt: skip
    await engine.ask(
        "outcome", outcome={f: getattr(outcome, f) for f in outcome.__slots__} | {"version": 1}
    )

    async with http.get(f"{daemon.url}/status") as response:
        status = await response.json()

    assert status["namespace"]["model"] == "m"
    assert status["block_bytes"] == 8192
    assert status["outcomes"][0]["pulled_blocks"] == 3
    assert status["stats"]["counters"]["blocks"] == {
        "engine": 1, "local": 2, "pulled": 3, "recomputed": 3,
    }  # fmt: skip


async def test_metrics_are_sound_and_count_what_happened(http, daemon, engine):
    await engine.put(fresh_chain(3))

    async with http.get(f"{daemon.url}/metrics") as response:
        text = await response.text()

    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert values["prefixfleet_node_committed_blocks_total",] == 3
    assert values["prefixfleet_node_slots", "resident"] == 3
    assert values["prefixfleet_node_degraded",] == 0


async def test_health_says_what_is_degraded(http, daemon):
    async with http.get(f"{daemon.url}/health") as response:
        assert await response.json() == {"status": "ok", "degraded": []}
