"""Which link a path takes, what it says of it, and when it is measured anew."""

import asyncio
import time

import pytest
from eventually import until
from links import Rig, soon
from pulls import LAYOUT, NAMESPACE, PoolNode, chain

from prefixfleet.transfer.estimates import Estimates
from prefixfleet.transfer.paths import AVOID_S, Acquaintance, Paths
from prefixfleet.transfer.probe import STALE_S
from prefixfleet.transfer.pull import Puller

CHAIN = chain(20)
CONTACTS = {"tcp": "tcp://a:1", "ucx": "ucx://a:2"}


class Plain:
    """A link of which only what paths ask for is here."""

    def __init__(self, *, rdma=False, reach=True):
        self.rdma = rdma
        self._reach = reach

    def reaches(self, contact):
        return self._reach


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def paths_of(clock, forced=None, **links):
    return Paths({"tcp": Plain(), "ucx": Plain()} | links, forced, clock)


def meet(paths, speeds):
    for link, rate in speeds.items():
        paths.proved(link, CONTACTS[link], "a", link)
        paths.estimates.observe("a", link, size_bytes=rate, transfer_s=1.0, setup_s=0.001)
    paths.met("a", Acquaintance(CONTACTS, 1, NAMESPACE, LAYOUT, tuple(CHAIN)))


def test_a_link_that_failed_is_avoided_for_a_while(clock):
    paths = paths_of(clock)
    meet(paths, {"tcp": 10**8, "ucx": 10**9})
    paths.lost(CONTACTS["ucx"])

    assert paths.choose(CONTACTS, 10**6).link == "tcp"
    clock.now_s += AVOID_S

    assert paths.choose(CONTACTS, 10**6).link == "ucx"


def test_a_link_that_works_again_is_not_avoided_any_longer(clock):
    paths = paths_of(clock)
    meet(paths, {"tcp": 10**8, "ucx": 10**9})
    paths.lost(CONTACTS["ucx"])

    paths.proved("ucx", CONTACTS["ucx"], "a", "ucx:tcp/eth0")

    assert paths.choose(CONTACTS, 10**6).link == "ucx"


def test_a_link_that_does_not_reach_the_peer_is_not_chosen(clock):
    paths = paths_of(clock, shm=Plain(reach=False))

    assert paths.choose(CONTACTS | {"shm": "shm.0://a:3"}, 1).link == "tcp"


def test_the_report_names_the_link_why_and_the_figures_behind_it(clock):
    paths = paths_of(clock)
    meet(paths, {"tcp": 10**8, "ucx": 10**9})

    told = paths.report()["a"]

    assert (told["link"], told["why"]) == ("ucx", "measured fastest")
    assert told["bytes_per_s"] == 10**9
    assert {name: speed["bytes_per_s"] for name, speed in told["links"].items()} == {
        "tcp": 10**8,
        "ucx": 10**9,
    }


def test_a_forced_link_shows_as_such(clock):
    paths = paths_of(clock, forced="tcp")
    meet(paths, {"tcp": 10**8, "ucx": 10**9})

    assert (paths.report()["a"]["link"], paths.report()["a"]["why"]) == ("tcp", "forced")


@pytest.mark.parametrize(
    ("forced", "links", "expected"),
    [
        (None, {}, ["tcp", "ucx"]),
        ("tcp", {}, ["tcp"]),
        ("shm", {}, []),
        (None, {"ucx": Plain(rdma=True)}, ["ucx"]),
        (None, {"ucx": Plain(reach=False)}, ["tcp"]),
    ],
)
def test_in_use_are_those_that_measuring_or_a_rule_may_choose(clock, forced, links, expected):
    assert paths_of(clock, forced, **links).in_use(CONTACTS) == expected


def test_where_there_is_shared_memory_nothing_else_is_in_use(clock):
    paths = paths_of(clock, shm=Plain())

    assert paths.in_use(CONTACTS | {"shm": "shm.0://a:3"}) == ["shm"]


# Probes


@pytest.fixture
async def two_links():
    """A puller with two links to one source, each over sockets of its own."""
    async with Rig("tcp") as rig:
        source, target = PoolNode("a"), PoolNode("target", 32)
        source.fill(CHAIN)
        links = {name: rig.link("target") for name in CONTACTS}
        puller = Puller(target.pool, target.segment, LAYOUT, links=links)
        contacts = {}
        for name in CONTACTS:
            listener = await rig.listen(rig.link("a"), source.segment, source.server)
            contacts[name] = listener.contact
        yield puller, contacts, source
        await puller.close()


async def pull(puller, contacts):
    return await puller.pull(
        contacts, namespace=NAMESPACE, epoch=7, parent=b"", hashes=CHAIN, deadline=soon()
    )


async def test_the_link_that_no_pull_took_is_measured_once_when_it_is_due(two_links):
    puller, contacts, source = two_links
    assert puller.prober.due(0.0) is None
    assert (await pull(puller, contacts)).blocks == 20
    leased = source.server.leased_blocks

    due = puller.prober.due(0.0)
    assert due == ("a", "ucx")
    await puller.prober.probe(*due)

    assert source.server.leased_blocks == leased + 20
    speed = puller.paths.estimates.speed("a", "ucx")
    assert (speed.pulls, speed.bytes_per_s > 0) == (1, True)
    assert puller.prober.due(0.0) is None
    assert puller.paths.report()["a"]["why"] == "measured fastest"


async def test_a_probe_that_fails_is_not_repeated_at_once_and_costs_nothing_else(two_links):
    puller, contacts, _ = two_links
    assert (await pull(puller, contacts)).blocks == 20
    nobody = contacts["ucx"].rpartition(":")[0] + ":1"
    known = puller.paths.peers["a"]
    puller.paths.met(
        "a", Acquaintance(contacts | {"ucx": nobody}, 7, NAMESPACE, LAYOUT, known.hashes)
    )

    await puller.prober.probe("a", "ucx")

    assert puller.prober.probes == 1
    assert puller.paths.estimates.speed("a", "ucx").pulls == 0
    assert puller.prober.due(puller.prober._tried["a", "ucx"] + STALE_S / 2) is None
    assert puller.prober.due(puller.prober._tried["a", "ucx"] + STALE_S + 1) == ("a", "ucx")


async def test_a_probe_may_be_made_again_and_again(two_links):
    puller, contacts, _ = two_links
    await pull(puller, contacts)

    for _ in range(3):
        await puller.prober.probe("a", "ucx")

    assert puller.paths.estimates.speed("a", "ucx").pulls == 3


async def test_probing_goes_on_by_itself_while_no_pull_moves(two_links, monkeypatch):
    monkeypatch.setattr("prefixfleet.transfer.probe.PAUSE_S", 0.001)
    puller, contacts, _ = two_links
    await pull(puller, contacts)
    probing = asyncio.create_task(puller.prober.run())

    await until(lambda: puller.paths.estimates.speed("a", "ucx").pulls == 1)

    probing.cancel()
    await asyncio.gather(probing, return_exceptions=True)


@pytest.mark.parametrize("kind", ["tcp", "shm"])
async def test_the_only_link_is_measured_anew_after_it_was_slow_for_a_while(kind, clock):
    async with Rig(kind) as rig:
        source, target = PoolNode("a"), PoolNode("target", 32)
        source.fill(CHAIN)
        listener = await rig.listen(rig.link("a"), source.segment, source.server)
        puller = Puller(target.pool, target.segment, LAYOUT, links={kind: rig.link("target")})
        puller.paths.estimates = Estimates(clock)
        assert (await pull(puller, {kind: listener.contact})).blocks == 20
        for _ in range(40):  # so slow that a probe is faster, whatever else the machine does
            puller.paths.estimates.observe("a", kind, size_bytes=10**6, transfer_s=1e3, setup_s=0.0)
        slow = puller.paths.estimates.speed("a", kind).bytes_per_s
        assert puller.prober.due(time.monotonic()) is None

        clock.now_s += STALE_S + 1
        assert puller.prober.due(time.monotonic()) == ("a", kind)
        probes = 0
        while due := puller.prober.due(time.monotonic()):
            probes += 1
            await puller.prober.probe(*due)

        assert 2 <= probes <= 20, "a little at a time, and not for ever"
        assert puller.paths.estimates.speed("a", kind).bytes_per_s > 4 * slow
        await puller.close()


async def test_of_those_that_are_due_who_waited_longest_comes_first(two_links, clock):
    puller, contacts, _ = two_links
    puller.paths.estimates = Estimates(clock)
    await pull(puller, contacts)
    await puller.prober.probe("a", "ucx")
    await puller.prober.probe("a", "tcp")
    later = puller.prober._tried["a", "tcp"] + STALE_S + 1
    puller.prober._unsettled = None
    clock.now_s += STALE_S + 1

    assert puller.prober.due(later) == ("a", "ucx")


async def test_a_peer_that_lives_another_life_is_no_reason_to_avoid_the_link(two_links):
    puller, contacts, source = two_links
    await pull(puller, contacts)
    source.server.epoch += 1

    await puller.prober.probe("a", "ucx")

    assert puller.paths._avoid == {}
