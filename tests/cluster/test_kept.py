"""What ends is started again, and never in a tight loop."""

import asyncio

import pytest

from prefixfleet.cluster import kept
from prefixfleet.store.errors import ConfigError


@pytest.fixture
def pauses(monkeypatch):
    """The pauses that were made; none takes time."""
    made, sleep = [], asyncio.sleep

    async def pause(seconds):
        made.append(seconds)
        await sleep(0)

    monkeypatch.setattr(kept.asyncio, "sleep", pause)
    return made


async def keep_through(starts, ended="status 1"):
    """Keep something whose starts go as ``starts`` say, until there are no more."""
    left, over = list(starts), asyncio.Event()

    async def end():
        if not left:
            over.set()
            await asyncio.Event().wait()
        return ended

    async def start():
        error = left.pop(0)
        if error:
            raise ConfigError(error)

    task = asyncio.create_task(kept.keep("it", end, start))
    await asyncio.wait_for(over.wait(), 20)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_pauses_grow_to_a_bound(pauses):
    await keep_through([""] * 8)

    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]


async def test_a_start_that_fails_is_tried_again_and_said(pauses, caplog):
    await keep_through(["no port", ""])

    assert "it ended (status 1); again in 0.5 s" in caplog.text
    assert "it ended (no port); again in 1 s" in caplog.text


async def test_one_that_ran_long_is_started_again_soon(pauses, monkeypatch):
    monkeypatch.setattr(kept, "STEADY_S", -1.0)

    await keep_through([""] * 3)

    assert pauses == [0.5, 0.5, 0.5]
