"""Ejection of workers that fail, slow start of those that come."""

from types import SimpleNamespace

import pytest
from aiohttp import web
from eventually import until
from upstreams import answer

from prefixfleet.router import traffic as traffic_module
from prefixfleet.router.traffic import FAILURES, FIRST_EJECTION_S, FIRST_SHARE, Traffic


@pytest.fixture
def traffic(clock):
    return Traffic(10.0, clock, lambda: 0.5)


def workers(names):
    return [SimpleNamespace(name=name) for name in names]


def allowed(traffic, names):
    return "".join(w.name for w in traffic.allowed(workers(names)))


def fail(traffic, name, times=FAILURES):
    for _ in range(times):
        traffic.failed(name)


def test_failures_in_a_row_eject_for_a_while(traffic, clock):
    fail(traffic, "a", FAILURES - 1)
    assert allowed(traffic, "abc") == "abc"
    fail(traffic, "a", 1)
    assert allowed(traffic, "abc") == "bc"

    clock.advance(FIRST_EJECTION_S)

    assert allowed(traffic, "abc") == "abc"


def test_a_success_between_failures_ejects_nobody(traffic):
    for _ in range(3 * FAILURES):
        fail(traffic, "a", FAILURES - 1)
        traffic.succeeded("a")

    assert allowed(traffic, "ab") == "ab"


def test_who_fails_again_is_out_for_longer(traffic, clock):
    fail(traffic, "a")
    clock.advance(FIRST_EJECTION_S)
    fail(traffic, "a")
    clock.advance(FIRST_EJECTION_S)

    assert allowed(traffic, "abc") == "bc"
    clock.advance(FIRST_EJECTION_S)
    assert allowed(traffic, "abc") == "abc"


@pytest.mark.parametrize(("names", "least"), [("a", 1), ("ab", 1), ("abc", 2), ("abcdefgh", 4)])
def test_at_most_half_are_out_and_never_all(traffic, names, least):
    """A fault of the requests themselves must not take the fleet away."""
    for name in names:
        fail(traffic, name)

    assert len(allowed(traffic, names)) == least


def test_a_new_worker_takes_part_in_few_choices_at_first_and_in_all_later(clock):
    draws = iter([FIRST_SHARE - 0.01, FIRST_SHARE + 0.01, 0.49, 0.51])
    traffic = Traffic(10.0, clock, lambda: next(draws))
    traffic.joined("b")

    assert [allowed(traffic, "ab") for _ in range(2)] == ["ab", "a"]
    clock.advance(5.0)
    assert [allowed(traffic, "ab") for _ in range(2)] == ["ab", "a"]
    clock.advance(5.0)
    assert allowed(traffic, "ab") == "ab"


def test_a_new_worker_that_is_alone_gets_everything(traffic):
    traffic.joined("a")
    traffic._dice = lambda: 0.99

    assert allowed(traffic, "a") == "a"


async def test_a_worker_whose_answers_fail_gets_no_more(rig, monkeypatch):
    monkeypatch.setattr(traffic_module, "FIRST_EJECTION_S", 300.0)  # longer than the test

    async def broken(engine, request, asked):
        return web.json_response({"error": {"message": "out of memory"}}, status=500)

    engines = [await rig.engine("a", behave=broken), await rig.engine("b")]
    router = await rig.start(*engines)

    statuses = []
    while not router.traffic.is_ejected("a"):
        statuses.append((await rig.post())[0])
        assert len(statuses) < 500
    after = [(await rig.post())[0] for _ in range(8)]

    assert statuses.count(500) == FAILURES - 1  # the last one was asked of the other worker
    assert after == [200] * 8
    assert len(engines[0].seen) == FAILURES


@pytest.mark.parametrize("status", [500, 503])
async def test_requests_that_every_worker_fails_eject_nobody(rig, status):
    """One client must not be able to take workers away from all."""

    async def poisoned(engine, request, asked):
        if "poison" in asked["prompt"]:
            return web.json_response({"error": {"message": "list index"}}, status=status)
        return await answer(engine, request, asked)

    engines = [await rig.engine(name, behave=poisoned) for name in "ab"]
    router = await rig.start(*engines)

    for number in range(6 * FAILURES):
        got, _, _ = await rig.post(prompt=f"poison {number}")
        assert got >= 500
        assert not [name for name in "ab" if router.traffic.is_ejected(name)]
    assert all(len(engine.seen) > FAILURES for engine in engines)
    assert [(await rig.post())[0] for _ in range(4)] == [200] * 4


async def test_a_worker_that_comes_while_others_work_starts_slowly(rig):
    first, second = [await rig.engine(name) for name in "ab"]
    router = await rig.start(first, slow_start_s=1_000.0)
    router.traffic._dice = lambda: 0.99

    await rig.announce(second.record())
    await rig.until_ready(2)
    answers = [await rig.post() for _ in range(4)]

    assert {headers["x-prefixfleet-node"] for _, headers, _ in answers} == {"node-a"}


async def test_a_worker_that_died_while_idle_is_down_before_anybody_asks(rig):
    engine, other = [await rig.engine(name) for name in "ab"]
    router = await rig.start(engine, other, health_interval_s=0.05)

    await engine.stop()

    def state():
        return {s.record.worker: s.state for s in router.roster.standings()}

    await until(lambda: state() == {"a": "down", "b": "ready"})
    assert engine.seen == other.seen == []
