"""The dashboard's data: bounded, without text, for those who may see it."""

import asyncio
import hashlib
import json

import pytest
from eventually import until

from prefixfleet.router.activity import KEPT_DECISIONS, MAX_UNREAD, Activity
from prefixfleet.router.dashboard import MAX_WATCHERS, snapshot_of
from prefixfleet.router.hot_prefixes import HALF_LIFE_S, MAX_ENTRIES, HotPrefixes

SECRET_TEXT = "sesame seeds are opened by nobody but me " * 20


async def test_the_snapshot_shows_a_request_that_was_just_made(rig):
    engine = await rig.engine()
    router = await rig.start(engine)
    await rig.post(prompt="the quick brown fox " * 40)

    async with rig.client.get("/dashboard/snapshot") as response:
        snap = await response.json()

    assert response.status == 200
    assert snap["requests"] == 1
    (seen,) = snap["decisions"]
    assert seen["node"] == "node-a"
    assert "least estimate" in seen["reason"]
    assert seen["tokens"] == sum(snap["tokens"].values())
    assert snap["series"][0]["requests"] == 1
    assert sum(snap["hit_histogram"]) == 1
    assert router.activity.watchers == 0


async def test_a_pull_is_told_with_its_source(rig):
    engines = [await rig.engine("a"), await rig.engine("b", prefill_tokens_per_s=1.0)]
    await rig.start(*engines)
    token_ids = list(range(100, 100 + 33 * 16))
    fast = {"node-b": {"bytes_per_s": 1e9, "setup_s": 0.0}}
    await rig.holds(engines[1], token_ids)
    await rig.holds(engines[0], [], links=fast)

    await rig.post(prompt=token_ids)

    (seen,) = snapshot_of(rig.router)["decisions"]
    assert (seen["node"], seen["source"], seen["pulled"]) == ("node-a", "node-b", 32 * 16)
    assert "from node-b" in seen["reason"]
    assert seen["cold_s"] > seen["estimate_s"]


async def test_nothing_of_a_prompt_is_in_the_data(rig):
    await rig.start(await rig.engine())
    await rig.post(prompt=SECRET_TEXT)
    await rig.post(prompt=SECRET_TEXT)

    async with rig.client.get("/dashboard/snapshot") as response:
        text = await response.text()

    assert json.loads(text)["prefixes"][0]["requests"] == 2
    assert "sesame" not in text


async def test_the_stream_tells_a_decision_and_then_its_first_byte(rig):
    engine = await rig.engine()
    router = await rig.start(engine)

    async with rig.client.get("/dashboard/events") as stream:
        await until(lambda: router.activity.watchers)
        await (await rig.client.post(
            "/v1/completions", json={"model": "tiny", "prompt": "hello " * 40, "stream": True}
        )).read()  # fmt: skip
        told = []
        async with asyncio.timeout(30):
            while len(told) < 3:
                line = await stream.content.readline()
                if line.startswith(b"data: "):
                    told.append(json.loads(line[6:]))

    assert len({event["id"] for event in told}) == 1
    assert told[0]["ttft_s"] is None
    assert told[-1]["ttft_s"] > 0
    await until(lambda: not router.activity.watchers)


async def test_a_router_that_stops_ends_its_streams(rig):
    await rig.start(await rig.engine())

    async with rig.client.get("/dashboard/events") as stream:
        await stream.content.readline()
        await asyncio.wait_for(rig.runner.cleanup(), 9)  # less than the drain of real requests


async def test_readers_are_bounded(rig):
    router = await rig.start(await rig.engine())
    router.activity._watchers.update(object() for _ in range(MAX_WATCHERS))

    async with rig.client.get("/dashboard/events") as response:
        assert response.status == 429
        assert (await response.json())["error"]["code"] == "overloaded"
    router.activity._watchers.clear()


@pytest.fixture
def keys_file(tmp_path):
    def entry(name, **more):
        digest = hashlib.sha256(name.encode()).hexdigest()
        return {"name": name, "sha256": digest, "tenant": name} | more

    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [entry("client"), entry("operator", dashboard=True)]}))
    return path


@pytest.mark.parametrize("path", ["/dashboard/snapshot", "/dashboard/events"])
async def test_where_there_are_keys_only_one_that_may_watch_sees_data(rig, keys_file, path):
    await rig.start(await rig.engine(), keys_file=keys_file)
    statuses = {}
    for key in ("", "client", "operator"):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with rig.client.get(path, headers=headers) as response:
            statuses[key] = response.status

    assert statuses == {"": 401, "client": 401, "operator": 200}


async def test_the_page_may_load_nothing_from_elsewhere(rig):
    await rig.start(await rig.engine())

    async with rig.client.get("/dashboard") as response:
        policy, page = response.headers["Content-Security-Policy"], await response.text()

    assert "default-src 'none'" in policy
    assert "http" not in page
    async with rig.client.get("/dashboard/keys.py") as response:
        assert response.status == 404


def test_a_slow_reader_misses_events_and_is_told():
    activity = Activity(lambda: 0.0, lambda: 0.0)
    with activity.watched() as watcher:
        for _ in range(MAX_UNREAD + 3):
            watcher.tell(object())

    assert watcher.missed == 3
    assert watcher.unread.qsize() == MAX_UNREAD


def test_only_the_last_decisions_are_kept(decided):
    activity = Activity(lambda: 0.0, lambda: 0.0)
    for number in range(KEPT_DECISIONS + 5):
        activity.sent(f"r{number}", "chat", 64, decided, cold_s=1.0)

    assert len(activity.decisions()) == KEPT_DECISIONS
    assert activity.decisions()[0].id == "r5"
    assert activity.requests == KEPT_DECISIONS + 5


def test_hot_prefixes_are_a_bounded_tree_that_cools():
    hot = HotPrefixes()
    root = [bytes([1]) * 16]
    left, right = [root + [bytes([side, i]) * 8 for i in range(3)] for side in (2, 3)]
    for chain in (left, left, right, right, right):
        hot.note(chain, 16, now=0.0)

    (tree,) = hot.tree(now=0.0)

    assert (tree["requests"], tree["tokens"]) == (5, 16)
    assert [child["requests"] for child in tree["children"]] == [3, 2]
    assert [child["tokens"] for child in tree["children"]] == [64, 64]  # joined to the longest
    assert hot.tree(now=600.0)[0]["heat"] == pytest.approx(5 / 4)
    for number in range(MAX_ENTRIES):
        hot.note([number.to_bytes(16)], 16, now=1.0)
    assert len(hot._entries) == MAX_ENTRIES


def test_a_prefix_outlives_what_continues_it_and_keeps_its_count(monkeypatch):
    monkeypatch.setattr("prefixfleet.router.hot_prefixes.MAX_ENTRIES", 4)
    hot, root = HotPrefixes(), bytes(16)
    for number in range(1, 7):  # each a leaf of its own: three of them fit beside their parent
        hot.note([root, bytes([number]) * 16], 16, now=0.0)

    assert len(hot._entries) == 4
    (tree,) = hot.tree(now=0.0)
    assert (tree["tokens"], tree["requests"], tree["heat"]) == (16, 6, 6.0)


def test_prefixes_cool_alike_however_long_a_router_runs():
    hot, years = HotPrefixes(), 2_000 * HALF_LIFE_S
    old, new = [b"a" * 16], [b"b" * 16]
    for at_s in (0.0, 0.0, years, years, years + HALF_LIFE_S):
        hot.note(new if at_s else old, 16, now=at_s)

    (first, second) = hot.tree(now=years + HALF_LIFE_S)

    assert (first["requests"], first["heat"]) == (3, 2.0)
    assert (second["requests"], second["heat"]) == (2, 0.0)


@pytest.fixture
def decided():
    from prefixfleet.router.decision import Decision
    from prefixfleet.router.dispatch import Dispatched
    from prefixfleet.router.worker import Worker
    from prefixfleet.store.records import WorkerRecord

    record = WorkerRecord(
        worker="w", node="n", url="", model="m", model_path="", namespace={},
        block_bytes=1, max_model_tokens=1, prefill_tokens_per_s=1.0,
    )  # fmt: skip
    decision = Decision(
        worker="w", hit_blocks=1, pull_blocks=0, source=None, queue_s=0.0, pull_s=0.0, prefill_s=0.1
    )
    return Dispatched(
        request="r",
        worker=Worker(record, None, b"", 16),
        decision=decision,
        chain=[b"x" * 16],
    )
