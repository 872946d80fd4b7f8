"""One step at a time, and none that leaves clients without an engine."""

import asyncio
from dataclasses import replace

import pytest
from upstreams import SECRET

from prefixfleet.cluster import rollout
from prefixfleet.cluster.rollout import Group, Rollout, Step, next_step
from prefixfleet.cluster.scaling import UP_AFTER_S
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.load_board import LoadBoard, SharedLoad
from prefixfleet.store.records import FleetWish, WorkerRecord
from prefixfleet.store.registry import WorkerRegistry


def group(number, rollout=0):
    return Group(f"node-{number}", (f"engine-{number}",), rollout)


def announced(number, rollout=0, state="ready"):
    return WorkerRecord(
        worker=f"engine-{number}", node=f"node-{number}", url="http://127.0.0.1:1", model="m",
        model_path="/m", namespace={}, block_bytes=1, max_model_tokens=1, prefill_tokens_per_s=1.0,
        state=state, rollout=rollout,
    )  # fmt: skip


BOTH = [announced(0), announced(1)]
UPDATE = FleetWish(rollout=1, environ={"PREFIXFLEET_WORKER_MAX_MODEL_TOKENS": "64"})


@pytest.mark.parametrize(
    ("wish", "groups", "workers", "step"),
    [
        (FleetWish(), [group(0), group(1)], BOTH, None),
        (FleetWish(nodes=2), [group(0), group(1)], BOTH, None),
        (FleetWish(nodes=3), [group(0), group(1)], BOTH, Step("start")),
        (FleetWish(nodes=3), [group(0), group(1)], BOTH[:1], None),
        (FleetWish(nodes=1), [group(0), group(1)], BOTH, Step("stop", "node-1")),
        (FleetWish(nodes=1), [group(0), group(1)], BOTH[:1], Step("stop", "node-1")),
        (FleetWish(nodes=1), [group(0), group(1)], BOTH[1:], None),
        (UPDATE, [group(0), group(1)], BOTH, Step("replace", "node-0")),
        (UPDATE, [group(0), group(1)], BOTH[1:], Step("replace", "node-0")),
        (UPDATE, [group(0), group(1)], BOTH[:1], Step("replace", "node-1")),
        (UPDATE, [group(0), group(1)], [], None),
        (UPDATE, [group(0, 1), group(1)], BOTH, None),
        (UPDATE, [group(0, 1), group(1)], [announced(0, 1), BOTH[1]], Step("replace", "node-1")),
        (UPDATE, [group(0, 1), group(1, 1)], [announced(0, 1), announced(1, 1)], None),
        (replace(UPDATE, failed="why"), [group(0), group(1)], BOTH, None),
        (replace(UPDATE, nodes=1), [group(0), group(1)], BOTH, Step("stop", "node-1")),
    ],
)
def test_the_next_step_waits_for_everybody_else(wish, groups, workers, step):
    assert next_step(wish, groups, workers) == step


@pytest.mark.parametrize("name", ["engine-0", "node-0"])
def test_an_engine_that_drains_by_the_wish_is_not_waited_for(name):
    draining = [announced(0, state="draining"), announced(1)]
    groups = [group(0), group(1)]

    assert next_step(UPDATE, groups, draining) == Step("replace", "node-0")
    assert next_step(replace(UPDATE, draining=(name,)), groups, draining) == Step(
        "replace", "node-0"
    )
    scaled = FleetWish(nodes=3, draining=(name,))
    assert next_step(scaled, groups, draining) == Step("start")
    assert next_step(replace(scaled, draining=()), groups, draining) is None


class Recorded:
    """Groups whose engines are announced as soon as they are started; some cannot."""

    def __init__(self, registry, *, breaks=()):
        self.running = [group(0), group(1)]
        self.done = []
        self._registry = registry
        self._breaks = breaks

    def groups(self):
        return list(self.running)

    async def start(self, wish):
        if "start" in self._breaks:
            raise ConfigError("no room")
        self.running.append(group(len(self.running), wish.rollout))
        self.done.append(("start", len(self.running) - 1))
        await self.announce()

    async def stop(self, node):
        gone = self.running.pop()
        assert gone.node == node
        await self._registry.withdraw(gone.workers[0])
        self.done.append(("stop", node))

    async def replace(self, node, wish, *, daemon):
        if "replace" in self._breaks:
            raise ConfigError("wrong setting")
        at = [g.node for g in self.running].index(node)
        self.running[at] = replace(self.running[at], rollout=wish.rollout)
        self.done.append(("replace", node, daemon))
        await self.announce()

    async def announce(self):
        for g in self.running:
            record = announced(int(g.node[-1]), g.rollout)
            await self._registry.announce(record, ttl_s=600)


@pytest.fixture
async def registry(redis_url, fleet, monkeypatch):
    monkeypatch.setattr(rollout, "SETTLE_S", 0.0)
    registry = WorkerRegistry(redis_url, fleet, secret=SECRET, timeout_s=20)
    yield registry
    await registry.close()


@pytest.fixture
async def board(redis_url, fleet, clock):
    board = LoadBoard(redis_url, fleet, "rollout", clock, timeout_s=20)
    yield board
    await board.close()


async def wish_for(registry, **fields):
    await registry.change_wish(lambda wish: replace(wish, **fields))


@pytest.mark.parametrize(
    ("setting", "daemon"),
    [
        ("PREFIXFLEET_WORKER_MAX_MODEL_TOKENS", False),
        ("PREFIXFLEET_WORKER_TENSOR_PARALLEL", True),
        (rollout.MODEL_SETTING, True),
    ],
)
async def test_an_update_goes_through_the_fleet_once(registry, board, setting, daemon):
    groups = Recorded(registry)
    await groups.announce()
    kept = Rollout(groups, registry, board)
    await wish_for(registry, rollout=1, environ={setting: "64"})

    for _ in range(5):
        await kept.look()

    assert groups.done == [("replace", "node-0", daemon), ("replace", "node-1", daemon)]


async def test_scaling_goes_up_and_down(registry, board):
    groups = Recorded(registry)
    await groups.announce()
    kept = Rollout(groups, registry, board)

    await wish_for(registry, nodes=4)
    for _ in range(4):
        await kept.look()
    await wish_for(registry, nodes=1)
    for _ in range(5):
        await kept.look()

    stops = [("stop", f"node-{n}") for n in (3, 2, 1)]
    assert groups.done == [("start", 2), ("start", 3), *stops]


async def test_a_fleet_that_lets_requests_wait_grows_by_itself(
    registry, board, redis_url, fleet, clock
):
    groups = Recorded(registry)
    await groups.announce()
    kept = Rollout(groups, registry, board, clock)
    router = LoadBoard(redis_url, fleet, "router", clock, timeout_s=20)
    await wish_for(registry, least=1, most=8, wait_s=1.0)

    for _ in range(4):
        await router.exchange({"": SharedLoad(0, 9, 0, 3.0)})  # 1.5 s for each of two engines
        await kept.look()
        clock.advance(UP_AFTER_S)
    await router.close()

    assert (await registry.wish()).nodes == 3
    assert groups.done == [("start", 2)]


@pytest.mark.parametrize("verb", ["start", "replace"])
async def test_what_fails_is_written_down_and_not_tried_again(registry, board, verb):
    groups = Recorded(registry, breaks=(verb,))
    await groups.announce()
    kept = Rollout(groups, registry, board)
    await wish_for(registry, nodes=3 if verb == "start" else 0, rollout=1)

    for _ in range(3):
        await kept.look()

    wish = await registry.wish()
    assert wish.failed.startswith(verb)
    assert wish.nodes == 2
    assert groups.done == []


async def test_the_settings_of_a_failed_update_are_not_in_the_next_one(registry, board):
    groups = Recorded(registry, breaks=("replace",))
    await groups.announce()
    good = {"PREFIXFLEET_WORKER_DRAIN_S": "1"}
    await wish_for(registry, rollout=2, environ=good | {"X": "bad"}, undo=good)

    await Rollout(groups, registry, board).look()

    assert (await registry.wish()).environ == good


async def test_a_wish_of_another_version_stops_nothing_and_is_said_once(
    registry, board, redis_url, fleet, caplog
):
    key = f"pf1:{{{fleet}}}:wish"
    await registry._functions.command("HSET", key, "generation", 1, "record", b"\x80")
    kept = Rollout(Recorded(registry), registry, board)

    for _ in range(3):
        await kept.look()

    assert caplog.text.count("the fleet's wish cannot be read") == 1


async def test_a_forged_wish_moves_nothing(registry, board, fleet):
    groups = Recorded(registry)
    await groups.announce()
    forged = FleetWish(nodes=9, rollout=3, environ={"PREFIXFLEET_WORKER_MODEL": "/theirs"})
    key = f"pf1:{{{fleet}}}:wish"
    await registry._functions.command("HSET", key, "generation", 1, "record", forged.encode())
    before = list(groups.running)

    await Rollout(groups, registry, board).look()

    assert groups.running == before
    assert groups.done == []


async def test_it_goes_on_without_redis(registry, board, monkeypatch):
    monkeypatch.setattr(rollout, "LOOK_S", 0.0)
    gone = WorkerRegistry("redis://127.0.0.1:1/0", "f", secret=SECRET, timeout_s=0.2)
    task = asyncio.create_task(Rollout(Recorded(registry), gone, board).run())

    done, _ = await asyncio.wait({task}, timeout=0.5)

    assert not done
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await gone.close()
