"""What is noted about requests is there when somebody reads it, in order, and none gets lost."""

import re

import pytest
from eventually import until
from upstreams import EVENTS, for_ever, streaming

from prefixfleet.router.afterwards import MOST, Afterwards


async def test_notes_are_made_in_order_before_anybody_reads():
    made: list[int] = []
    afterwards = Afterwards()
    for number in range(3):
        afterwards.note(lambda number=number: made.append(number))
    assert made == []

    afterwards.catch_up()

    assert made == [0, 1, 2]
    afterwards.close()


async def test_no_more_than_a_few_wait_and_none_for_long():
    made: list[int] = []
    afterwards = Afterwards()
    for _ in range(MOST):
        afterwards.note(lambda: made.append(1))
    assert len(made) == MOST

    afterwards.note(lambda: made.append(1))

    await until(lambda: len(made) == MOST + 1)
    afterwards.close()


async def test_a_note_that_fails_is_told_and_the_others_are_made(caplog):
    made: list[int] = []
    afterwards = Afterwards()
    afterwards.note(lambda: made.append(1 // 0))
    afterwards.note(lambda: made.append(1))

    afterwards.close()

    assert made == [1]
    assert "ZeroDivisionError" in caplog.text


async def test_who_reads_sees_a_request_that_is_still_being_answered(rig, monkeypatch):
    monkeypatch.setattr("prefixfleet.router.afterwards.PATIENCE_S", 3_600)
    await rig.start(await rig.engine(behave=streaming(EVENTS[0], then=for_ever)))
    body = {"model": "tiny", "prompt": "x", "stream": True}

    async with rig.client.post("/v1/completions", json=body) as response:
        await response.content.readany()
        async with rig.client.get("/dashboard/snapshot") as snapshot:
            assert (await snapshot.json())["requests"] == 1
        async with rig.client.get("/metrics") as metrics:
            assert 'prefixfleet_decisions_total{pull="no",worker="a"} 1.0' in await metrics.text()


@pytest.mark.parametrize(
    "name", ["ttft_seconds", "tokenise_seconds", "decision_seconds", "estimate_error_seconds"]
)
async def test_every_time_that_has_a_name_is_taken(rig, name):
    await rig.start(await rig.engine())
    body = {"model": "tiny", "prompt": "x", "stream": True}
    async with rig.client.post("/v1/completions", json=body) as response:
        await response.read()

    async with rig.client.get("/metrics") as metrics:
        counts = re.findall(rf"prefixfleet_{name}_count\S* (\S+)", await metrics.text())

    assert sum(map(float, counts)) >= 1
