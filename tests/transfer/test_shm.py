"""The shared-memory link: who is told of a pool, what is mapped, and what a copy may not do."""

import asyncio
import os
from threading import Event

import pytest
from links import Echo, Rig, read, shared_memory, some_bytes, soon
from pulls import LAYOUT, PoolNode, PullRig, chain

from prefixfleet.store.errors import ConfigError, PeerLost, PeerRefused
from prefixfleet.transfer import shared_file
from prefixfleet.transfer.link import Range, unheard
from prefixfleet.transfer.shared_file import SharedFile, file_of, map_file
from prefixfleet.transfer.shm import _copy
from prefixfleet.transfer.ucx_get import address_of

MiB = 1024 * 1024


@pytest.fixture
async def rig():
    async with Rig("shm") as rig:
        yield rig


@pytest.fixture
def other_host(monkeypatch, tmp_path):
    """From now on links are made on another host, as far as they can tell."""

    def become():
        boot = tmp_path / "boot_id"
        boot.write_text("another boot\n")
        monkeypatch.setattr(shared_file, "BOOT_ID", boot)

    return become


def where(view):
    return file_of(address_of(view), view.nbytes)


# Who is told


async def test_a_contact_of_another_host_is_not_reached_and_costs_no_connection(rig, other_host):
    listener = await rig.listen(rig.link("a"), some_bytes(MiB), Echo())
    assert rig.link("b").reaches(listener.contact)

    other_host()

    assert not rig.link("b").reaches(listener.contact)


async def test_a_peer_of_another_host_is_refused_before_it_is_told_the_path(
    rig, other_host, monkeypatch
):
    listener = await rig.listen(rig.link("a"), some_bytes(MiB), Echo())
    other_host()
    stranger = rig.link("b")
    told = []
    monkeypatch.setattr(stranger, "_map", told.append)

    with pytest.raises(PeerRefused, match="this is the shm"):
        await rig.connect(stranger, f"{stranger.scheme}://{listener.contact.partition('://')[2]}")

    assert told == []


async def test_a_contact_tells_neither_the_boot_nor_the_path(rig):
    segment = some_bytes(MiB)
    listener = await rig.listen(rig.link("a"), segment, Echo())

    assert shared_file.BOOT_ID.read_text().strip() not in listener.contact
    assert where(segment).path not in listener.contact


# What is served


async def test_memory_that_is_no_file_is_not_served(rig):
    with pytest.raises(ConfigError, match="the segment is no file"):
        await rig.listen(rig.link("a"), memoryview(bytearray(MiB)), Echo())


async def test_a_file_that_others_may_read_is_not_served(rig):
    segment = some_bytes(MiB)
    os.chmod(where(segment).path, 0o644)

    with pytest.raises(ConfigError, match="mode 644"):
        await rig.listen(rig.link("a"), segment, Echo())


async def test_a_part_of_a_file_is_served_from_where_it_lies(rig):
    whole = some_bytes(2 * MiB)
    listener = await rig.listen(rig.link("a"), whole[4096 + 7 : MiB], Echo())
    peer = await rig.connect(rig.link("b"), listener.contact)

    assert await read(peer, [Range(5, 1000)]) == [whole[4096 + 12 :][:1000]]


# What is mapped


def test_a_mapped_file_cannot_be_written():
    segment = some_bytes(MiB)

    view = map_file(where(segment))

    assert view.readonly
    assert view == segment


@pytest.fixture
def told():
    segment = shared_memory(MiB)
    return segment, where(segment)


def changed(file, **changes):
    fields = {name: getattr(file, name) for name in file.__struct_fields__}
    return SharedFile(**fields | changes)


def test_what_can_be_no_path_is_a_lost_peer(told):
    _, file = told

    with pytest.raises(PeerLost, match="null byte"):
        map_file(changed(file, path="/dev/shm/\0"))


def test_a_file_that_is_gone_is_a_lost_peer(told):
    _, file = told

    with pytest.raises(PeerLost, match="No such file"):
        map_file(changed(file, path=f"{file.path}-gone"))


def test_another_file_of_that_name_is_not_mapped(told):
    _, file = told

    with pytest.raises(PeerLost, match="another file"):
        map_file(changed(file, inode=file.inode + 1))


def test_a_file_that_is_too_short_is_not_mapped(told):
    _, file = told

    with pytest.raises(PeerLost, match="bytes"):
        map_file(changed(file, length=2 * MiB))


def test_a_file_that_others_may_write_is_not_mapped(told):
    _, file = told
    os.chmod(file.path, 0o666)

    with pytest.raises(PeerLost, match="mode 666"):
        map_file(file)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_plain_file_is_not_opened(told, tmp_path, kind):
    _, file = told
    path = tmp_path / kind
    if kind == "link":
        path.symlink_to(file.path)
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    else:
        path.mkdir()

    with pytest.raises(PeerLost, match="shared memory of the peer"):
        map_file(changed(file, path=str(path)))


async def test_connections_to_one_pool_share_one_mapping_until_the_last_is_closed(rig):
    listener = await rig.listen(rig.link("a"), some_bytes(MiB), Echo())
    link = rig.link("b")
    first, second = [await rig.connect(link, listener.contact) for _ in range(2)]
    assert len(link._mapped) == 1

    await first.close()
    await first.close()
    assert len(link._mapped) == 1
    await second.close()

    assert not link._mapped


# Leases and ends


class Fickle(Echo):
    """Grants what is asked for, so many times."""

    times = 1

    def grants(self, caller, part):
        self.times -= 1
        return self.times >= 0


async def test_a_lease_that_ends_during_the_copy_is_no_read(rig):
    service = Fickle()
    listener = await rig.listen(rig.link("a"), some_bytes(MiB), service)
    peer = await rig.connect(rig.link("b"), listener.contact)

    with pytest.raises(PeerRefused, match="no read lease"):
        await read(peer, [Range(0, MiB)])


async def test_a_slot_that_is_used_anew_during_the_copy_is_a_miss():
    """Whatever the leases say, the bytes of another block are not taken for the one asked for."""
    blocks = chain(4)
    async with PullRig.of("shm") as rig:
        source = PoolNode("source")
        source.fill(blocks)
        with source.pool.pin(blocks) as pin:
            one, other = (source.slot(pin.slots[i]) for i in (1, 3))
            one[:] = other  # a whole block, sealed and fine, and not the one that was asked for
        contacts = await rig.serve(source)

        result = await rig.pull(contacts, blocks)

        assert (result.blocks, result.failure) == (1, "corrupt")
        assert rig.target.holds(blocks) == 1


async def test_bytes_that_change_during_the_copy_are_a_miss():
    blocks = chain(2)
    async with PullRig.of("shm") as rig:
        source = PoolNode("source")
        source.fill(blocks)
        with source.pool.pin(blocks) as pin:
            LAYOUT.payload(source.slot(pin.slots[1]), 0)[5] ^= 1

        result = await rig.pull(await rig.serve(source), blocks)

        assert (result.blocks, result.failure) == (1, "corrupt")


class SlowCopy:
    """Copies that begin, and end when they are let go."""

    def __init__(self, monkeypatch):
        self.began, self.let_go = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        monkeypatch.setattr("prefixfleet.transfer.shm._copy", self._copy)

    def _copy(self, segment, parts, targets, stop, arrived):
        self._loop.call_soon_threadsafe(self.began.set)
        asyncio.run_coroutine_threadsafe(self.let_go.wait(), self._loop).result(20)
        targets[0][:1] = b"!"


async def test_close_waits_for_a_copy_under_way(rig, monkeypatch):
    """The timeout trap: after close nothing is written into memory that is somebody else's."""
    copy = SlowCopy(monkeypatch)
    _, peer = await rig.pair(some_bytes(MiB), Echo())
    target = memoryview(bytearray(MiB))
    reading = asyncio.create_task(peer.read([Range(0, MiB)], [target], deadline=soon()))
    await copy.began.wait()

    reading.cancel()
    closing = asyncio.create_task(peer.close())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not closing.done()
    copy.let_go.set()
    await closing

    assert target[0] == ord("!")
    assert reading.cancelled()


async def test_a_copy_that_ends_after_its_connection_was_lost_troubles_nobody(rig, monkeypatch):
    troubles = []
    asyncio.get_running_loop().set_exception_handler(lambda _, trouble: troubles.append(trouble))
    copy = SlowCopy(monkeypatch)
    listener, peer = await rig.pair(some_bytes(MiB), Echo())
    target = memoryview(bytearray(MiB))
    reading = asyncio.create_task(peer.read([Range(0, MiB)], [target], deadline=soon()))
    await copy.began.wait()

    await listener.close()
    with pytest.raises(PeerLost):
        await reading
    copy.let_go.set()
    await peer.close()

    assert troubles == []


def test_a_copy_that_nobody_waits_for_ends_at_its_next_step():
    stop, target = Event(), memoryview(bytearray(MiB))
    stop.set()

    with pytest.raises(PeerLost):
        _copy(some_bytes(MiB), [Range(0, MiB)], [target], stop, unheard)

    assert target == bytes(MiB)
