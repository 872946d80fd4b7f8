"""TensorRT-LLM workers from a file: routed by the events that the router polls from them."""

import asyncio
import json
import ssl

import pytest
from certificates import Authority
from eventually import until
from static_entries import entry, write
from trtllm_server import TrtllmServer, counted, names_of, removed

from prefixfleet.router import engine_feed, engine_poll
from prefixfleet.router.engine_feed import SILENT_PROMPTS
from prefixfleet.router.static_workers import StaticWorkers
from prefixfleet.store.engine_mirror import EngineMirror
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.poll_rights import PollRights

LONG = "The prefix cache keeps what a node computed before. " * 20


@pytest.fixture
def path(tmp_path):
    return tmp_path / "workers.json"


@pytest.fixture
async def server(monkeypatch):
    for name in ("BUSY_S", "IDLE_S", "FAILED_S"):
        monkeypatch.setattr(engine_poll, name, 0.01)
    async with TrtllmServer() as server:
        yield server


async def fleet(rig, path, server, ready=2, **fields):
    """Two plain engines behind a router, of which the first tells its events at ``server``."""
    engines = [await rig.engine(name, plain=True, probe=counted, tokenizes=False) for name in "ab"]
    told = {"engine": "trtllm", "events": server.events, "replay": ""} | fields
    entries = [entry(engines[0], **told), entry(engines[1], engine="trtllm")]
    await rig.start(records=[], ready=ready, workers_file=write(path, *entries))
    return engines


def modes(rig):
    return {mode.name: mode.reason for mode in rig.router.degraded.modes()}


async def test_a_prompt_goes_where_the_polled_events_say_its_prefix_is(rig, path, server):
    engines = await fleet(rig, path, server)
    ids = engines[0].tokens.of_text(LONG)
    data = server.stored(ids)
    server.tell(data)
    await until(lambda: len(rig.router.engines.view) == len(ids) // 16)

    answers = [await rig.post(prompt=LONG) for _ in range(4)]

    assert {headers["x-prefixfleet-node"] for _, headers, _ in answers} == {"static:a"}
    assert answers[0][1]["x-prefixfleet-hit-tokens"] == str(len(ids) // 16 * 16)
    assert not any(asked.get("kv_transfer_params") for asked in engines[0].seen)
    server.tell(removed(*names_of(data)))
    await until(lambda: len(rig.router.engines.view) == 0)


async def test_status_and_metrics_show_what_is_followed_and_what_was_lost(rig, path, server):
    await fleet(rig, path, server)
    server.tell(server.stored(range(32)))
    await until(lambda: len(rig.router.engines.view) == 2)
    server.tell(removed(1), lost=True)
    server.tell(server.stored(range(100, 116)))
    await until(lambda: "events of a" in modes(rig))

    async with rig.client.get("/status") as response:
        (worker,) = [w for w in (await response.json())["workers"] if w["worker"] == "a"]
    async with rig.client.get("/metrics") as response:
        metrics = await response.text()

    shown = worker["events"]
    assert (shown["resident"], shown["gaps"], shown["whole"]) == (1, 1, False)
    assert 'prefixfleet_engine_event_losses{kind="gaps",worker="a"} 1.0' in metrics
    assert "another poller" in modes(rig)["events of a"]


async def test_an_engine_that_vanishes_holds_nothing_and_is_followed_when_it_is_back(
    rig, path, server
):
    await fleet(rig, path, server)
    server.tell(server.stored(range(32)))
    await until(lambda: len(rig.router.engines.view) == 2)

    await server.vanish()
    await until(lambda: "events of a" in modes(rig))
    assert len(rig.router.engines.view) == 0
    server.restart()
    server.tell(server.stored(range(100, 116)))
    await server.listen()

    await until(lambda: len(rig.router.engines.view) == 1)
    await until(lambda: "events of a" not in modes(rig))


async def test_a_poll_that_fails_drops_nothing_until_a_number_is_missing(rig, path, server):
    """Its events may be lost with it, or may come with the next one."""
    await fleet(rig, path, server)
    server.tell(server.stored(range(32)))
    await until(lambda: len(rig.router.engines.view) == 2)

    server.status = 500
    await until(lambda: "status 500" in modes(rig).get("events of a", ""))
    assert len(rig.router.engines.view) == 2
    server.status = 200
    await until(lambda: "events of a" not in modes(rig))

    assert len(rig.router.engines.view) == 2


@pytest.mark.parametrize("body", [b"{", b'[{"event_id": 7}]', b"[" * 100_000])
async def test_an_answer_that_is_no_events_drops_what_was_known(rig, path, server, body):
    await fleet(rig, path, server)
    server.tell(server.stored(range(32)))
    await until(lambda: len(rig.router.engines.view) == 2)

    server.body = body

    await until(lambda: len(rig.router.engines.view) == 0)
    assert rig.router.engines.numbers()["a"]["malformed"] == 1


async def test_an_answer_without_an_end_is_given_up(rig, path, server, monkeypatch):
    monkeypatch.setattr(engine_poll, "MAX_POLL_BYTES", 1_000)
    await fleet(rig, path, server)

    server.tell(server.stored(range(320)))

    await until(lambda: not rig.router.engines.numbers()["a"]["connected"])
    assert len(rig.router.engines.view) == 0


async def test_an_engine_that_does_not_answer_a_poll_is_asked_again(rig, path, server, monkeypatch):
    monkeypatch.setattr(engine_poll, "POLL_LIMIT_S", 0.2)
    never = asyncio.Event()
    server.held = never
    await fleet(rig, path, server)

    await until(lambda: "TimeoutError" in modes(rig).get("events of a", ""))
    never.set()

    def told_and_heard():
        server.tell(server.stored(range(32)))  # an abandoned poll may take one: then it is a gap
        return len(rig.router.engines.view) == 2

    await until(told_and_heard)


async def test_a_fault_in_following_leaves_an_empty_view_and_is_tried_again(
    rig, path, server, monkeypatch
):
    monkeypatch.setattr(engine_feed, "RESTART_S", 0.05)
    await fleet(rig, path, server)
    server.tell(server.stored(range(32)))
    await until(lambda: len(rig.router.engines.view) == 2)
    tries = []

    def fault(mirror, batch):
        tries.append(batch)
        raise KeyError("a fault")

    def tell_and_count():
        server.tell(server.stored(range(16)))
        return len(tries) >= 3

    with monkeypatch.context() as patched:
        patched.setattr(EngineMirror, "follow", fault)
        await until(tell_and_count)
        await until(lambda: "KeyError" in modes(rig).get("events of a", ""))
        assert len(rig.router.engines.view) == 0

    server.tell(server.stored(range(100, 116)))

    await until(lambda: "events of a" not in modes(rig))
    await until(lambda: len(rig.router.engines.view) > 0)
    assert rig.router.engines.numbers()["a"]["whole"] is False


async def test_an_engine_without_events_says_so(rig, path, server):
    """``event_buffer_max_size`` is 0 unless somebody sets it."""
    server._waiting.clear()
    engine = await rig.engine("a", plain=True, probe=counted, tokenizes=False)
    told = entry(engine, engine="trtllm", events=server.events)
    await rig.start(records=[], ready=1, workers_file=write(path, told))
    for _ in range(SILENT_PROMPTS):
        await rig.post(prompt=LONG)
    polls = server.polls
    await until(lambda: server.polls > polls + 2)

    assert "no KV event" in modes(rig)["events of a"]


async def test_an_engine_that_another_router_follows_is_shown_as_such_and_not_as_degraded(
    rig, path, server
):
    other = PollRights(rig.redis_url, rig.fleet, "other", timeout_s=20)
    assert await other.claim(server.events, ttl_s=600)
    await fleet(rig, path, server)
    await until(lambda: rig.router.engines.numbers()["a"]["followed_by_another_router"])

    for _ in range(2 * SILENT_PROMPTS):
        await rig.post(prompt=LONG)

    assert modes(rig) == {}
    assert server.polls == 0
    assert rig.router.engines.numbers()["a"]["resident"] == 0
    await other.close()


@pytest.mark.parametrize("shows", [True, False])
async def test_https_is_polled_with_the_certificates_that_workers_are_asked_with(
    rig, path, tmp_path, shows
):
    authority = Authority(tmp_path, "ours")
    pair, shown = authority.issue("server"), authority.issue("router")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.file)
    tls.verify_mode = ssl.CERT_REQUIRED
    tls.load_cert_chain(pair.cert, pair.key)
    settings = {"worker_ca_file": authority.file}
    if shows:
        settings |= {"worker_cert_file": shown.cert, "worker_key_file": shown.key}
    engine = await rig.engine("a", plain=True, probe=counted, tokenizes=False)

    async with TrtllmServer(tls=tls) as server:
        told = entry(engine, engine="trtllm", events=server.events, replay="")
        await rig.start(records=[], ready=1, workers_file=write(path, told), **settings)
        if shows:
            await until(lambda: rig.router.engines.numbers()["a"]["connected"])
        else:
            await until(lambda: server.events in modes(rig).get("events of a", ""))
    assert bool(server.polls) == shows


async def test_another_tokenizer_is_refused_by_its_number_of_tokens(rig, path, server):
    engine = await rig.engine("a", plain=True, probe=counted)
    engine.tokens.of_text = lambda text, **_: [1]
    entries = write(path, entry(engine, engine="trtllm"))
    await rig.start(records=[], ready=0, workers_file=entries)

    (standing,) = await until(
        lambda: [s for s in rig.router.roster.standings() if s.state == "refused"]
    )
    assert "the engine counts 1 tokens" in standing.reason


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"engine": "trtllm", "events": "tcp://x:1"}, "http"),
        ({"engine": "vllm", "events": "http://x:1"}, "tcp"),
        ({"engine": "trtllm", "events": "http://x:1", "replay": "tcp://x:2"}, "replay"),
        ({"engine": "trtllm", "events": "http://x:1/kv_cache_events"}, "events"),
        ({"engine": "trtllm", "events": "http://x:1", "p2p": "x:1", "block_bytes": 1}, "p2p"),
    ],
)
def test_an_entry_that_mixes_engines_is_refused(path, fields, named):
    good = {"name": "a", "url": "http://x", "model": "m", "model_path": "/m"}
    path.write_text(json.dumps({"workers": [good | fields]}))

    with pytest.raises(ConfigError, match=named):
        StaticWorkers(path).load()
