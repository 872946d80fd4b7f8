"""Nothing waits without a bound for a connection that does not close, and no slot that it may
still write to is given away: here UCX's own thread stands still, or a link cannot close."""

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest
from eventually import until
from links import Echo, Rig, link_source, read, some_bytes, soon
from pulls import PullRig, chain, pull_source

from prefixfleet.store.errors import DeadlineExceeded, PeerLost
from prefixfleet.transfer import closing as closings
from prefixfleet.transfer import ucx_binding, ucx_listener, ucx_thread
from prefixfleet.transfer.closing import MAX_STUCK, Closing
from prefixfleet.transfer.link import Range
from prefixfleet.transfer.ucx_abi import IN_PROGRESS

needs_ucx = pytest.mark.skipif(
    "ucxx" not in ucx_binding.available(), reason="the Python binding ucxx is not installed"
)
BLOCKS = 600
CHAIN, OTHERS = chain(BLOCKS), chain(BLOCKS - 50, "others")


@asynccontextmanager
async def frozen(link, side="reading"):
    """UCX's thread of this side stands still inside; yields what lets it go on."""
    gate, standing = threading.Event(), threading.Event()

    def stand():
        standing.set()
        gate.wait(120)

    thread = await link._started(side)
    stands = thread.run(stand)
    await asyncio.to_thread(standing.wait, 60)
    try:
        yield gate
    finally:
        gate.set()
        await asyncio.wait({stands}, timeout=60)


@asynccontextmanager
async def timed_out_pull(monkeypatch):
    """A rig whose pull of all but ten blocks timed out while its own UCX stood still."""
    monkeypatch.setattr(closings, "STUCK_S", 0.05)
    async with pull_source("ucx", BLOCKS) as source, PullRig.of("ucx", slots=BLOCKS) as rig:
        assert (await rig.pull(source.told["contacts"], CHAIN[:10])).blocks == 10
        async with frozen(rig.link) as gate:
            late = await rig.pull(source.told["contacts"], CHAIN[10:], parent=CHAIN[9], seconds=1)
            assert (late.blocks, late.failure) == (0, "deadline")
            yield rig, source, gate
        await until(lambda: not rig.target.pool.counts().quarantined)


@needs_ucx
async def test_slots_of_a_pull_stay_in_quarantine_while_ucx_stands_still(monkeypatch):
    async with timed_out_pull(monkeypatch) as (rig, _, gate):
        await until(lambda: rig.puller.closing.stuck["ucx"] == 1)

        assert rig.target.pool.counts().quarantined == BLOCKS - 10
        assert rig.target.pool.reserve(b"", OTHERS).slots == (-1,) * len(OTHERS)
        assert "ucx" in rig.puller.closing.degraded()[0]

        gate.set()
        await until(lambda: rig.target.pool.counts().free == BLOCKS - 10)

        assert rig.puller.closing.degraded() == []


@needs_ucx
async def test_a_read_that_ucx_begins_late_writes_into_no_slot_that_was_given_away(monkeypatch):
    async with timed_out_pull(monkeypatch) as (rig, source, gate):
        gate.set()  # the read, then the end of its endpoint, are what UCX does next
        await until(lambda: not rig.target.pool.counts().quarantined)
        rig.target.fill(OTHERS)

        after = await rig.pull(source.told["contacts"], CHAIN[10:40], parent=CHAIN[9])

        assert after.blocks == 30
        assert rig.target.holds(OTHERS) == len(OTHERS)
        assert rig.target.holds(CHAIN) == 40


@needs_ucx
async def test_pulls_end_by_their_deadline_and_go_on_once_ucx_does(monkeypatch):
    async with timed_out_pull(monkeypatch) as (rig, source, gate):
        contacts = source.told["contacts"]

        again = await rig.pull(contacts, CHAIN[:20], parent=b"", seconds=0.5)
        gate.set()
        await until(lambda: not rig.target.pool.counts().quarantined)

        assert again.blocks == 10  # those that are here
        assert (await rig.pull(contacts, CHAIN[10:], parent=CHAIN[9])).blocks == BLOCKS - 10


@needs_ucx
async def test_a_connection_that_does_not_close_leaves_the_others_alone(monkeypatch):
    """Closing is a step at a time: it never holds the thread that all connections share."""
    async with link_source("ucx", 1 << 20) as source, Rig("ucx") as rig:
        link = rig.link("b")
        listener = await rig.listen(rig.link("a"), some_bytes(1 << 20), Echo())
        fine = await rig.connect(link, listener.contact)
        lost = await rig.connect(link, source.told["contact"])
        thread = await link._started("reading")
        status = thread.ucp.calls.ucp_request_check_status
        source.freeze()
        reading = asyncio.create_task(read(lost, [Range(0, 1 << 20)]))
        await until(lambda: lost._remote._batches)
        batch = lost._remote._batches[0]  # only its own thread sees it whole
        held = await thread.run(lambda: {request for request, _ in batch.under_way})
        assert held
        with monkeypatch.context() as patched:  # UCX never says that these are over
            patched.setattr(
                thread.ucp.calls,
                "ucp_request_check_status",
                lambda request: IN_PROGRESS if request in held else status(request),
            )
            closing = asyncio.create_task(lost.close())

            assert await read(fine, [Range(0, 1 << 20)]) == [some_bytes(1 << 20)]
            assert not closing.done()

        await asyncio.wait_for(closing, 60)
        with pytest.raises(PeerLost):
            await reading


@needs_ucx
async def test_a_start_of_ucx_that_hangs_ends_by_the_deadline_of_who_connects(monkeypatch):
    gate, starts = threading.Event(), []
    start = ucx_thread.Binding.__init__

    def hang(self, name=None):
        starts.append(name)
        gate.wait(120)
        start(self, name)

    async with link_source("ucx", 1000) as source, Rig("ucx") as rig:
        link = rig.link("b")
        monkeypatch.setattr(ucx_thread.Binding, "__init__", hang)
        for _ in range(3):
            with pytest.raises(DeadlineExceeded, match="start of UCX"):
                await link.connect(source.told["contact"], deadline=soon(0.05))
        gate.set()

        peer = await rig.connect(link, source.told["contact"])

        assert await read(peer, [Range(0, 1000)]) == [some_bytes(1000)]
        assert len(starts) == 1


@needs_ucx
async def test_a_node_ends_though_ucx_stands_still(monkeypatch, caplog):
    monkeypatch.setattr(ucx_listener, "UNMAP_S", 0.05)
    monkeypatch.setattr(ucx_thread, "STOP_S", 0.05)
    monkeypatch.setattr(ucx_thread, "WAIT_MS", 50)
    async with Rig("ucx") as rig:
        link = rig.link("a")
        listener = await rig.listen(link, some_bytes(1000), Echo())
        async with frozen(link, "serving"):
            await listener.close()
            await link.close()

    assert "did not let go of the pool" in caplog.text
    assert "the UCX thread did not end" in caplog.text


class Unclosable:
    """A peer of a link that cannot tell whether something still writes."""

    node = "source"

    async def close(self):
        raise PeerLost("UCX is stopped")


async def test_a_connection_that_fails_to_close_counts_for_good():
    closing = Closing()

    task = closing.begin("ucx", Unclosable())
    await asyncio.wait({task})
    await until(lambda: closing.stuck["ucx"])

    assert isinstance(task.exception(), PeerLost)
    assert len(closing.degraded()) == 1


async def test_a_link_whose_connections_do_not_close_makes_no_new_ones():
    closing = Closing()
    for _ in range(MAX_STUCK - 1):
        closing.begin("ucx", Unclosable())
    await closing.ended()
    closing.check("ucx")

    closing.begin("ucx", Unclosable())
    await until(lambda: closing.stuck["ucx"] == MAX_STUCK)

    with pytest.raises(PeerLost, match="restart this node"):
        closing.check("ucx")
    closing.check("tcp")
