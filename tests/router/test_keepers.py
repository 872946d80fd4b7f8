"""What a router knows of who keeps which response: bounded, of one tenant, shared, for a while."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from clocks import ManualClock
from eventually import until
from redis_servers import forgetful_server, new_fleet
from upstreams import SECRET

from prefixfleet.router.degraded import Degraded
from prefixfleet.router.keepers import BATCH, Keepers
from prefixfleet.store.errors import IndexUnavailable
from prefixfleet.store.stored_responses import StoredResponses

AWAY = "redis://127.0.0.1:1/0"


def alone(clock, **options):
    """Keepers of a router that shares nothing."""
    return Keepers(None, SECRET, Degraded(clock), clock, **options)


@pytest.fixture
async def sharing(redis_url):
    """Makes keepers that share on one server, and run."""
    fleet = new_fleet()
    async with AsyncExitStack() as stack:

        def made(url=redis_url):
            shared = StoredResponses(url, fleet, timeout_s=20)
            stack.push_async_callback(shared.close)
            keepers = Keepers(shared, SECRET, Degraded(ManualClock()), ManualClock())
            task = asyncio.create_task(keepers.run())
            stack.callback(task.cancel)
            return keepers

        yield made


async def test_of_its_tenant_only(clock):
    keepers = alone(clock)

    keepers.note("one", "resp_1", "a")
    keepers.note("two", "resp_1", "b")
    keepers.note("1", "2:3", "c")

    assert await keepers.worker_of("one", "resp_1") == "a"
    assert await keepers.worker_of("two", "resp_1") == "b"
    assert await keepers.worker_of("three", "resp_1") == ""
    assert await keepers.worker_of("12", ":3") == ""
    assert len(keepers) == 3


@pytest.mark.parametrize("response", ["", "\0", "../x", "世界\n", "\ud800", "x" * 100_000])
async def test_any_text_is_an_id(clock, response):
    keepers = alone(clock)

    assert await keepers.worker_of("t", response) == ""
    keepers.note("t", response, "a")

    assert await keepers.worker_of("t", response) == "a"


async def test_what_is_over_is_not_found_and_goes(clock):
    keepers = alone(clock, ttl_s=10)
    keepers.note("t", "old", "a")
    clock.advance(6)
    keepers.note("t", "young", "a")
    clock.advance(6)

    assert await keepers.worker_of("t", "old") == ""
    assert await keepers.worker_of("t", "young") == "a"
    keepers.note("t", "new", "a")
    assert len(keepers) == 2


async def test_the_oldest_of_too_many_go(clock):
    keepers = alone(clock, most=3)

    for number in range(3):
        keepers.note("t", str(number), "a")
    keepers.note("t", "0", "b")
    keepers.note("t", "3", "a")

    found = [await keepers.worker_of("t", str(number)) for number in range(4)]
    assert found == ["b", "", "a", "a"]


async def test_a_tenant_with_many_pushes_out_its_own(clock):
    keepers = alone(clock, most=10)
    for number in range(3):
        keepers.note("small", str(number), "a")
    for number in range(1_000):
        keepers.note("big", str(number), "a")

    assert [await keepers.worker_of("small", str(number)) for number in range(3)] == ["a"] * 3
    found = [number for number in range(1_000) if await keepers.worker_of("big", str(number))]
    assert found == list(range(993, 1_000))


async def test_others_are_told_however_many_there_are(sharing):
    one, other = sharing(), sharing()

    for number in range(2 * BATCH + 1):
        one.note("t", str(number), f"worker-{number}")
    await until(lambda: not one.untold)

    for number in (0, BATCH, 2 * BATCH):
        assert await other.worker_of("t", str(number)) == f"worker-{number}"
    assert await other.worker_of("u", "0") == ""
    assert len(other) == 3


async def test_one_that_is_told_late_is_found(sharing):
    """A client asks another router at once: that one looks again."""
    one, other = sharing(), sharing()
    there = other.shared

    class Slow:
        """Where the first router's word comes in after the second one has looked."""

        async def worker_of(self, response):
            known = await there.worker_of(response)
            if not len(one):
                one.note("t", "resp_1", "a")
                await until(lambda: not one.untold)
            return known

    other.shared = Slow()

    assert await other.worker_of("t", "resp_1") == "a"


async def test_without_redis_what_is_known_here_is_found_and_told_later(sharing):
    keepers, other = sharing(AWAY), sharing()
    there = other.shared

    keepers.note("t", "resp_1", "a")

    assert await keepers.worker_of("t", "resp_1") == "a"
    with pytest.raises(IndexUnavailable):
        await keepers.worker_of("t", "resp_2")
    (mode,) = keepers._degraded.modes()
    assert mode.name == "responses"
    assert keepers.untold == 1

    keepers.shared, away = there, keepers.shared
    await until(lambda: not keepers._degraded.modes())
    assert await other.worker_of("t", "resp_1") == "a"
    keepers.shared = away


async def test_a_redis_that_lost_its_memory_is_told_again(sharing, tmp_path):
    with forgetful_server(tmp_path) as server:
        one, other = sharing(server.url), sharing(server.url)
        one.note("t", "resp_1", "a")
        await until(lambda: not one.untold)
        server.clients.append(other.shared._redis)
        await server.lose_its_memory()

        one.note("t", "resp_2", "a")  # by this it finds out
        await until(lambda: one._degraded.modes() or not one.untold)
        await until(lambda: not one.untold)

        assert await other.worker_of("t", "resp_2") == "a"
        assert await other.worker_of("t", "resp_1") == "a"


async def test_a_mode_ends_though_there_is_nothing_to_tell(sharing):
    keepers, other = sharing(AWAY), sharing()
    with pytest.raises(IndexUnavailable):
        await keepers.worker_of("t", "resp_1")
    assert keepers._degraded.modes()

    keepers.shared = other.shared

    await until(lambda: not keepers._degraded.modes())


async def test_what_cannot_be_told_is_bounded(clock):
    keepers = Keepers(StoredResponses(AWAY, "f"), SECRET, Degraded(clock), clock, most=10)

    for number in range(100):
        keepers.note("t", str(number), "a")

    assert len(keepers) == keepers.untold == 10
