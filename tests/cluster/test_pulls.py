"""Pulls of one node: each block travels once, and every failure is only a shorter prefix."""

import asyncio
import time

import pytest

from prefixfleet.cluster.holders import MAX_HOLDERS, Holders
from prefixfleet.cluster.peer_book import PeerBook
from prefixfleet.cluster.pulls import Pulls
from prefixfleet.store.errors import IndexUnavailable
from prefixfleet.store.index import Membership
from prefixfleet.store.records import NodeRecord, PullPlan
from prefixfleet.transfer.pull import PullResult

CHAIN = [bytes([i]) * 16 for i in range(8)]


class Members:
    """An index of which only the members and their blocks are asked."""

    def __init__(self):
        self.epochs = {"a": 3}
        self.held = {}
        self.asked = 0
        self.down = False

    async def members(self):
        self.asked += 1
        if self.down:
            raise IndexUnavailable("down")
        return [
            (Membership(n, e, 0), NodeRecord(node=n, host="h", contacts={"tcp": n}))
            for n, e in self.epochs.items()
        ]

    async def match(self, chain):
        if self.down:
            raise IndexUnavailable("down")
        return {node: min(held, len(chain)) for node, held in self.held.items()}


class Here:
    """What is on this node, and a transport that brings more when it is let."""

    def __init__(self, *, blocks=0, brings=8, failure=""):
        self.here = set(CHAIN[:blocks])
        self.brings = brings
        self.failure = failure
        self.pulls = []
        self.go = asyncio.Event()

    def match(self, chain):
        return next((i for i, b in enumerate(chain) if b not in self.here), len(chain))

    async def move(self, pull):
        self.pulls.append(pull)
        await self.go.wait()
        moved = pull.hashes[: self.brings]
        self.here.update(moved)
        return PullResult(
            blocks=len(moved), bytes=100, seconds=0.1, link="tcp", failure=self.failure
        )


def pulls_of(here, members=None):
    members = members or Members()
    peers = PeerBook(members.members, clock=time.monotonic)
    holders = Holders(members.match, peers, me="here")
    return Pulls(
        peers=peers, holders=holders, match=here.match, move=here.move, clock=time.monotonic
    )


def plan(blocks=8, **changes):
    return PullPlan(
        **{"request": "r", "source": "a", "source_epoch": 3, "blocks": blocks} | changes
    )


def soon():
    return time.monotonic() + 20


async def test_a_pull_asks_for_what_is_missing_after_what_is_here():
    here = Here(blocks=3)
    here.go.set()

    pulled = await pulls_of(here).fetch(CHAIN, plan(blocks=6), soon())

    assert (pulled.blocks, pulled.bytes, pulled.link, pulled.failure) == (3, 100, "tcp", "")
    assert here.pulls[0].parent == CHAIN[2]
    assert here.pulls[0].hashes == tuple(CHAIN[3:6])
    assert here.pulls[0].source.contacts == {"tcp": "a"}


async def test_a_pull_at_the_root_has_an_empty_parent():
    here = Here()
    here.go.set()

    await pulls_of(here).fetch(CHAIN, plan(), soon())

    assert here.pulls[0].parent == b""


async def test_requests_that_want_the_same_blocks_share_one_pull():
    here = Here()
    pulls = pulls_of(here)
    tasks = [asyncio.create_task(pulls.fetch(CHAIN, plan(), soon())) for _ in range(5)]
    await asyncio.sleep(0)
    here.go.set()

    results = await asyncio.gather(*tasks)

    assert len(here.pulls) == 1
    assert [r.blocks for r in results] == [8] * 5
    assert sum(r.bytes for r in results) == 100  # bytes are counted where they were moved


async def test_a_longer_request_pulls_only_what_no_other_one_brings():
    here = Here()
    pulls = pulls_of(here)
    short = asyncio.create_task(pulls.fetch(CHAIN, plan(blocks=4), soon()))
    await asyncio.sleep(0)
    long = asyncio.create_task(pulls.fetch(CHAIN, plan(blocks=8), soon()))
    await asyncio.sleep(0)
    here.go.set()

    assert (await short).blocks == 4
    assert (await long).blocks == 8
    assert [p.hashes for p in here.pulls] == [tuple(CHAIN[:4]), tuple(CHAIN[4:])]


async def test_a_request_tries_itself_after_the_pull_it_waited_for_failed():
    here = Here(brings=0, failure="peer_lost")
    pulls = pulls_of(here)
    first = asyncio.create_task(pulls.fetch(CHAIN, plan(), soon()))
    await asyncio.sleep(0)
    second = asyncio.create_task(pulls.fetch(CHAIN, plan(), soon()))
    await asyncio.sleep(0)
    here.go.set()

    assert (await first).failure == (await second).failure == "peer_lost"
    assert len(here.pulls) == 2


async def test_a_short_pull_is_not_repeated():
    here = Here(brings=5)
    here.go.set()

    pulled = await pulls_of(here).fetch(CHAIN, plan(), soon())

    assert pulled.blocks == 5
    assert len(here.pulls) == 1


async def test_nobody_waits_past_the_deadline_and_the_pull_goes_on_for_the_others():
    here = Here()
    pulls = pulls_of(here)
    patient = asyncio.create_task(pulls.fetch(CHAIN, plan(), soon()))

    hasty = await pulls.fetch(CHAIN, plan(), time.monotonic() + 0.01)

    assert (hasty.blocks, hasty.failure) == (0, "deadline")
    here.go.set()
    assert (await patient).blocks == 8
    assert len(here.pulls) == 1


async def test_a_request_that_goes_away_does_not_end_the_pull_of_the_others():
    here = Here()
    pulls = pulls_of(here)
    first = asyncio.create_task(pulls.fetch(CHAIN, plan(), soon()))
    second = asyncio.create_task(pulls.fetch(CHAIN, plan(), soon()))
    await asyncio.sleep(0)

    first.cancel()
    await asyncio.sleep(0)
    here.go.set()

    assert (await second).blocks == 8
    assert len(here.pulls) == 1


@pytest.mark.parametrize(
    ("changes", "reason"), [({"source": "gone"}, "peer_lost"), ({"source_epoch": 2}, "epoch")]
)
async def test_a_plan_for_a_node_that_is_not_there_fails_without_connecting(changes, reason):
    here = Here()

    pulled = await pulls_of(here).fetch(CHAIN, plan(**changes), soon())

    assert (pulled.blocks, pulled.failure) == (0, reason)
    assert here.pulls == []


async def test_a_known_source_is_found_while_the_index_is_away():
    here, members = Here(), Members()
    here.go.set()
    pulls = pulls_of(here, members)
    await pulls.fetch(CHAIN[:4], plan(blocks=4), soon())
    members.down = True

    pulled = await pulls.fetch(CHAIN, plan(), soon())

    assert pulled.blocks == 4


async def test_a_new_life_of_the_source_is_found_at_once():
    here, members = Here(), Members()
    here.go.set()
    pulls = pulls_of(here, members)
    await pulls.fetch(CHAIN[:4], plan(blocks=4), soon())
    members.epochs["a"] = 4

    assert (await pulls.fetch(CHAIN, plan(source_epoch=4), soon())).blocks == 4


async def test_plans_for_unknown_nodes_do_not_become_a_storm_of_questions():
    members = Members()
    pulls = pulls_of(Here(), members)

    results = await asyncio.gather(
        *(pulls.fetch([bytes([i]) * 16], plan(source=f"n{i}"), soon()) for i in range(50))
    )

    assert {result.failure for result in results} == {"peer_lost"}
    assert members.asked <= 2


async def found_by(here):
    """Names of the sources that a pull's own search finds."""
    return [source.contacts["tcp"] for source in await here.pulls[0].others()]


async def test_others_that_hold_more_than_is_here_are_found_by_the_index():
    here, members = Here(blocks=2), Members()
    here.go.set()
    members.epochs = {"a": 3, "b": 5, "c": 6, "d": 7, "here": 8}
    members.held = {"a": 8, "b": 4, "c": 8, "d": 2, "here": 8, "left": 8}

    await pulls_of(here, members).fetch(CHAIN, plan(), soon())

    assert await found_by(here) == ["c", "b"]


async def test_nodes_that_ask_turn_to_different_ones_of_equal_holders():
    members = Members()
    members.epochs = {f"n{i}": i + 1 for i in range(8)}
    members.held = dict.fromkeys(members.epochs, 8)
    peers = PeerBook(members.members, clock=time.monotonic)

    first = {
        (await Holders(members.match, peers, f"me{i}").of(CHAIN, beyond=0, but=("", 0)))[0].epoch
        for i in range(20)
    }

    assert len(first) > 2


async def test_so_many_others_at_most():
    here, members = Here(), Members()
    here.go.set()
    members.epochs = {"a": 3} | {f"n{i}": i + 1 for i in range(20)}
    members.held = dict.fromkeys(members.epochs, 8)

    await pulls_of(here, members).fetch(CHAIN, plan(), soon())

    assert len(await found_by(here)) == MAX_HOLDERS


@pytest.mark.parametrize("changes", [{"source": "gone"}, {"source_epoch": 2}])
async def test_a_plan_for_a_life_that_is_gone_turns_to_who_the_index_names(changes):
    here, members = Here(), Members()
    here.go.set()
    members.epochs = {"a": 3, "b": 5}
    members.held = {"a": 8, "b": 7}

    pulled = await pulls_of(here, members).fetch(CHAIN, plan(**changes), soon())

    assert pulled.blocks == 8
    assert (here.pulls[0].source.contacts, here.pulls[0].source.epoch) == ({"tcp": "a"}, 3)
    assert await found_by(here) == ["b"]


async def test_without_the_index_a_pull_has_its_planned_source_only():
    here, members = Here(), Members()
    here.go.set()
    pulls = pulls_of(here, members)
    await pulls.fetch(CHAIN, plan(), soon())
    members.down = True

    assert await found_by(here) == []


async def test_closing_ends_what_is_in_flight():
    here = Here()
    pulls = pulls_of(here)
    waiting = asyncio.create_task(pulls.fetch(CHAIN, plan(), soon()))
    await asyncio.sleep(0)

    await pulls.close()

    with pytest.raises(asyncio.CancelledError):
        await waiting
