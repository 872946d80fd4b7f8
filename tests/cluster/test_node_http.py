"""The daemon's HTTP face: what it shows, and that only a signed hint starts anything."""

import asyncio
import io
import time

import aiohttp
import pytest
from eventually import until
from node_rig import (
    NAMESPACE,
    PAYLOAD_BYTES,
    SECRET,
    PlainEngine,
    fresh_chain,
    running_node,
    settings_of,
)
from prometheus_client.parser import text_string_to_metric_families

from prefixfleet.store.errors import PeerRefused
from prefixfleet.store.memory_index import MemoryIndex
from prefixfleet.store.prefetch import (
    SIGNATURE_HEADER,
    Prefetch,
    encode_prefetch,
    prefetch_key,
    sign,
)
from prefixfleet.store.records import Outcome, PullPlan
from prefixfleet.transfer import wire
from prefixfleet.transfer.messages import Lease
from prefixfleet.transfer.tcp import TcpLink


@pytest.fixture
async def daemon(tmp_path_factory):
    async with running_node(
        MemoryIndex(lease_s=60), settings_of(tmp_path_factory.mktemp("n"))
    ) as daemon:
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


@pytest.mark.parametrize("path", ["/prefetch", "/handover", "/keep"])
async def test_a_signature_of_any_bytes_is_a_wrong_one(http, daemon, path):
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(
            *daemon.url.removeprefix("http://").split(":")
        )
        head = f"POST {path} HTTP/1.0\r\nContent-Length: 2\r\n{SIGNATURE_HEADER}: ".encode()
        writer.write(head + b"\xff\xed\xa0\x80\r\n\r\n{}")
        status = await reader.readline()
        writer.close()

    assert b" 403 " in status


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

    (kind,) = status["stats"]["kinds"].values()
    assert kind["namespace"]["model"] == "m"
    assert (kind["engines"], kind["connections"], kind["slot_bytes"]) == (["test"], 1, 8192)
    assert (status["stats"]["engines"], status["stats"]["connections"]) == (1, 1)
    assert status["stats"]["huge_page_bytes"] == daemon.snapshot()["huge_page_bytes"]
    assert status["outcomes"][0]["pulled_blocks"] == 3
    assert status["stats"]["counters"]["blocks"] == {
        "engine": 1, "local": 2, "pulled": 3, "recomputed": 3,
    }  # fmt: skip


async def values_of(http, daemon):
    """Of each sample of the node's metrics, by its name and labels."""
    async with http.get(f"{daemon.url}/metrics") as response:
        text = await response.text()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_refused_callers_are_counted_by_reason_and_told(http, daemon, engine):
    contact = daemon.status()["contacts"]["tcp"]
    stranger = TcpLink(node="stranger", secret=b"another secret of the right length")
    with pytest.raises(PeerRefused):
        await stranger.connect(contact, deadline=time.monotonic() + 60)
    await stranger.close()
    host, _, port = contact.removeprefix("tcp://").rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET / HTTP/1.1\r\n" * 20)

    def sessions():
        return daemon.snapshot()["sessions"]["tcp"]

    await until(lambda: sum(sessions().values()) == 2)
    writer.close()

    values = await values_of(http, daemon)
    found = {why: values["prefixfleet_node_sessions_total", "tcp", why] for why in sessions()}
    assert found == {"refused": 1, "protocol": 1}


async def test_what_peers_asked_is_counted_by_outcome(http, daemon, engine):
    chain = fresh_chain(2)
    await engine.put(chain)
    link = TcpLink(node="peer", secret=SECRET)
    peer = await link.connect(daemon.status()["contacts"]["tcp"], deadline=time.monotonic() + 60)
    asked = {"namespace": NAMESPACE.digest(SECRET), "payload_bytes": PAYLOAD_BYTES, "shards": 1}
    for epoch in (daemon.snapshot()["index"]["epoch"], 0):
        question = Lease(epoch=epoch, hashes=b"".join(chain), budget_s=1.0, **asked)
        await peer.ask(wire.pack(question), deadline=time.monotonic() + 60)
    await peer.close()
    await link.close()

    values = await values_of(http, daemon)
    outcomes = {key[1]: n for key, n in values.items() if key[0] == "prefixfleet_node_served_total"}
    assert outcomes == {"leased": 1.0, "epoch": 1.0}


async def test_metrics_are_sound_and_count_what_happened(http, daemon, engine):
    await engine.put(fresh_chain(3))

    values = await values_of(http, daemon)

    assert values["prefixfleet_node_committed_blocks_total",] == 3
    assert values["prefixfleet_node_slots", "resident"] == 3
    assert values["prefixfleet_node_degraded",] == 0


async def test_health_says_what_is_degraded(http, daemon):
    async with http.get(f"{daemon.url}/health") as response:
        assert await response.json() == {"status": "ok", "degraded": []}
