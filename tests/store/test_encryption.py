"""A stolen disk tells nothing, and a changed one gives no wrong block."""

import mmap
import random

import pytest
from disks import disk_of

from prefixfleet.store import slot_files
from prefixfleet.store.bucket_file import DiskBlock
from prefixfleet.store.encryption import EncryptedSlotFiles, open_slot_files, read_key
from prefixfleet.store.errors import ConfigError, CorruptBlock
from prefixfleet.store.eviction import LruOrder
from prefixfleet.store.slot import ALIGN_BYTES, SlotLayout, seal, verify
from prefixfleet.store.slot_files import SlotFiles
from prefixfleet.store.ssd import DiskWrite, SsdTier

NAMESPACE = b"n" * 16
LAYOUT = SlotLayout(payload_bytes=5000, shards=2)
KEY = bytes(range(32))
SLOT_ON_DISK = LAYOUT.slot_bytes + 4096
TEXT = b"what a customer said in confidence " * 100


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    """So that a file ends with its 8 slots."""
    monkeypatch.setattr(slot_files, "MAX_BUCKET_SLOTS", 8)


def name_of(number):
    return number.to_bytes(16, "big")


def aligned():
    return memoryview(mmap.mmap(-1, LAYOUT.slot_bytes))


def sealed(number):
    slot = aligned()
    for shard in range(LAYOUT.shards):
        payload = LAYOUT.payload(slot, shard)
        payload[: len(TEXT)] = TEXT
        payload[len(TEXT) :] = random.Random(number).randbytes(payload.nbytes - len(TEXT))
        seal(slot, LAYOUT, NAMESPACE, name_of(number), shard)
    return slot


def chain(count):
    return [DiskBlock(n, name_of(n), name_of(n - 1) if n else b"", n) for n in range(count)]


def opened(folder, key=KEY):
    files = EncryptedSlotFiles(folder, LAYOUT, NAMESPACE, 8, key)
    return files, files.recover()


def written(folder, count=4):
    files, _ = opened(folder)
    files.write([(entry, sealed(entry.position)) for entry in chain(count)])
    files.close()
    (path,) = folder.glob("bucket-*")
    return path


def test_blocks_come_back_after_a_restart_and_are_proved(tmp_path):
    written(tmp_path)

    files, found = opened(tmp_path)

    assert found == chain(4)
    for entry in found:
        target = aligned()
        files.read(entry.slot, target)
        for shard in range(LAYOUT.shards):
            verify(target, LAYOUT, NAMESPACE, entry.block, shard)
        assert target == sealed(entry.position)


def test_nothing_of_a_payload_is_on_the_disk(tmp_path):
    on_disk = written(tmp_path).read_bytes()

    assert TEXT[:32] not in on_disk
    assert b"confidence" not in on_disk
    assert KEY not in on_disk


def test_the_same_block_never_looks_the_same(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = written(tmp_path / "a").read_bytes(), written(tmp_path / "b").read_bytes()
    size = LAYOUT.slot_bytes + 4096

    for slot in range(-8, -4):  # of 8 in the file, 4 are written
        at = len(first) + slot * size
        assert first[at : at + size] != second[at : at + size]


@pytest.mark.parametrize("key", [bytes(32), bytes(range(32, 64))])
def test_another_key_finds_nothing(tmp_path, key):
    written(tmp_path)

    assert opened(tmp_path, key)[1] == []


def test_plain_files_are_not_taken_for_encrypted_ones_nor_the_reverse(tmp_path):
    written(tmp_path)
    plain = SlotFiles(tmp_path, LAYOUT, NAMESPACE, 8)
    assert plain.recover() == []
    plain.write([(chain(1)[0], sealed(0))])
    plain.close()

    assert opened(tmp_path)[1] == []


def test_any_changed_byte_of_a_slot_is_noticed(tmp_path):
    path = written(tmp_path)
    dice = random.Random(1)
    files, _ = opened(tmp_path)
    start = path.stat().st_size - files._files.bucket_slots * files._files.layout.slot_bytes
    with path.open("r+b") as disk:
        for _ in range(30):
            place = start + dice.randrange(files._size)
            disk.seek(place)
            byte = disk.read(1)[0]
            disk.seek(place)
            disk.write(bytes([byte ^ 1]))
            disk.flush()
            with pytest.raises(CorruptBlock, match="changed"):
                files.read(0, aligned())
            disk.seek(place)
            disk.write(bytes([byte]))
            disk.flush()
    files.read(0, aligned())


def test_slots_that_changed_places_are_noticed(tmp_path):
    path = written(tmp_path)
    files, _ = opened(tmp_path)
    size = files._files.layout.slot_bytes
    start = path.stat().st_size - files._files.bucket_slots * size
    data = bytearray(path.read_bytes())
    first, second = data[start : start + size], data[start + size : start + 2 * size]
    data[start : start + size], data[start + size : start + 2 * size] = second, first
    path.write_bytes(data)

    with pytest.raises(CorruptBlock):
        files.read(0, aligned())


async def nobody(blocks):
    """Who is told of blocks that leave the disk."""


async def test_the_disk_tier_works_on_encrypted_files_and_drops_what_was_changed(tmp_path, clock):
    def tier():
        files = EncryptedSlotFiles(tmp_path, LAYOUT, NAMESPACE, 8, KEY)
        return SsdTier(
            files,
            NAMESPACE,
            LruOrder(),
            disk=disk_of(clock),
            clock=clock,
            leaving=nobody,
        )

    first = tier()
    await first.open()
    blocks = [DiskWrite(e.block, e.parent, sealed(e.position)) for e in chain(3)]
    assert await first.store(blocks) == [name_of(n) for n in range(3)]
    await first.close()
    again = tier()
    assert await again.open() == 3
    (path,) = tmp_path.glob("bucket-*")
    size = again._files._files.layout.slot_bytes
    with path.open("r+b") as disk:
        disk.seek(path.stat().st_size - again._files._files.bucket_slots * size + size + 100)
        disk.write(b"xyz")

    targets = [aligned() for _ in range(3)]
    assert await again.load([name_of(n) for n in range(3)], targets) == 1

    assert targets[0] == sealed(0)
    assert again.stats()["corrupt"] == 1
    assert not again.holds(name_of(1))
    await again.close()


def test_the_room_counts_what_encryption_adds(tmp_path):
    """A file of one slot: header, table and slot."""
    room = 8 * (2 * ALIGN_BYTES + SLOT_ON_DISK)

    assert open_slot_files(tmp_path, LAYOUT, NAMESPACE, room, KEY).num_slots == 8
    assert open_slot_files(tmp_path, LAYOUT, NAMESPACE, room - 1, KEY).num_slots == 7
    assert open_slot_files(tmp_path, LAYOUT, NAMESPACE, room, None).num_slots > 8


def test_a_key_is_32_bytes_or_their_hex_digits(tmp_path):
    key = tmp_path / "key"
    key.write_bytes(KEY)
    assert read_key(key) == KEY
    key.write_text(KEY.hex() + "\n")
    assert read_key(key) == KEY


def test_a_key_that_is_not_there_says_where_it_was_looked_for(tmp_path):
    with pytest.raises(ConfigError, match=r"disk key, .*nowhere: No such file"):
        read_key(tmp_path / "nowhere")


@pytest.mark.parametrize("content", ["short", KEY.hex()[:-2], KEY.hex() + "00", "g" * 64, "é" * 32])
def test_a_bad_key_is_refused_without_repeating_it(tmp_path, content):
    (tmp_path / "key").write_text(content)

    with pytest.raises(ConfigError, match="64 hex digits") as refused:
        read_key(tmp_path / "key")

    assert content not in str(refused.value)
