"""Claims: what a request was promised stays in place until it is done, and no longer."""

import asyncio
import time

import pytest
from eventually import until

from prefixfleet.cluster.claims import Claims
from prefixfleet.store.errors import Overloaded
from prefixfleet.store.eviction import LruOrder
from prefixfleet.store.hit_times import HitTimes
from prefixfleet.store.pool import SlotPool
from prefixfleet.store.records import PullPlan
from prefixfleet.transfer.pull import PullResult

CHAIN = [bytes([i]) * 16 for i in range(8)]


def put(pool, blocks):
    """Make the leading ``blocks`` of the chain resident."""
    here = pool.match(CHAIN)
    reservation = pool.reserve(CHAIN[here - 1] if here else b"", CHAIN[here:blocks])
    for block in CHAIN[here:blocks]:
        assert reservation.commit(block)
    return blocks - here


class World:
    """A pool of 8 slots and a fetch that brings blocks when it is let."""

    def __init__(self):
        self.pool = SlotPool(8, LruOrder(), time.monotonic)
        self.go = asyncio.Event()
        self.fetches = 0
        self.failure = ""
        self.times = HitTimes(time.monotonic)
        self.disk_s = self.passed_s = 0.0
        self.claims = Claims(self.pool, self.bring, self.fetch, self.times, clock=self.now)

    def now(self):
        """Monotonic seconds, and those that the disk took."""
        return time.monotonic() + self.passed_s

    async def bring(self, chain, deadline):
        """A disk that gives nothing, and is waited for."""
        if self.now() < deadline:
            self.passed_s += self.disk_s

    async def fetch(self, chain, plan, deadline):
        self.fetches += 1
        await self.go.wait()
        if self.failure:
            return PullResult(failure=self.failure)
        return PullResult(blocks=put(self.pool, plan.blocks), bytes=9, seconds=0.5, link="ucx")

    async def claim(self, owner=(1, "r"), plan=None, within_s=20.0):
        return await self.claims.claim(owner, CHAIN, plan, self.now() + within_s)

    def pinned(self):
        return self.pool.counts().pinned


@pytest.fixture
async def world():
    world = World()
    yield world
    await world.claims.close()
    world.pool.check()
    assert world.pinned() == 0


def plan(blocks=6, request="r"):
    return PullPlan(request=request, source="a", source_epoch=1, blocks=blocks, budget_s=5.0)


async def test_what_is_here_is_pinned_until_it_is_released(world):
    put(world.pool, 3)

    prepared = await world.claim()

    assert (len(prepared.slots), world.pinned()) == (3, 3)
    world.claims.release((1, "r"))
    assert world.pinned() == 0


async def test_a_disk_from_which_no_block_comes_in_time_counts_as_slower_than_that(world):
    world.disk_s = 200.0

    await world.claim(within_s=100.0)

    assert world.times.numbers()["read_s"] > 0


async def test_a_question_that_leaves_no_time_says_nothing_of_the_disk(world):
    world.disk_s = 200.0

    await world.claim(within_s=0.0)

    assert world.times.numbers()["read_s"] == 0


async def test_a_plan_brings_more_and_the_answer_says_what_came_from_where(world):
    put(world.pool, 2)
    world.go.set()

    prepared = await world.claim(plan=plan())

    assert prepared.fields() == {
        "blocks": 6,
        "slots": list(prepared.slots),
        "local": 2,
        "pulled": 4,
        "pulled_bytes": 9,
        "pull_s": 0.5,
        "link": "ucx",
        "failure": "",
    }
    assert world.pinned() == 6


@pytest.mark.parametrize("useless", [plan(blocks=2), PullPlan(request="r", blocks=8)])
async def test_a_plan_that_promises_no_more_than_is_here_pulls_nothing(world, useless):
    put(world.pool, 2)

    prepared = await world.claim(plan=useless)

    assert (len(prepared.slots), world.fetches) == (2, 0)


async def test_a_failed_pull_leaves_what_is_here_and_says_why(world):
    put(world.pool, 2)
    world.failure = "peer_lost"
    world.go.set()

    prepared = await world.claim(plan=plan())

    assert (len(prepared.slots), prepared.pulled.failure) == (2, "peer_lost")


async def test_a_second_question_of_a_request_replaces_the_first(world):
    put(world.pool, 2)
    await world.claim()

    await world.claim()
    world.claims.release((1, "r"))

    assert world.pinned() == 0


async def test_a_session_that_ends_gives_back_its_claims_and_only_those(world):
    put(world.pool, 2)
    await world.claim(owner=(1, "x"))
    await world.claim(owner=(2, "y"))

    world.claims.disconnect(1)

    assert (len(world.claims), world.pinned()) == (1, 2)


async def test_a_claim_that_is_given_up_half_way_holds_nothing(world):
    put(world.pool, 2)
    task = asyncio.create_task(world.claim(plan=plan()))
    await asyncio.sleep(0)
    assert world.pinned() == 2

    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert world.pinned() == 0


async def test_the_engines_question_joins_the_routers_hint(world):
    world.claims.start_early(CHAIN[:6], plan())
    await asyncio.sleep(0)
    task = asyncio.create_task(world.claim(plan=plan()))
    await asyncio.sleep(0)
    world.go.set()

    prepared = await task

    assert (len(prepared.slots), prepared.pulled.blocks) == (6, 6)
    assert (world.fetches, world.claims.joined_hints, world.claims.waiting_hints) == (1, 1, 0)
    world.claims.release((1, "r"))
    await asyncio.sleep(0)
    assert world.pinned() == 0


async def test_a_hint_that_was_fulfilled_before_the_question_is_used_too(world):
    put(world.pool, 1)
    world.go.set()
    world.claims.start_early(CHAIN[:6], plan())
    await until(lambda: world.pinned() == 6)

    prepared = await world.claim(plan=plan())

    assert prepared.pulled.blocks == 5
    assert world.fetches == 1


async def test_a_question_does_not_wait_for_a_slow_hint_past_its_own_deadline(world):
    world.claims.start_early(CHAIN[:6], plan())
    await asyncio.sleep(0)

    prepared = await world.claim(plan=plan(), within_s=0.01)

    assert (prepared.slots, prepared.pulled.failure) == ((), "deadline")


async def test_a_hint_that_comes_twice_or_after_its_engine_does_nothing(world):
    world.go.set()
    world.claims.start_early(CHAIN[:6], plan())
    world.claims.start_early(CHAIN[:6], plan())
    await world.claim(plan=plan())

    world.claims.start_early(CHAIN[:6], plan())

    assert (world.fetches, world.claims.waiting_hints) == (1, 0)


async def test_a_hint_that_no_engine_asked_for_lets_its_blocks_go(world, monkeypatch):
    monkeypatch.setattr(
        "prefixfleet.cluster.claims.EARLY_HOLD_S", -4.99
    )  # 10 ms after the plan's 5
    world.go.set()
    world.claims.start_early(CHAIN[:6], plan())
    await asyncio.sleep(0)

    await until(lambda: not world.claims.waiting_hints and not world.pinned())

    assert world.claims.expired_hints == 1


async def test_too_many_hints_are_refused(world, monkeypatch):
    monkeypatch.setattr("prefixfleet.cluster.claims.MAX_EARLY", 2)
    for i in range(2):
        world.claims.start_early(CHAIN, plan(request=f"r{i}"))

    with pytest.raises(Overloaded, match="2 prefetches wait"):
        world.claims.start_early(CHAIN, plan(request="one more"))
