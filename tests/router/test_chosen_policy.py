"""A router process with each policy that can be chosen, in front of a live fleet of fakes."""

import asyncio
import contextlib
from typing import get_args

import aiohttp
import pytest
from eventually import until
from router_process import announced, router_process
from router_rig import LEASE_S, chain_of
from upstreams import answer, for_ever

from prefixfleet.router.policy_choice import OURS, POLICIES, PolicyName
from prefixfleet.router.settings import RouterSettings
from prefixfleet.store.chain import segment_heads
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.records import NodeRecord
from prefixfleet.store.redis_index import RedisIndex

HELD = [7] * 640
PROMPT = [*HELD, 8]
FAST = {"bytes_per_s": 1e12, "setup_s": 0.0}
NODE_A, NODE_B = "node-a", "node-b"


class Fleet:
    """Engines a and b, of which a's node may hold a prefix, and a router with a policy."""

    def __init__(self, engines, client, log):
        self.a, self.b = engines
        self.client = client
        self.log = log
        self.open = set()

    async def status(self):
        async with self.client.get("/status") as response:
            return await response.json()

    async def ask(self, prompt=PROMPT):
        """Node and pulled tokens of one answer."""
        body = {"model": "tiny", "prompt": prompt}
        async with self.client.post("/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            headers = response.headers
            return headers["x-prefixfleet-node"], int(headers["x-prefixfleet-pulled-tokens"])

    async def nodes(self, count, prompt=PROMPT):
        return [(await self.ask(prompt))[0] for _ in range(count)]

    async def leave_open(self, prompt, engine):
        """Send a request to which ``engine`` never says a word, and wait until it is there."""
        engine.behave, before = silent, len(engine.seen)
        self.open.add(asyncio.create_task(self.ask(prompt)))
        await until(lambda: len(engine.seen) > before)
        engine.behave = answer


async def silent(engine, request, asked):
    await for_ever()


@pytest.fixture
async def fleet(rig, tmp_path):
    """Starts a fleet whose router has the policy of that name; ``held`` is what node a holds."""
    index = RedisIndex(rig.redis_url, rig.fleet, lease_s=LEASE_S, timeout_s=20)
    rig.stack.push_async_callback(index.close)

    async def start(policy, held=HELD):
        engines = [await rig.engine(name) for name in "ab"]
        await index.prepare()
        for node in (NODE_A, NODE_B):
            stats = {"links": dict.fromkeys((NODE_A, NODE_B), FAST)}
            member = await index.join(NodeRecord(node=node, host="h", stats=stats))
            if node == NODE_A:
                chain = chain_of(held)
                segments = {}
                for head, block in zip(segment_heads(chain), chain, strict=True):
                    segments.setdefault(head, []).append(block)
                await index.publish(member, segments)
        await announced(rig, *engines)
        settings = {"policy": policy, "slow_start_s": 0, "health_interval_s": 0}
        process = router_process(rig, tmp_path, **settings)
        url, _ = await rig.stack.enter_async_context(process)
        client = await rig.stack.enter_async_context(aiohttp.ClientSession(url))
        live = Fleet(engines, client, tmp_path / "router.log")
        rig.stack.callback(lambda: [task.cancel() for task in live.open])
        await until(lambda: ready(live))
        return live

    async def ready(live):
        states = [worker["state"] for worker in (await live.status())["workers"]]
        return states == ["ready", "ready"]

    return start


def test_every_policy_can_be_set_and_nothing_else():
    assert get_args(PolicyName) == tuple(POLICIES)
    assert RouterSettings.read({}).policy == OURS
    with pytest.raises(ConfigError, match=r"ROUTER_POLICY: got 'fifo', expected 'ours', .*'sticky"):
        RouterSettings.read({"PREFIXFLEET_ROUTER_POLICY": "fifo"})


@pytest.mark.parametrize("policy", POLICIES)
async def test_requests_that_come_at_once_are_all_answered(fleet, policy):
    """More than both workers compute at a time, about a prefix that one node holds: with none of
    the policies does a request wait for ever, and the router says by which it decided."""
    live = await fleet(policy)

    async with asyncio.timeout(60):
        answered = await asyncio.gather(*(live.ask() for _ in range(24)))

    assert {node for node, _ in answered} <= {NODE_A, NODE_B}
    pulls = any(pulled for _, pulled in answered)
    assert not pulls or policy in (OURS, "algorithm-1")
    status = await live.status()
    assert status["policy"] == policy
    assert status["waiting"]["queued_requests"] == 0
    await until(lambda: f"by policy {policy}: " in live.log.read_text())


async def test_round_robin_alternates_also_past_a_worker_that_is_busy(fleet):
    """It names a worker without a look at its queue, so whoever waits is bound there; the other
    worker gets its own turns and stands idle for nobody."""
    live = await fleet("round-robin")
    assert await live.nodes(4) == [NODE_A, NODE_B, NODE_A, NODE_B]

    live.a.behave = silent
    asked = [asyncio.create_task(live.ask()) for _ in range(8)]
    live.open.update(asked)
    await until(lambda: sum(task.done() for task in asked) == 4)

    assert {task.result()[0] for task in asked if task.done()} == {NODE_B}
    await until(lambda: len(live.a.seen) == 2 + 4)
    assert (await live.status())["waiting"]["queued_requests"] == 0


async def test_random_takes_each_sooner_or_later(fleet):
    assert {*await (await fleet("random")).nodes(32)} == {NODE_A, NODE_B}


async def test_least_tokens_takes_the_emptier_whoever_holds_the_prefix(fleet):
    live = await fleet("least-tokens")
    live.a.behave = live.b.behave = silent
    live.open.add(asyncio.create_task(live.ask([9] * 2_000)))
    await until(lambda: live.a.seen or live.b.seen)
    live.a.behave = live.b.behave = answer
    idle = NODE_B if live.a.seen else NODE_A

    assert await live.nodes(6) == [idle] * 6


@pytest.mark.parametrize("policy", ["local-aware", "dynamo", "sticky"])
async def test_these_stay_with_the_holder_while_its_queue_is_short_and_never_pull(fleet, policy):
    live = await fleet(policy)
    await live.leave_open(PROMPT, live.a)

    assert [await live.ask() for _ in range(3)] == [(NODE_A, 0)] * 3


@pytest.mark.parametrize("policy", ["local-aware", "dynamo"])
async def test_these_leave_the_holder_when_its_queue_is_long_and_never_pull(fleet, policy):
    live = await fleet(policy)
    await live.leave_open([*HELD, *[9] * 4_000], live.a)

    assert await live.ask() == (NODE_B, 0)


async def test_sticky_holds_out_longer_than_the_queue_is_worth(fleet):
    """Up to 18 s by its rule: a thousand tokens take one, and of these prompts 15,000 are new."""
    held = [7] * 64_000
    live = await fleet("sticky", held)
    await live.leave_open([*held, *[9] * 15_000], live.a)
    assert await live.ask([*held, 8]) == (NODE_A, 0)

    await live.leave_open([*held, *[10] * 15_000], live.a)
    assert await live.ask([*held, 8]) == (NODE_B, 0)


async def test_algorithm_1_pulls_to_the_emptier_what_the_holder_has(fleet):
    live = await fleet("algorithm-1")
    await live.leave_open([*HELD, *[9] * 4_000], live.a)

    assert await live.ask() == (NODE_B, len(HELD))
    plan = live.b.seen[-1]["kv_transfer_params"]["prefixfleet"]
    assert (plan["source"], plan["blocks"]) == (NODE_A, len(HELD) // 16)


async def test_another_value_stops_the_start(rig, tmp_path):
    with contextlib.suppress(AssertionError):
        async with router_process(rig, tmp_path, policy="fifo") as (_, process):
            pytest.fail(f"it serves: {process}")

    assert (
        "PREFIXFLEET_ROUTER_POLICY: got 'fifo', expected 'ours'"
        in (tmp_path / "router.log").read_text()
    )
