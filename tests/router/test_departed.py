"""What was learned of workers: kept while one restarts, gone with who is gone for good."""

import pytest
from clocks import ManualClock
from eventually import until

from prefixfleet.router import departed
from prefixfleet.router.departed import GONE_S, Departed


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def gone():
    return []


@pytest.fixture
def workers(clock, gone):
    return Departed(clock, [gone.append])


def test_who_is_back_in_time_is_known_as_it_was(workers, clock, gone):
    workers.look({"a", "b"})
    for _ in range(3):
        workers.look({"b"})
        clock.advance(GONE_S - 1)
        workers.look({"a", "b"})
        clock.advance(GONE_S)

    assert gone == []


def test_who_is_away_for_long_is_forgotten_once(workers, clock, gone):
    workers.look({"a", "b"})
    workers.look({"b"})
    clock.advance(GONE_S)
    workers.look({"b"})
    clock.advance(GONE_S)
    workers.look({"b"})

    assert gone == ["a"]


async def test_a_router_that_has_seen_many_workers_remembers_those_of_now(rig, monkeypatch):
    monkeypatch.setattr(departed, "GONE_S", 0.0)
    first, second = [await rig.engine(name) for name in "ab"]
    router = await rig.start(first, second)
    for name in "ab":
        router.token_times.observe(name, 1, 0.5)
        router.traffic.failed(name)

    await rig.announce(first.record(), ttl_s=0.05)

    def learned(name):
        return router.token_times.seconds(name, 1), name in router.traffic._conducts

    await until(lambda: learned("a") == (0.0, False))
    assert learned("b") == (0.5, True)
