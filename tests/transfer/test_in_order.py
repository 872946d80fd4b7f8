"""A few calls under way at once, results in order, nothing left under way."""

import asyncio
import contextlib

import pytest
from eventually import until

from prefixfleet.transfer.in_order import in_order


class Calls:
    """Calls that end when they are told to."""

    def __init__(self):
        self.running = set()
        self.most = 0

    async def __call__(self, item):
        self.running.add(item)
        self.most = max(self.most, len(self.running))
        try:
            await asyncio.sleep(0.001 * (item % 3))
            if item == 13:
                raise ValueError("thirteen")
            return item * 10
        finally:
            self.running.discard(item)


async def test_results_come_in_the_order_of_the_items_and_few_are_under_way():
    calls = Calls()

    results = [result async for result in in_order(calls, range(10), 3)]

    assert results == [i * 10 for i in range(10)]
    assert calls.most <= 3


async def test_a_failure_comes_in_its_place_and_leaves_nothing_under_way():
    calls = Calls()
    generator = in_order(calls, range(11, 20), 4)

    assert [await anext(generator), await anext(generator)] == [110, 120]
    with pytest.raises(ValueError, match="thirteen"):
        await anext(generator)

    assert not calls.running


async def test_stopping_early_waits_for_what_is_under_way():
    calls = Calls()

    async with contextlib.aclosing(in_order(calls, range(10), 3)) as generator:
        async for _ in generator:
            break

    assert not calls.running


async def test_cancelling_cancels_what_is_under_way():
    running = set()

    async def never_ends(item):
        running.add(item)
        try:
            await asyncio.Event().wait()
        finally:
            running.discard(item)

    async def consume():
        async with contextlib.aclosing(in_order(never_ends, range(5), 3)) as generator:
            async for _ in generator:
                pass

    task = asyncio.create_task(consume())
    await until(lambda: len(running) == 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert not running
