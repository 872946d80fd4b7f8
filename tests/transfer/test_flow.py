"""Bytes under way are bounded, and who has moved least goes first."""

import asyncio

import pytest

from prefixfleet.transfer.flow import Flow
from prefixfleet.transfer.pull import MAX_AT_ONCE, PORTION_BYTES
from prefixfleet.transfer.source import LANES

FOREGROUND, BACKGROUND = False, True


async def entering(flow, peer, size, moved=0, background=FOREGROUND):
    """A task that waits for its turn, and has asked for it."""
    task = asyncio.create_task(flow.enter(peer, size, (background, moved)))
    await asyncio.sleep(0)
    return task


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_portions_go_until_the_bound_of_all_is_reached():
    flow = Flow(max_bytes=100, max_peer_bytes=100)
    tasks = [await entering(flow, f"p{i}", 40) for i in range(3)]
    await settle()

    assert [task.done() for task in tasks] == [True, True, False]
    assert flow.bytes == 80
    tasks[0].result().leave()
    await settle()

    assert tasks[2].done()
    assert flow.bytes == 80


async def test_a_peer_over_its_bound_does_not_hold_up_another():
    flow = Flow(max_bytes=1000, max_peer_bytes=50)
    first, second = await entering(flow, "a", 40), await entering(flow, "a", 40)
    other = await entering(flow, "b", 40)
    await settle()

    assert [first.done(), second.done(), other.done()] == [True, False, True]
    first.result().leave()
    await settle()
    assert second.done()


async def test_who_has_moved_least_goes_first():
    flow = Flow(max_bytes=40, max_peer_bytes=40)
    running = await entering(flow, "a", 40)
    long = await entering(flow, "a", 40, moved=500)
    short = await entering(flow, "b", 40, moved=0)
    await settle()

    running.result().leave()
    await settle()

    assert (short.done(), long.done()) == (True, False)
    short.result().leave()
    assert (await long).size_bytes == 40


async def test_the_longest_pull_leaves_room_for_a_short_one():
    """As large as portions are: of one source, and of all that it may read from at once."""
    flow, short = Flow(), 4096
    for _ in range(LANES):
        await entering(flow, "p0", PORTION_BYTES, moved=1)
    beside = await entering(flow, "p0", short)
    for peer in range(1, MAX_AT_ONCE):
        for _ in range(LANES):
            await entering(flow, f"p{peer}", PORTION_BYTES, moved=1)
    elsewhere = await entering(flow, "another", short)
    await settle()

    assert flow.bytes == MAX_AT_ONCE * LANES * PORTION_BYTES + 2 * short
    assert (beside.done(), elsewhere.done()) == (True, True)


async def test_a_short_portion_waits_for_short_ones_only():
    flow = Flow(max_bytes=400, max_peer_bytes=160)  # short: 10, of 40 at once
    long = [await entering(flow, "a", 80) for _ in range(3)]
    short = [await entering(flow, "a", 10) for _ in range(5)]
    await settle()

    assert [task.done() for task in long] == [True, True, False]
    assert [task.done() for task in short] == [True, True, True, True, False]
    short[0].result().leave()
    await settle()
    assert (short[4].done(), long[2].done()) == (True, False)
    assert flow.bytes == 160 + 40


async def test_short_portions_in_the_background_wait_for_long_ones():
    flow = Flow(max_bytes=400, max_peer_bytes=160)
    long = [await entering(flow, "a", 80) for _ in range(2)]
    background = await entering(flow, "a", 10, background=BACKGROUND)
    await settle()

    assert not background.done()
    long[0].result().leave()

    assert (await background).size_bytes == 10


async def test_background_gives_way_whatever_it_has_moved():
    flow = Flow(max_bytes=40, max_peer_bytes=40)
    running = await entering(flow, "a", 40)
    background = await entering(flow, "a", 40, background=BACKGROUND)
    foreground = await entering(flow, "a", 40, moved=500)
    await settle()

    running.result().leave()
    await settle()

    assert (foreground.done(), background.done()) == (True, False)
    background.cancel()
    await asyncio.gather(background, return_exceptions=True)


async def test_a_portion_larger_than_the_bound_goes_alone():
    flow = Flow(max_bytes=40, max_peer_bytes=40)
    small = await entering(flow, "a", 10)
    huge = await entering(flow, "a", 1000)
    await settle()

    assert not huge.done()
    small.result().leave()

    assert (await huge).size_bytes == 1000


async def test_one_who_gives_up_leaves_no_trace():
    flow = Flow(max_bytes=40, max_peer_bytes=40)
    running = await entering(flow, "a", 40)
    waiting = await entering(flow, "a", 40)
    behind = await entering(flow, "a", 40, moved=1)

    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    running.result().leave()

    (await behind).leave()
    assert flow.bytes == 0


async def test_one_who_gives_up_as_its_turn_comes_gives_the_room_back():
    flow = Flow(max_bytes=40, max_peer_bytes=40)
    running = await entering(flow, "a", 40)
    waiting = await entering(flow, "a", 40)

    running.result().leave()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)

    assert flow.bytes == 0
