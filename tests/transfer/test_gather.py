"""Who reads next in a pull, and who takes over from whom. Sources are scripts; the pool is real."""

import asyncio

import pytest
from eventually import until
from links import soon
from pulls import NAMESPACE, PoolNode, chain

from prefixfleet.store.errors import PeerBusy, PeerLost, PullFailed
from prefixfleet.transfer.assembly import Assembly
from prefixfleet.transfer.gather import Gathering, Source
from prefixfleet.transfer.reading import Read

CHAIN = chain(10)


class Script:
    """A pull of ten blocks, two at once, from sources that do what they are told."""

    def __init__(self, *, at_once=1, others=(), **contacts):
        self.node = PoolNode("target", slots=16)
        self.assembly = Assembly(self.node.pool.reserve(b"", CHAIN), self.node.pool, 2)
        self.begun = []
        self.ends = []
        self.does = {}  # by contact
        self.later = []
        self.asked = 0
        self.gathering = Gathering(
            self.assembly,
            Read(contacts or {"tcp": "one"}, 1, NAMESPACE, tuple(CHAIN), soon()),
            others=lambda: self.find(others),
            at_once=at_once,
            begin=self.begin,
            ended=self.ended,
            later=self.later.append,
        )

    async def find(self, others):
        self.asked += 1
        return [Source({"tcp": other}, 1) for other in others]

    async def begin(self, read, assembly):
        read.link = next(iter(read.contacts))
        self.begun.append(read.contacts[read.link])
        await self.does.get(read.contacts[read.link], self.bring)(read, assembly)

    async def bring(self, read, assembly, have=10):
        while work := assembly.take(have):
            await asyncio.sleep(0)
            read.blocks += len(work)
            assembly.landed(work)

    def ended(self, read, task):
        try:
            task.result()
        except PullFailed as error:
            return error.reason
        return ""

    async def run(self):
        async with asyncio.timeout(20):
            await self.gathering.run()
        for work in self.later:
            await work
        return self.assembly.blocks


def fails(error):
    async def begin(read, assembly):
        raise error("no")

    return begin


async def test_one_source_is_enough_and_nobody_else_is_asked():
    script = Script(others=["two"])

    assert await script.run() == 10
    assert (script.begun, script.asked) == (["one"], 0)


async def test_a_busy_source_is_replaced():
    script = Script(others=["two", "three"])
    script.does = {"one": fails(PeerBusy), "two": fails(PeerBusy)}

    assert await script.run() == 10
    assert (script.begun, script.asked) == (["one", "two", "three"], 1)


async def test_another_source_comes_before_another_link_to_the_same_one():
    script = Script(others=["two"], ucx="one by ucx", tcp="one by tcp")
    script.does = {"one by ucx": fails(PeerLost), "two": fails(PeerLost)}

    assert await script.run() == 10
    assert script.begun == ["one by ucx", "two", "one by tcp"]


async def test_a_source_that_says_no_is_not_asked_over_another_link():
    script = Script(ucx="one by ucx", tcp="one by tcp")
    script.does = {"one by ucx": fails(PeerBusy)}

    assert await script.run() == 0
    assert script.begun == ["one by ucx"]
    assert script.gathering.failure == "busy"


async def test_who_was_done_takes_over_from_one_that_fails_later():
    script = Script(at_once=2, others=["two"])
    taken = asyncio.Event()
    done = asyncio.Event()

    async def fail_late(read, assembly):
        work = assembly.take(10)
        taken.set()
        await done.wait()
        assembly.give_back(work)
        raise PeerLost("in the middle")

    async def after(read, assembly):
        await taken.wait()
        await script.bring(read, assembly)
        done.set()

    script.does = {"one": fail_late, "two": after}

    assert await script.run() == 10
    assert script.begun == ["one", "two", "two"]


async def test_it_ends_only_when_nobody_writes_any_more():
    """A block before left the pool, so the pull is over; another source's bytes still arrive."""
    script = Script(at_once=2, others=["two"])
    landing, let_go = asyncio.Event(), asyncio.Event()

    async def lands_late(read, assembly):
        work = assembly.take(10)
        landing.set()
        await let_go.wait()
        assembly.landed(work)

    async def finds_the_end(read, assembly):
        await landing.wait()
        assembly.end = assembly.blocks = 0  # as when the first block's parent is evicted
        assembly.landed(assembly.take(10))

    script.does = {"one": lands_late, "two": finds_the_end}
    running = asyncio.create_task(script.run())
    await until(lambda: script.assembly.finished)
    for _ in range(5):
        await asyncio.sleep(0)

    assert not running.done()
    let_go.set()
    await running


async def test_a_source_that_was_not_needed_is_let_to_its_end():
    script = Script(at_once=2, others=["two"])
    found_nothing = asyncio.Event()

    async def slow(read, assembly):
        await until(lambda: assembly.finished)
        assert assembly.take(10) is None
        found_nothing.set()

    script.does = {"two": slow}

    assert await script.run() == 10
    assert found_nothing.is_set()


async def test_cancelling_ends_every_source_first():
    script = Script(at_once=2, others=["two"])
    ended = []

    async def hang(read, assembly):
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(read.contacts["tcp"])

    script.does = {"one": hang, "two": hang}
    running = asyncio.create_task(script.gathering.run())
    await until(lambda: len(script.begun) == 2)

    running.cancel()

    with pytest.raises(asyncio.CancelledError):
        await running
    assert sorted(ended) == ["one", "two"]


async def test_a_search_that_fails_ends_the_pull_and_first_every_source():
    """It is a fault of ours; still no source may write into slots that are given back."""
    script = Script(at_once=2)
    ended = []

    async def hang(read, assembly):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(read.contacts["tcp"])

    async def broken(others):
        await until(lambda: script.begun)
        raise ZeroDivisionError

    script.does, script.find = {"one": hang}, broken

    with pytest.raises(ZeroDivisionError):
        await script.run()
    assert ended == ["one"]
