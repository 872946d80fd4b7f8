"""Each worker's health is looked at whatever the others do."""

import asyncio
from contextlib import suppress

import aiohttp
import pytest
from eventually import until
from static_entries import entry, write
from upstreams import for_ever, raw_server

from prefixfleet.router import adapters, health
from prefixfleet.router.health import HealthChecks

INTERVAL_S = 0.02
MANY = 120


class Hanging:
    """A plain engine whose list of models can hang; says who waits for it."""

    def __init__(self, engine):
        self.engine, self.hangs, self.open, self.asked = engine, False, 0, 0
        self._answer, engine._models = engine._models, self._models

    async def _models(self, request):
        if not self.hangs:
            return await self._answer(request)
        self.open, self.asked = self.open + 1, self.asked + 1
        try:
            await for_ever()
        finally:
            self.open -= 1


@pytest.fixture
async def hanging(rig, monkeypatch):
    monkeypatch.setattr(adapters, "TIMEOUT", aiohttp.ClientTimeout())  # it hangs to the test's end
    engine = await rig.engine("a", plain=True)
    await engine.stop()
    hanging = Hanging(engine)
    async with engine.running():
        yield hanging


def knows_law(rig):
    return "law" in rig.router.roster._seats["b"].serves


async def start(rig, path, *engines, **settings):
    listed = write(path, *map(entry, engines))
    return await rig.start(records=[], ready=len(engines), workers_file=listed, **settings)


async def test_who_hangs_keeps_nobody_elses_checks_waiting(rig, tmp_path, hanging):
    other = await rig.engine("b", plain=True)
    await start(rig, tmp_path / "w", hanging.engine, other, health_interval_s=INTERVAL_S)
    hanging.hangs = True
    await until(lambda: hanging.open)

    other.adapters["law"] = ""
    await until(lambda: knows_law(rig))
    await other.stop()
    await until(lambda: rig.router.roster.seated("b")[0] == "down")
    assert (hanging.open, hanging.asked) == (1, 1)


async def test_however_many_hang_the_others_are_looked_at(rig, tmp_path, hanging, monkeypatch):
    """More than a session of aiohttp has connections by itself."""
    monkeypatch.setattr(health, "ADAPTERS_EVERY", 1)
    many = [entry(hanging.engine, name=f"a{number}") for number in range(MANY)]
    other = await rig.engine("b", plain=True)
    listed = write(tmp_path / "w", *many, entry(other))
    await rig.start(records=[], ready=MANY + 1, workers_file=listed, health_interval_s=2.0)
    hanging.hangs = True
    await until(lambda: hanging.open == MANY)

    other.adapters["law"] = ""
    await until(lambda: knows_law(rig))
    await other.stop()
    await until(lambda: rig.router.roster.seated("b")[0] == "down")
    assert hanging.open == MANY


async def test_engines_that_hang_keep_no_other_from_its_traffic(rig):
    """Examined are all at once: each of these would be asked for a minute."""

    async def hangs(reader, writer):
        await for_ever()

    async with raw_server(hangs) as url:
        good = await rig.engine("good")
        hung = [good.record(worker=f"h{n}", node=f"h{n}", url=url) for n in range(MANY)]
        router = await rig.start(records=hung, ready=0)
        await until(lambda: all(s.state == "checking" for s in router.roster.standings()))

        await rig.announce(good.record())
        await rig.until_ready(1)
        assert (await rig.post())[0] == 200


async def test_who_joins_meanwhile_is_looked_at_and_who_leaves_no_more(rig, tmp_path, hanging):
    router = await start(rig, tmp_path / "w", hanging.engine, health_interval_s=INTERVAL_S)
    hanging.hangs = True
    await until(lambda: hanging.open)
    other = await rig.engine("b", plain=True)

    write(tmp_path / "w", entry(hanging.engine), entry(other))
    router.reload()
    await rig.until_ready(2)
    other.adapters["law"] = ""
    await until(lambda: knows_law(rig))
    assert hanging.open == 1

    write(tmp_path / "w", entry(other))
    router.reload()
    await until(lambda: not hanging.open)
    assert router.roster.names() == {"b"}


async def test_nothing_goes_on_when_the_checks_are_stopped(rig, tmp_path, hanging):
    router = await start(rig, tmp_path / "w", hanging.engine)
    checks = asyncio.create_task(HealthChecks(router.roster, router.session, INTERVAL_S).run())
    hanging.hangs = True
    await until(lambda: hanging.open)

    before = asyncio.all_tasks() - {asyncio.current_task()}
    watches = {task for task in before if "HealthChecks._watch" in repr(task.get_coro())}
    checks.cancel()
    with suppress(asyncio.CancelledError):
        await checks

    assert len(watches) == 1
    assert all(task.done() for task in watches)
    await until(lambda: not hanging.open)
