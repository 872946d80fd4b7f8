"""The node daemon with real parts: real pool, real sockets, real links, a real Redis."""

import asyncio
import stat
from dataclasses import asdict
from functools import partial
from pathlib import Path

import aiohttp
import pytest
from eventually import until
from node_rig import (
    NAMESPACE,
    SECRET,
    PlainEngine,
    fresh_chain,
    payload_of,
    pool_of,
    running_node,
    settings_of,
)

from prefixfleet.cluster.handover import HandedOver, ask_handover, encode_request
from prefixfleet.cluster.leftovers import pools_of
from prefixfleet.store import watermark
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.prefetch import (
    SIGNATURE_HEADER,
    Prefetch,
    encode_prefetch,
    prefetch_key,
    sign,
)
from prefixfleet.store.records import PullPlan
from prefixfleet.store.redis_index import RedisIndex


@pytest.fixture
async def index(redis_url, fleet):
    index = RedisIndex(redis_url, fleet, lease_s=60, timeout_s=20)
    yield index
    await index.close()


@pytest.fixture
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("n")


async def matched(index, chain, expected):
    return await index.match(chain) == expected


def files(folder):
    """What lies there, besides the lock that keeps a node's name."""
    return [path for path in folder.iterdir() if path.suffix != ".lock"]


async def reachable(index, daemon):
    """Whether the index says where peers connect to this node."""
    members = await index.members()
    return any(record.contacts for m, record in members if m.node == daemon.settings.name)


def plan_from(daemon, blocks, **changes):
    values = {"request": "r", "source": daemon.settings.name, "source_epoch": daemon.epoch}
    return PullPlan(**values | {"blocks": blocks, "budget_s": 20.0} | changes)


async def test_what_an_engine_commits_is_in_the_index_and_found_again(index, folder):
    chain = fresh_chain(5)
    async with running_node(index, settings_of(folder)) as daemon:
        async with PlainEngine.connected(daemon.settings.socket_path) as engine:
            await engine.put(chain)

            await until(lambda: matched(index, chain, {"a": 5}))
        async with PlainEngine.connected(daemon.settings.socket_path) as engine:
            answer = await engine.prepare([*chain, *fresh_chain(2)])

            assert (answer["blocks"], answer["local"], answer["pulled"]) == (5, 5, 0)
            for block, slot in zip(chain, answer["slots"], strict=True):
                assert engine.payload(slot, block) == payload_of(block)


async def test_blocks_of_one_node_are_pulled_by_another_byte_for_byte(index, folder):
    chain = fresh_chain(40)
    async with (
        running_node(index, settings_of(folder, "a")) as a,
        running_node(index, settings_of(folder, "b")) as b,
        PlainEngine.connected(a.settings.socket_path) as at_a,
        PlainEngine.connected(b.settings.socket_path) as at_b,
    ):
        await at_a.put(chain, fill=42)
        await until(lambda: reachable(index, a))

        answer = await at_b.prepare(chain, plan_from(a, 40))

        assert (answer["local"], answer["pulled"], answer["link"]) == (0, 40, "tcp")
        assert answer["pulled_bytes"] == 40 * 8192
        for block, slot in zip(chain, answer["slots"], strict=True):
            assert at_b.payload(slot, block) == payload_of(block, 42)

        await until(lambda: matched(index, chain, {"a": 40, "b": 40}))
        assert b.snapshot()["links"]["a"]["pulls"] == 1


async def test_a_hint_starts_the_pull_that_the_engine_then_joins(index, folder):
    chain = fresh_chain(8)
    async with (
        running_node(index, settings_of(folder, "a")) as a,
        running_node(index, settings_of(folder, "b")) as b,
        PlainEngine.connected(a.settings.socket_path) as at_a,
        PlainEngine.connected(b.settings.socket_path) as at_b,
        aiohttp.ClientSession() as session,
    ):
        await at_a.put(chain)
        await until(lambda: reachable(index, a))
        plan = plan_from(a, 8)
        digest = NAMESPACE.digest(SECRET)
        body = encode_prefetch(Prefetch(plan=plan, namespace=digest, chain=tuple(chain)))
        headers = {SIGNATURE_HEADER: sign(body, prefetch_key(SECRET))}

        async with session.post(f"{b.url}/prefetch", data=body, headers=headers) as response:
            assert response.status == 202
        await until(lambda: b.stats.pulls == 1)
        answer = await at_b.prepare(chain, plan)

        assert answer["pulled"] == 8
        assert b.stats.pulls == 1
        assert b.snapshot()["cache"]["joined_hints"] == 1


async def test_an_engine_that_goes_leaves_no_pins_and_no_reservations(index, folder):
    chain = fresh_chain(6)
    async with running_node(index, settings_of(folder)) as daemon:
        async with PlainEngine.connected(daemon.settings.socket_path) as engine:
            await engine.put(chain[:3])
            await engine.prepare(chain)
            await engine.ask("reserve", parent=chain[2], hashes=b"".join(chain[3:]), rank=0)
            dram = daemon.snapshot()["tiers"]["dram"]
            assert (dram["pinned"], dram["reserved"]) == (3, 3)

        await until(
            lambda: (
                [daemon.snapshot()["tiers"]["dram"][k] for k in ("pinned", "reserved")] == [0, 0]
            )
        )


async def test_a_full_pool_makes_room_and_the_index_forgets_what_left(index, folder):
    settings = settings_of(folder)  # 128 slots
    old, new = fresh_chain(100), fresh_chain(100)
    async with (
        running_node(index, settings) as daemon,
        PlainEngine.connected(settings.socket_path) as engine,
    ):
        await engine.put(old)
        assert -1 not in await engine.put(new)

        async def in_step():
            kept = pool_of(daemon).host.pool.match(old)  # an engine that asks would be a use
            return kept < 28 and await index.match(old) == ({"a": kept} if kept else {})

        await until(in_step)
        await until(lambda: matched(index, new, {"a": 100}))
        assert daemon.snapshot()["cache"]["evicted_blocks"] >= 72


async def test_copies_go_before_the_fleets_last_copies(index, folder):
    alone, copied = fresh_chain(40), fresh_chain(40)
    async with (
        running_node(index, settings_of(folder, "a")) as a,  # 128 slots
        running_node(index, settings_of(folder, "b")) as b,
        PlainEngine.connected(a.settings.socket_path) as at_a,
        PlainEngine.connected(b.settings.socket_path) as at_b,
    ):
        await at_a.put(alone)
        await at_a.put(copied)
        await at_b.put(copied)
        await until(lambda: a.snapshot()["tiers"]["dram"]["next_held_elsewhere"])

        await at_a.put(fresh_chain(52))  # 4 more than are free
        await until(lambda: a.snapshot()["cache"]["evicted_blocks"] >= 4)
        await until(lambda: matched(index, alone, {"a": 40}))
        held = await index.match(copied)

        assert held["b"] == 40
        assert held.get("a", 0) <= 36


async def test_a_pool_that_is_all_pinned_gives_no_slot_and_loses_nothing(
    index, folder, monkeypatch
):
    monkeypatch.setattr(watermark, "MOST_SHARE", 4 / 128)  # the evictor keeps four slots free
    chain, more = fresh_chain(128), fresh_chain(4)
    settings = settings_of(folder)
    async with (
        running_node(index, settings) as daemon,
        PlainEngine.connected(settings.socket_path) as engine,
    ):
        await engine.put(chain[:124])
        await engine.prepare(chain)
        await engine.put(fresh_chain(4))
        await engine.prepare(fresh_chain(1), request="another")

        slots = await engine.put(more)

        assert (await engine.prepare(chain, request="again"))["blocks"] == 124
        assert daemon.snapshot()["tiers"]["dram"]["slots"] == 128
        assert len([s for s in slots if s >= 0]) <= 4


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"payload_bytes": 100_000}, "slots of"),
        ({"namespace": "another"}, "namespace differs in dtype"),
        ({"version": 99}, "got version 99, expected 1"),
        ({"shards": 0}, "expected at least 1"),
        ({"namespace": {}}, "got fields"),
    ],
)
async def test_an_engine_that_does_not_fit_is_refused_with_the_reason(index, folder, changes, why):
    if changes.get("namespace") == "another":
        changes = {"namespace": asdict(NAMESPACE) | {"dtype": "bfloat16"}}
    settings = settings_of(folder)
    async with (
        running_node(index, settings) as daemon,
        PlainEngine.connected(settings.socket_path),
        PlainEngine.connected(settings.socket_path, **changes) as other,
    ):
        assert why in other.welcome["error"]
        await until(lambda: daemon.snapshot()["refused_engines"] == 1)


async def test_an_engine_whose_blocks_do_not_fit_into_the_pool_is_told_what_to_set(index, folder):
    settings = settings_of(folder)
    async with (
        running_node(index, settings),
        PlainEngine.connected(settings.socket_path, payload_bytes=1 << 21) as engine,
    ):
        assert "set PREFIXFLEET_NODE_POOL_BYTES higher" in engine.welcome["error"]


async def test_a_damaged_block_that_an_engine_reports_leaves_pool_and_index(index, folder):
    chain = fresh_chain(6)
    settings = settings_of(folder)
    async with (
        running_node(index, settings),
        PlainEngine.connected(settings.socket_path) as engine,
    ):
        slots = await engine.put(chain)
        await until(lambda: matched(index, chain, {"a": 6}))
        engine.spoil(slots[2])

        await engine.ask("discard", hashes=chain[2] + chain[0])

        await until(lambda: matched(index, chain, {"a": 2}))
        assert (await engine.prepare(chain))["blocks"] == 2


async def test_a_good_block_that_an_engine_reports_stays(index, folder):
    chain = fresh_chain(3)
    settings = settings_of(folder)
    async with (
        running_node(index, settings),
        PlainEngine.connected(settings.socket_path) as engine,
    ):
        await engine.put(chain)

        await engine.ask("discard", hashes=b"".join(chain))

        assert (await engine.prepare(chain))["blocks"] == 3


async def test_a_spoiled_block_of_the_source_is_not_taken_and_leaves_the_source(index, folder):
    chain = fresh_chain(6)
    async with (
        running_node(index, settings_of(folder, "a")) as a,
        running_node(index, settings_of(folder, "b")) as b,
        PlainEngine.connected(a.settings.socket_path) as at_a,
        PlainEngine.connected(b.settings.socket_path) as at_b,
    ):
        slots = await at_a.put(chain)
        await until(lambda: reachable(index, a))
        at_a.spoil(slots[4])

        answer = await at_b.prepare(chain, plan_from(a, 6))

        assert (answer["blocks"], answer["failure"]) == (4, "corrupt")
        await until(lambda: matched(index, chain, {"a": 4, "b": 4}))


async def test_a_node_that_leaves_is_forgotten_at_once(index, folder):
    chain = fresh_chain(2)
    settings = settings_of(folder)
    async with (
        running_node(index, settings),
        PlainEngine.connected(settings.socket_path) as engine,
    ):
        await engine.put(chain)
        await until(lambda: matched(index, chain, {"a": 2}))

    assert await index.members() == []
    assert await index.match(chain) == {}


async def test_a_stopped_daemon_leaves_no_file_behind(index, folder):
    settings = settings_of(folder)
    async with (
        running_node(index, settings),
        PlainEngine.connected(settings.socket_path) as engine,
    ):
        (pool,) = pools_of(folder)
        assert str(pool) == engine.welcome["pool_path"]
        modes = [stat.S_IMODE(p.stat().st_mode) for p in (pool, settings.socket_path)]
        assert modes == [0o600, 0o600]

    assert files(folder) == []
    assert pools_of(folder) == []


async def ask_to_leave(node, secret=SECRET):
    return await ask_handover(node.url, prefetch_key(secret), 20.0)


async def test_peers_take_the_last_copies_of_a_node_that_goes(index, folder):
    """Chains that share a head too; what a peer has already is not sent again."""
    head, tails = fresh_chain(2), [fresh_chain(3), fresh_chain(2)]
    shared = fresh_chain(4)
    async with (
        running_node(index, settings_of(folder, "a")) as a,
        running_node(index, settings_of(folder, "b")) as b,
        PlainEngine.connected(a.settings.socket_path) as at_a,
        PlainEngine.connected(b.settings.socket_path) as at_b,
    ):
        for tail in tails:
            await at_a.put(head + tail)
        for engine in (at_a, at_b):
            await engine.put(shared)
        whole = [head + tail for tail in tails]
        for chain in whole:
            await until(partial(matched, index, chain, {"a": len(chain)}))
        await until(partial(matched, index, shared, {"a": 4, "b": 4}))
        await until(partial(reachable, index, a))
        await until(partial(_tells_its_room, index, b))

        done = await ask_to_leave(a)

        assert done == HandedOver(last_copies=7, taken=7)
        for chain in whole:
            assert (await index.match(chain))["b"] == len(chain)
        answer = await at_b.prepare(whole[0])
        assert [at_b.payload(s, h) for s, h in zip(answer["slots"], whole[0], strict=True)]
        assert b.snapshot()["tiers"]["dram"]["resident"] == 4 + 7


async def _tells_its_room(index, daemon):
    records = {m.node: record for m, record in await index.members()}
    return records[daemon.settings.name].stats.get("tiers")


async def test_a_node_whose_peers_have_no_room_or_that_is_alone_just_goes(index, folder):
    chain = fresh_chain(3)
    async with (
        running_node(index, settings_of(folder, "a")) as a,
        PlainEngine.connected(a.settings.socket_path) as at_a,
    ):
        await at_a.put(chain)
        await until(partial(matched, index, chain, {"a": 3}))

        assert await ask_to_leave(a) == HandedOver(last_copies=3, taken=0)
        async with running_node(index, settings_of(folder, "b")):  # no engine, so no pool
            assert await ask_to_leave(a) == HandedOver(last_copies=3, taken=0)


async def test_only_the_fleet_itself_may_ask_a_node_to_hand_over(index, folder):
    async with (
        running_node(index, settings_of(folder, "a")) as a,
        aiohttp.ClientSession() as session,
    ):
        assert await ask_to_leave(a, b"another secret of somebody") is None
        for body in (b"", b"{}", b"[]", encode_request(0.0), encode_request(float("nan"))):
            headers = {SIGNATURE_HEADER: sign(body, prefetch_key(SECRET))}
            async with session.post(f"{a.url}/handover", data=body, headers=headers) as response:
                assert response.status == 400
                assert "handover" in (await response.json())["error"]


async def test_a_second_daemon_of_the_same_name_does_not_start(index, folder):
    settings = settings_of(folder)
    async with running_node(index, settings):
        with pytest.raises(ConfigError, match=r"'a' already runs.*PREFIXFLEET_NODE_NAME"):
            async with running_node(index, settings):
                pass

        assert settings.socket_path.exists()


async def test_a_port_in_use_is_a_clear_error_and_leaves_nothing(index, folder):
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*PREFIXFLEET_NODE_PORT"):
            async with running_node(index, settings_of(folder, port=port)):
                pass

    assert files(folder) == []


async def test_what_a_killed_daemon_left_is_removed_at_the_next_start(index, folder):
    settings = settings_of(folder)
    async with (
        running_node(index, settings),
        PlainEngine.connected(settings.socket_path) as engine,
    ):
        left = engine.welcome["pool_path"]
    for path in (Path(left), settings.socket_path):  # as after kill -9
        path.touch()

    async with (
        running_node(index, settings),
        PlainEngine.connected(settings.socket_path) as engine,
    ):
        assert await engine.put(fresh_chain(1)) != [-1]


async def test_a_life_ends_and_another_one_begins_under_a_higher_epoch(index, folder):
    settings = settings_of(folder)
    epochs = []
    for _ in range(2):
        async with running_node(index, settings) as daemon:
            await until(partial(getattr, daemon, "epoch"))
            epochs.append(daemon.epoch)

    assert epochs[0] < epochs[1]


async def test_a_plan_for_another_life_of_the_source_turns_to_what_the_index_knows(index, folder):
    chain, unknown = fresh_chain(3), fresh_chain(3)
    async with (
        running_node(index, settings_of(folder, "a")) as a,
        running_node(index, settings_of(folder, "b")) as b,
        PlainEngine.connected(a.settings.socket_path) as at_a,
        PlainEngine.connected(b.settings.socket_path) as at_b,
    ):
        await at_a.put(chain)
        await until(lambda: matched(index, chain, {"a": 3}))
        plan = plan_from(a, 3, source_epoch=a.epoch + 1)

        miss = await at_b.prepare(unknown, plan)
        hit = await at_b.prepare(chain, plan)

        assert (miss["blocks"], miss["failure"]) == (0, "epoch")
        assert (hit["blocks"], hit["failure"]) == (3, "")


async def test_what_the_planned_source_lost_comes_from_another_node(index, folder):
    chain = fresh_chain(30)
    async with (
        running_node(index, settings_of(folder, "a")) as a,
        running_node(index, settings_of(folder, "b")) as b,
        running_node(index, settings_of(folder, "c")) as c,
        PlainEngine.connected(a.settings.socket_path) as at_a,
        PlainEngine.connected(b.settings.socket_path) as at_b,
        PlainEngine.connected(c.settings.socket_path) as at_c,
    ):
        await at_a.put(chain[:10], fill=42)
        slots = await at_b.put(chain, fill=42)
        await until(lambda: matched(index, chain, {"a": 10, "b": 30}))
        at_b.spoil(slots[29])

        answer = await at_c.prepare(chain, plan_from(a, 30))

        assert (answer["blocks"], answer["pulled"], answer["failure"]) == (29, 29, "corrupt")
        for block, slot in zip(chain, answer["slots"], strict=False):
            assert at_c.payload(slot, block) == payload_of(block, 42)
        assert c.snapshot()["counters"]["failed_sources"] == {"corrupt": 1}
        await until(lambda: matched(index, chain, {"a": 10, "b": 29, "c": 29}))


@pytest.mark.parametrize(("link", "taken"), [("auto", "shm"), ("shm", "shm"), ("tcp", "tcp")])
async def test_nodes_of_one_host_copy_from_memory_unless_a_link_is_forced(
    index, folder, link, taken
):
    chain = fresh_chain(20)
    async with (
        running_node(index, settings_of(folder, "a", link="auto")) as a,
        running_node(index, settings_of(folder, "b", link=link)) as b,
        PlainEngine.connected(a.settings.socket_path) as at_a,
        PlainEngine.connected(b.settings.socket_path) as at_b,
    ):
        await at_a.put(chain, fill=42)
        await until(lambda: reachable(index, a))

        answer = await at_b.prepare(chain, plan_from(a, 20))

        assert (answer["pulled"], answer["link"]) == (20, taken)
        why = {"auto": "same host"}.get(link, "forced")
        told = b.snapshot()["links"]["a"]
        assert (told["link"], told["why"]) == (taken, why)
        for block, slot in zip(chain, answer["slots"], strict=True):
            assert at_b.payload(slot, block) == payload_of(block, 42)


async def test_a_link_that_is_not_there_is_a_failure_with_its_name(index, folder):
    chain = fresh_chain(3)
    async with (
        running_node(index, settings_of(folder, "a")) as a,
        running_node(index, settings_of(folder, "b")) as b,
        PlainEngine.connected(a.settings.socket_path) as at_a,
        PlainEngine.connected(b.settings.socket_path) as at_b,
    ):
        await at_a.put(chain)
        await until(lambda: reachable(index, a))

        answer = await at_b.prepare(chain, plan_from(a, 3, link="pigeon"))

        assert (answer["blocks"], answer["failure"]) == (0, "refused")
