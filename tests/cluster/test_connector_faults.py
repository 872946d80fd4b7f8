"""What the connector does when something fails or goes: the answer is right, nothing is leaked."""

import random
import socket as sockets
import threading
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_rig import BLOCK, answer, expected_answer, prompt_of
from node_rig import pool_of

from prefixfleet.cluster import connector_copier
from prefixfleet.cluster.connector_loads import OpenLoads
from prefixfleet.cluster.connector_lookup import LOCAL_BUDGET_S
from prefixfleet.cluster.connector_paged import PagedKv
from prefixfleet.cluster.connector_pool import RankPool
from prefixfleet.store.records import PullPlan
from prefixfleet.store.slot import SlotLayout


def spoil(daemons, position):
    """Flip a byte of the pool's n-th resident block; returns how many there are."""

    def flip(node):
        host = pool_of(node).host
        slots = [host.pool._table.slot_of[block] for block, _ in host.pool.resident()]
        layout: SlotLayout = host.kind.layout
        host.segment.view[slots[position] * layout.slot_bytes + 200] ^= 1
        return len(slots)

    return daemons.ask("a", flip)


def test_a_spoiled_block_is_computed_and_the_good_ones_before_it_are_used(start, daemons):
    prompt = prompt_of(6 * BLOCK + 1)
    answer(start(), "a", prompt)
    spoil(daemons, position=4)
    rig = start()

    told = answer(rig, "b", prompt)

    assert told == expected_answer(prompt, 4)
    assert rig.reports["b"]["local_blocks"] == 4
    assert (rig.counts["loaded_blocks"], rig.counts["failed_loads"]) == (4, 1)


def test_a_spoiled_first_block_does_not_make_the_engine_ask_for_ever(start, daemons):
    prompt = prompt_of(6 * BLOCK + 1)
    answer(start(), "a", prompt)
    spoil(daemons, position=0)
    rig = start()

    rig.add("b", prompt, 4)
    rig.run(steps=500)

    assert rig.answers["b"] == expected_answer(prompt, 4)
    assert rig.reports["b"]["local_blocks"] == 0


def test_a_spoiled_block_is_replaced_so_that_only_one_request_pays(start, daemons):
    prompt = prompt_of(6 * BLOCK + 1)
    answer(start(), "a", prompt)
    spoil(daemons, position=2)
    answer(start(), "b", prompt)

    third = start()
    told = answer(third, "c", prompt)

    assert told == expected_answer(prompt, 4)
    assert third.reports["c"]["local_blocks"] == 6


def test_one_ranks_spoiled_shard_is_enough_to_compute_the_block(start, daemons):
    prompt = prompt_of(6 * BLOCK + 1)
    answer(start(ranks=2), "a", prompt)
    spoil(daemons, position=3)  # in rank 0's shard
    rig = start(ranks=2)

    told = answer(rig, "b", prompt)

    assert told == expected_answer(prompt, 4)
    assert rig.reports["b"]["local_blocks"] == 3


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", range(12))
def test_a_client_that_leaves_at_any_moment_leaks_nothing(start, daemons, overlap, steps):
    prompt = prompt_of(6 * BLOCK + 1)
    answer(start(), "a", prompt)
    rig = start(overlap=overlap, step_tokens=32)
    rig.add("b", prompt + prompt_of(4 * BLOCK, seed=2), 20)
    for _ in range(steps):
        rig.step()

    rig.abort("b")
    rig.run()

    daemons.wait_unused()


def test_a_client_that_leaves_while_its_blocks_are_loaded_leaks_nothing(start, daemons):
    prompt = prompt_of(40 * BLOCK + 1)
    answer(start(), "a", prompt)
    rig = start()
    rig.add("b", prompt, 4)
    output = rig.schedule_load()

    rig.abort("b")
    rig.work(output)
    rig.update()
    rig.run()

    daemons.wait_unused()


def test_without_a_daemon_the_engine_serves_and_saves_again_when_it_is_back(start, daemons):
    prompt = prompt_of(5 * BLOCK + 1)
    rig = start()
    answer(rig, "a", prompt)
    daemons.stop()

    alone = answer(rig, "b", prompt_of(5 * BLOCK, seed=3))
    daemons.start()
    step_until_connected(rig)
    answer(rig, "c", prompt)  # the engine's own blocks, which the new daemon has never seen

    other = start()
    told = answer(other, "d", prompt)
    assert (rig.counts["requests_without_daemon"], rig.counts["daemon_losses"]) == (1, 1)
    assert alone == expected_answer(prompt_of(5 * BLOCK, seed=3), 4)
    assert told == expected_answer(prompt, 4)
    assert other.reports["d"]["local_blocks"] == 5


def step_until_connected(rig):
    workers = [rank.connector._worker for rank in rig.ranks]
    for client in (rig.connector._scheduler._session.client, *(w._client for w in workers)):
        for _ in range(1000):
            if client.welcome is not None:
                break
            client._settled.clear()
            client.settle(0.05)


def test_a_daemon_that_dies_under_a_request_costs_time_only(start, daemons):
    prompt = prompt_of(40 * BLOCK + 1)
    answer(start(), "a", prompt)
    rig = start()
    rig.add("b", prompt, 4)
    output = rig.schedule_load()

    daemons.stop()
    rig.work(output)
    rig.update()
    rig.run()

    assert rig.answers["b"] == expected_answer(prompt, 4)


def test_blocks_that_the_engine_takes_back_from_a_save_never_reach_the_pool(
    start, daemons, monkeypatch
):
    prompt = prompt_of(3 * BLOCK + 1)
    rig = start()
    reading, go_on = hold_first_read(monkeypatch)
    rig.add("a", prompt, 4)
    while not rig.scheduler.running:  # it waits for what the daemon says of its blocks
        rig.step()
    assert reading.wait(60)

    rig.scheduler.reset_prefix_cache(reset_running_requests=True)  # preempts
    output = rig.schedule()
    rig.ranks[0].connector.handle_preemptions(output.kv_connector_metadata)
    for cache in rig.ranks[0].caches.values():
        cache.fill_(-7)
    go_on.set()
    rig.work(output)
    rig.update()
    rig.run()

    assert rig.preemptions == 1
    assert answer(start(), "b", prompt) == rig.answers["a"] == expected_answer(prompt, 4)
    daemons.wait_unused()


def hold_first_read(monkeypatch):
    """The copier stops before it first reads the paged KV: (it is there, let it go on)."""
    reading, go_on, read = threading.Event(), threading.Event(), PagedKv.read

    def slow(self, *arguments):
        if not reading.is_set():
            reading.set()
            go_on.wait(60)
        read(self, *arguments)

    monkeypatch.setattr(PagedKv, "read", slow)
    return reading, go_on


def test_a_save_that_fails_costs_a_later_hit_only(start, daemons, monkeypatch):
    def fail(self, *_):
        raise RuntimeError("device lost")

    prompt = prompt_of(3 * BLOCK + 1)
    rig = start()
    with monkeypatch.context() as patch:
        patch.setattr(PagedKv, "read", fail)
        told = answer(rig, "a", prompt)

    other = start()
    answer(other, "b", prompt)
    assert told == expected_answer(prompt, 4)
    assert other.reports["b"]["local_blocks"] == 0
    assert rig.counts["dropped_blocks"] == 3
    daemons.wait_unused()


def test_a_save_that_fails_before_it_has_slots_does_not_end_the_copier(start, monkeypatch):
    def fail(self, *_):
        raise RuntimeError("can't start new thread")

    prompt = prompt_of(3 * BLOCK + 1)
    rig = start()
    with monkeypatch.context() as patch:
        patch.setattr(RankPool, "reserve", fail)
        told = answer(rig, "a", prompt)
    later = answer(rig, "b", prompt_of(3 * BLOCK + 1, seed=2))

    assert told == expected_answer(prompt, 4)
    assert later == expected_answer(prompt_of(3 * BLOCK + 1, seed=2), 4)
    assert (rig.counts["dropped_blocks"], rig.counts["saved_blocks"]) == (3, 6)


def test_an_engine_that_stops_gives_no_slot_away_that_it_still_writes(
    start, daemons, monkeypatch, caplog
):
    monkeypatch.setattr(connector_copier, "CLOSE_S", 0.01)
    rig, prompt = start(), prompt_of(3 * BLOCK + 1)
    reading, go_on = hold_first_read(monkeypatch)
    rig.add("a", prompt, 4)
    while not rig.scheduler.running:
        rig.step()
    assert reading.wait(60)

    rig.ranks[0].connector.shutdown()
    other = prompt_of(12 * BLOCK + 1, seed=2)
    answer(start(), "b", other)
    go_on.set()
    rig.ranks[0].connector._worker._copier._thread.join(60)

    third = start()
    assert answer(third, "c", other) == expected_answer(other, 4)
    assert (third.reports["c"]["local_blocks"], third.counts["failed_loads"]) == (12, 0)
    assert "still writes" in caplog.text
    rig.ranks[0].connector.shutdown()
    daemons.wait_unused()


def test_a_load_that_fails_in_the_device_is_computed(start, monkeypatch):
    def fail(self, *_):
        raise RuntimeError("device lost")

    prompt = prompt_of(3 * BLOCK + 1)
    answer(start(), "a", prompt)
    rig = start()
    monkeypatch.setattr(PagedKv, "write", fail)

    assert answer(rig, "b", prompt) == expected_answer(prompt, 4)
    assert rig.reports["b"]["local_blocks"] == 0


@contextmanager
def silent_daemon(path: Path):
    """Takes connections and answers nothing."""
    with sockets.socket(sockets.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        yield path


def test_a_daemon_that_never_answers_does_not_hold_an_engine_up(start, tmp_path_factory):
    prompt = prompt_of(5 * BLOCK)
    with silent_daemon(tmp_path_factory.mktemp("s") / "s.sock") as path:
        rig = start(at=path)

        told = answer(rig, "a", prompt)

    assert told == expected_answer(prompt, 4)
    assert rig.reports["a"]["failure"] == "daemon_lost"


def test_a_pull_plan_brings_a_peers_blocks(start, daemons):
    prompt = prompt_of(6 * BLOCK + 1)
    answer(start(at=daemons.start("b")), "a", prompt)
    rig = start()
    plan = plan_of("b", daemons, blocks=6)

    told = answer(rig, "x", prompt, params={"prefixfleet": plan})

    report = rig.reports["x"]
    assert told == expected_answer(prompt, 4)
    assert (report["request"], report["pulled_blocks"], report["local_blocks"]) == ("r1", 6, 0)
    assert report["pulled_bytes"] > 0
    assert report["link"] == "tcp"
    assert report["failure"] == ""


@pytest.mark.parametrize(
    ("plan", "budget_s"),
    [(PullPlan(request="r1", budget_s=7.5), 7.5), (None, LOCAL_BUDGET_S)],
)
def test_a_lookup_may_take_what_the_routers_plan_says(start, daemons, plan, budget_s):
    """Also one without a pull: the node may have to read from its disk."""
    told, prompt = [], prompt_of(2 * BLOCK + 1)
    rig = start()

    def listen(node):
        cache = pool_of(node).cache
        prepare = cache.prepare

        async def told_prepare(*arguments):
            told.append(arguments[-1])
            return await prepare(*arguments)

        cache.prepare = told_prepare

    daemons.ask("a", listen)
    answer(rig, "x", prompt, params={"prefixfleet": asdict(plan)} if plan else None)

    assert told == [budget_s]


def test_a_source_that_is_gone_is_a_miss_with_a_reason(start, daemons):
    prompt = prompt_of(6 * BLOCK + 1)
    answer(start(at=daemons.start("b")), "a", prompt)
    rig = start()
    plan = plan_of("b", daemons, blocks=6)
    daemons.stop("b")

    told = answer(rig, "x", prompt, params={"prefixfleet": plan})

    assert told == expected_answer(prompt, 4)
    assert rig.reports["x"]["pulled_blocks"] == 0
    assert rig.reports["x"]["failure"] != ""


def plan_of(source, daemons, blocks):
    epoch = daemons.ask(source, lambda node: node.epoch)
    plan = PullPlan(request="r1", source=source, source_epoch=epoch, blocks=blocks, budget_s=20.0)
    return asdict(plan)


@pytest.mark.parametrize(
    "params",
    [
        {"prefixfleet": {}},
        {"prefixfleet": 7},
        {"prefixfleet": {"version": 1, "request": "r", "blocks": -1}},
        {"other": 1},
        {},
    ],
)
def test_a_plan_that_is_none_is_ignored(start, params):
    prompt = prompt_of(3 * BLOCK)
    rig = start()

    assert answer(rig, "a", prompt, params=params) == expected_answer(prompt, 4)


def test_a_small_pool_that_evicts_all_the_time_never_gives_a_wrong_block(start, daemons):
    tiny = daemons.start("tiny", pool_bytes=1 << 20)  # about twenty blocks
    prompts = [prompt_of(6 * BLOCK + i, seed=i % 5) for i in range(20)]
    one, other = start(at=tiny), start(at=tiny)

    for i, prompt in enumerate(prompts):
        one.add(f"a{i}", prompt, 3)
        other.add(f"b{i}", prompt, 3)
    while busy := [rig for rig in (one, other) if rig.scheduler.has_requests()]:
        for rig in busy:
            rig.step()

    for i, prompt in enumerate(prompts):
        assert one.answers[f"a{i}"] == other.answers[f"b{i}"] == expected_answer(prompt, 3)
    daemons.wait_unused("tiny")


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_that_come_and_go_at_random_are_right_and_leak_nothing(start, daemons, overlap):
    """Little paged KV, a little pool, shared prefixes, aborts, two engines: all at once."""
    tiny = daemons.start("tiny", pool_bytes=1 << 20)
    rigs = [start(at=tiny, blocks=20, overlap=overlap, step_tokens=48) for _ in range(2)]
    dice = random.Random(7)
    wanted: dict[Any, Any] = {}

    for i in range(60):
        rig, name = rigs[dice.randrange(2)], f"r{i}"
        length, count = dice.randrange(1, 9 * BLOCK), dice.randrange(1, 3 * BLOCK)
        prompt = prompt_of(length, seed=dice.randrange(4))
        rig.add(name, prompt, count, cache_salt=dice.choice([None, "s"]))
        wanted[rig, name] = (prompt, count)
        for other in rigs:
            for _ in range(dice.randrange(6)):
                if other.scheduler.has_requests():
                    other.step()
        if dice.random() < 0.3:
            gone = dice.choice(list(wanted))
            gone[0].abort(gone[1])
            wanted[gone] = (wanted[gone][0], None)
    for rig in rigs:
        rig.run()

    for (rig, name), (prompt, count) in wanted.items():
        said = rig.answers[name]
        full = expected_answer(prompt, count or len(said))
        assert said == full[: len(said)], name
        assert count is None or len(said) == count
    assert sum(rig.preemptions for rig in rigs) > 0
    assert sum(r["local_blocks"] for rig in rigs for r in rig.reports.values()) > 0
    daemons.wait_unused("tiny")


@pytest.mark.parametrize("ranks", [(3, 1), (1, 3)])
def test_of_a_load_the_rank_at_which_fewest_blocks_arrived_decides(ranks):
    chain = tuple(bytes([n]) * 16 for n in range(4))
    found = SimpleNamespace(slots=(5, 6, 7, 8))
    loads = OpenLoads()
    loads.begin("r", SimpleNamespace(poll=lambda: found, chain=chain), range(4), (0, 1, 2, 3))

    for arrived in ranks:
        loads.note_failed({"r": arrived})

    ended = loads.end("r")
    assert (ended.good, ended.wanted) == (1, 4)
    assert "r" not in loads
