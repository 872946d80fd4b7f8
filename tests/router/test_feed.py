"""The view is never emptied before its successor is there, whatever the index says meanwhile."""

import asyncio
import time

import pytest
from eventually import until
from indexes import chain_of, node_record, segments

from prefixfleet.router import feed as feed_module
from prefixfleet.router.degraded import Degraded
from prefixfleet.router.feed import Feed
from prefixfleet.router.view import View
from prefixfleet.store.errors import IndexUnavailable
from prefixfleet.store.memory_index import MemoryIndex

CHAIN = chain_of("x", 10)


class Mortal:
    """An index that dies and comes back empty: one real index after the other, behind one face.

    ``may_load`` holds back snapshots, as a big index or a busy server does.
    """

    def __init__(self):
        self.real = MemoryIndex(lease_s=60)
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.died = asyncio.Event()
        self.members_read = 0

    def die(self):
        self.died.set()
        self.died = asyncio.Event()
        self.real, dead = MemoryIndex(lease_s=60), self.real
        # epochs go on: a server that lost its memory begins at the time of day
        self.real._epoch = dead._epoch

    async def snapshot(self):
        await self.may_load.wait()
        return await self.real.snapshot()

    async def follow(self, cursor):
        events, death = self.real.follow(cursor), asyncio.create_task(self.died.wait())
        while True:
            event = asyncio.ensure_future(anext(events))
            await asyncio.wait({event, death}, return_when=asyncio.FIRST_COMPLETED)
            if death.done():
                event.cancel()
                raise IndexUnavailable("connection lost")
            yield event.result()

    async def members(self):
        listed = await self.real.members()
        self.members_read += 1
        return listed


@pytest.fixture
async def index(monkeypatch):
    monkeypatch.setattr(feed_module, "POLL_S", 0.01)
    return Mortal()


@pytest.fixture
async def view(index):
    view = View(time.monotonic)
    running = asyncio.create_task(Feed(index, view, Degraded(time.monotonic)).run())
    yield view
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def told(member, pending):
    stats = {"index": {"epoch": member.epoch, "pending_blocks": pending}}
    return node_record(member.node, stats=stats)


async def joined(index, node, blocks):
    member = await index.real.join(node_record(node))
    if blocks:
        await index.real.publish(member, segments(CHAIN[:blocks]))
    return member


async def answers(index, count):
    """Wait until the members were asked for so often again."""
    enough = index.members_read + count
    await until(lambda: index.members_read >= enough)


async def test_lives_that_the_index_forgot_match_until_their_nodes_have_published_again(
    index, view
):
    await joined(index, "a", 10)
    before = await joined(index, "b", 4)
    await until(lambda: view.leading(CHAIN) == {"a": 10, "b": 4})

    index.may_load.clear()
    index.die()
    await index.real.publish(await index.real.join(node_record("other")), segments(CHAIN[:1]))
    again = await joined(index, "a", 2)  # b has not noticed yet
    await answers(index, 4)
    assert view.leading(CHAIN) == {"a": 10, "b": 4}  # the successor is not loaded
    assert view.members["b"] == before

    index.may_load.set()
    await until(lambda: view.members.get("a") == again)
    await index.real.renew(again, told(again, pending=8))
    await answers(index, 3)
    assert view.leading(CHAIN)["a"] == 10

    await index.real.publish(again, segments(CHAIN[:6]))
    await index.real.renew(again, told(again, pending=0))
    await until(lambda: view.leading(CHAIN)["a"] == 6)


async def test_what_nodes_have_not_published_yet_and_how_old_the_answer_is_can_be_read(
    index, monkeypatch
):
    feed = Feed(index, View(time.monotonic), Degraded(time.monotonic))
    running = asyncio.create_task(feed.run())
    for name, pending in (("a", 8), ("b", 2)):
        member = await joined(index, name, 1)
        await index.real.renew(member, told(member, pending))
    await until(lambda: feed.unpublished_blocks == 10)

    monkeypatch.setattr(feed_module, "POLL_S", 3_600)  # nobody asks any more
    await answers(index, 1)
    lag_s = feed.lag_s
    await until(lambda: feed.lag_s > lag_s + 0.05)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_lease_that_ended_without_an_event_is_forgotten_all_the_same(index, view):
    await joined(index, "a", 10)
    member = await joined(index, "b", 4)
    await until(lambda: view.leading(CHAIN) == {"a": 10, "b": 4})

    del index.real._lives[member.slot]

    await until(lambda: view.leading(CHAIN) == {"a": 10})


async def test_a_record_that_is_older_than_the_life_says_nothing_of_what_it_has_published(
    index, view
):
    """A node joins with the record of its life before, which had published everything."""
    before = await joined(index, "a", 10)
    await until(lambda: view.leading(CHAIN) == {"a": 10})

    index.die()
    again = await index.real.join(told(before, pending=0))
    await index.real.publish(again, segments(CHAIN[:2]))
    await until(lambda: view.members.get("a") == again)
    await answers(index, 3)

    assert view.leading(CHAIN) == {"a": 10}
