"""The timeout trap, over every link: slots of a read that timed out are nobody's until the
connection is gone, and what is given away afterwards is never written to."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from eventually import until
from links import NETWORK_KINDS
from pulls import PullRig, chain, pull_source

from prefixfleet.store.errors import PeerLost
from prefixfleet.store.slot_table import QUARANTINED

BLOCKS = 600
CHAIN, OTHERS = chain(BLOCKS), chain(BLOCKS - 50, "others")


class Watched:
    """A real link. Its source freezes when a read begins, and it closes only when it is let."""

    def __init__(self, link):
        self.link = link
        self.before_read = lambda: None
        self.may_close = asyncio.Event()
        self.may_close.set()
        self.fails_to_close = False

    def __getattr__(self, name):
        return getattr(self.link, name)

    async def connect(self, contact, *, deadline):
        return WatchedPeer(await self.link.connect(contact, deadline=deadline), self)


class WatchedPeer:
    def __init__(self, peer, watched):
        self.peer = peer
        self.watched = watched

    def __getattr__(self, name):
        return getattr(self.peer, name)

    async def read(self, ranges, targets, *, deadline, arrived):
        self.watched.before_read()
        await self.peer.read(ranges, targets, deadline=deadline, arrived=arrived)

    async def close(self):
        await self.watched.may_close.wait()
        await self.peer.close()
        if self.watched.fails_to_close:
            raise PeerLost("whether it is closed cannot be known")


@asynccontextmanager
async def frozen_in_a_read(kind):
    """A rig whose pull of all but ten blocks timed out while its source stood still."""
    async with pull_source(kind, BLOCKS) as source, PullRig.of(kind, slots=BLOCKS) as rig:
        watched = Watched(rig.link)
        rig.puller._peers._links = {rig.link.name: watched}
        assert (await rig.pull(source.told["contacts"], CHAIN[:10])).blocks == 10
        watched.before_read = source.freeze
        watched.may_close.clear()

        contacts = source.told["contacts"]

        late = await rig.pull(contacts, CHAIN[10:], parent=CHAIN[9], seconds=2.5)

        assert late.failure in ("deadline", "peer_lost")  # silence is noticed after some time
        assert late.blocks == 0
        watched.before_read = lambda: None
        try:
            yield rig, source, watched
        finally:
            watched.may_close.set()


@pytest.mark.parametrize("kind", NETWORK_KINDS)
async def test_slots_stay_in_quarantine_until_the_connection_is_gone(kind):
    async with frozen_in_a_read(kind) as (rig, _, watched):
        counts = rig.target.pool.counts()
        assert (counts.quarantined, counts.reserved) == (BLOCKS - 10, 0)
        assert rig.target.pool.reserve(b"", OTHERS).slots == (-1,) * len(OTHERS)

        watched.may_close.set()

        await until(lambda: rig.target.pool.counts().free == BLOCKS - 10)


@pytest.mark.parametrize("kind", NETWORK_KINDS)
async def test_what_is_given_away_after_a_timeout_is_never_written_to(kind):
    async with frozen_in_a_read(kind) as (rig, source, watched):
        watched.may_close.set()
        await until(lambda: not rig.target.pool.counts().quarantined)
        rig.target.fill(OTHERS)
        source.thaw()

        after = await rig.pull(source.told["contacts"], CHAIN[10:40], parent=CHAIN[9])

        assert after.blocks == 30  # whatever the source still had to send has been sent
        assert rig.target.holds(OTHERS) == len(OTHERS)
        assert rig.target.holds(CHAIN) == 40


async def test_slots_of_a_connection_that_fails_to_close_are_never_given_away():
    async with frozen_in_a_read("tcp") as (rig, _, watched):
        watched.fails_to_close = True
        watched.may_close.set()

        await until(lambda: rig.puller.closing.stuck["tcp"] == 1)
        await until(lambda: not rig.puller._afterwards)

        assert rig.target.pool.counts().quarantined == BLOCKS - 10
        state = rig.target.pool._table.state
        rig.target.pool.release_quarantine(
            [slot for slot in range(BLOCKS) if state[slot] == QUARANTINED]
        )
