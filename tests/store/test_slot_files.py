"""Slots on disk: whatever moment the process dies at, what comes back is whole."""

import mmap
import os
import random
import signal
import subprocess
import sys
from itertools import pairwise

import pytest

from prefixfleet.store.bucket_file import BucketFile, DiskBlock
from prefixfleet.store.errors import ConfigError, CorruptBlock
from prefixfleet.store.slot import ALIGN_BYTES, SlotLayout, seal, verify
from prefixfleet.store.slot_files import SlotFiles

NAMESPACE = b"n" * 16
LAYOUT = SlotLayout(payload_bytes=5000)


def block_name(number):
    return number.to_bytes(16, "big")


def aligned(count=1):
    return memoryview(mmap.mmap(-1, LAYOUT.slot_bytes * count))


def sealed(number):
    slot = aligned()
    LAYOUT.payload(slot)[:] = random.Random(number).randbytes(LAYOUT.payload_bytes)
    seal(slot, LAYOUT, NAMESPACE, block_name(number))
    return slot


def chain_block(slot, number):
    """Block ``number`` of one long chain."""
    parent = block_name(number - 1) if number else b""
    return DiskBlock(slot, block_name(number), parent, number)


def opened(folder, num_slots=64):
    files = SlotFiles(folder, LAYOUT, NAMESPACE, num_slots)
    return files, files.recover()


def test_what_was_written_comes_back_after_a_restart_with_its_chain(tmp_path):
    files, found = opened(tmp_path)
    assert found == []
    blocks = [chain_block(slot, number) for number, slot in enumerate([3, 4, 5, 9])]
    files.write([(b, sealed(b.position)) for b in blocks])

    again, found = opened(tmp_path)  # the first was not closed: as after a kill

    assert found == blocks
    for entry in found:
        target = aligned()
        again.read(entry.slot, target)
        verify(target, LAYOUT, NAMESPACE, entry.block)


def test_a_slot_used_again_holds_only_the_new_block(tmp_path):
    files, _ = opened(tmp_path)
    files.write([(chain_block(0, 0), sealed(0))])
    files.forget([0])
    other = DiskBlock(0, block_name(77), b"", 0)

    files.write([(other, sealed(77))])

    assert opened(tmp_path)[1] == [other]


def test_a_block_forgotten_while_the_table_is_written_is_cleared_before_its_slot_is_used(
    tmp_path, monkeypatch
):
    """The event loop forgets while the writing thread writes: that table still names the block."""
    files, _ = opened(tmp_path)
    files.write([(chain_block(0, 0), sealed(0))])
    sync = BucketFile.sync

    def forget_meanwhile(bucket):
        sync(bucket)
        files.forget([0])

    monkeypatch.setattr(BucketFile, "sync", forget_meanwhile)
    other = DiskBlock(1, block_name(77), b"", 0)
    bucket = files._buckets[0]
    bucket.name({1: other})  # the commit of a write to the same page
    monkeypatch.setattr(BucketFile, "sync", sync)

    bucket.clear([0])  # as the next write to slot 0 does, and dies after it

    assert opened(tmp_path)[1] == [other]


def test_blocks_behind_a_hole_do_not_come_back(tmp_path):
    """They could never be matched: their parent is gone."""
    files, _ = opened(tmp_path)
    files.write([(chain_block(n, n), sealed(n)) for n in range(4)])
    files.forget([1])
    files.close()

    assert [e.position for e in opened(tmp_path)[1]] == [0]


def test_what_comes_after_the_end_fails_and_touches_no_file(tmp_path):
    files, _ = opened(tmp_path)
    blocks = [chain_block(n, n) for n in range(4)]
    files.write([(b, sealed(b.position)) for b in blocks])
    files.close()

    with pytest.raises(OSError, match="closed"):
        files.write([(chain_block(4, 4), sealed(4))])
    with pytest.raises(OSError, match="closed"):
        files.delete(0)

    assert opened(tmp_path)[1] == blocks


@pytest.mark.parametrize("other", ["namespace", "layout", "smaller"])
def test_files_of_another_namespace_layout_or_past_the_cap_are_not_read(tmp_path, caplog, other):
    files, _ = opened(tmp_path)
    files.write([(chain_block(63, 0), sealed(0))])
    files.close()
    layout = SlotLayout(payload_bytes=5001) if other == "layout" else LAYOUT
    namespace = b"m" * 16 if other == "namespace" else NAMESPACE

    found = SlotFiles(tmp_path, layout, namespace, 8 if other == "smaller" else 64).recover()

    assert found == []
    assert ("1 bucket files of another key" in caplog.text) == (other != "smaller")


def test_a_flipped_byte_in_the_table_loses_that_block_and_its_suffix_only(tmp_path):
    files, _ = opened(tmp_path)
    files.write([(chain_block(n, n), sealed(n)) for n in range(4)])
    files.close()
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[ALIGN_BYTES + 2 * 64 + 10] ^= 1
    path.write_bytes(data)

    assert [e.position for e in opened(tmp_path)[1]] == [0, 1]


def test_a_flipped_byte_in_a_slot_is_found_when_it_is_read(tmp_path):
    files, _ = opened(tmp_path)
    files.write([(chain_block(0, 0), sealed(0))])
    files.close()
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[-LAYOUT.slot_bytes * files.bucket_slots + 3000] ^= 1
    path.write_bytes(data)
    again, (entry,) = opened(tmp_path)
    target = aligned()

    again.read(entry.slot, target)

    with pytest.raises(CorruptBlock):
        verify(target, LAYOUT, NAMESPACE, entry.block)


@pytest.mark.parametrize("length", [0, 100, ALIGN_BYTES, 3 * ALIGN_BYTES])
def test_a_truncated_file_is_not_trusted(tmp_path, length):
    files, _ = opened(tmp_path)
    files.write([(chain_block(0, 0), sealed(0))])
    files.close()
    (path,) = tmp_path.iterdir()
    os.truncate(path, length)

    again, found = opened(tmp_path)

    assert found == []
    again.write([(chain_block(0, 0), sealed(0))])


def test_junk_in_the_folder_is_no_bucket(tmp_path):
    (tmp_path / "bucket-abc.slots").write_bytes(b"x" * 9000)
    (tmp_path / "bucket-000001.slots").write_bytes(b"x" * 9000)

    assert opened(tmp_path)[1] == []


def test_a_folder_that_cannot_be_used_says_so(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match="ssd tier"):
        opened(tmp_path / "file" / "under")


def test_a_slot_that_was_never_written_is_an_error(tmp_path):
    files, _ = opened(tmp_path)

    with pytest.raises(OSError, match="never written"):
        files.read(0, aligned())


WRITER = """
import random, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_slot_files import chain_block, opened, sealed
files, found = opened(Path(sys.argv[1]), 24)
random.seed(int(sys.argv[3]))
held = {e.slot: e for e in found}
last = max((e.position for e in found), default=-1)
while True:
    if last >= 15:
        doomed = [s for s, e in held.items() if e.position > 3]
        files.forget(doomed)
        for slot in doomed:
            del held[slot]
        last = 3
    free = [s for s in range(24) if s not in held]
    batch = [chain_block(s, last + 1 + i) for i, s in enumerate(random.sample(free, 4))]
    files.write([(b, sealed(b.position)) for b in batch])
    held |= {b.slot: b for b in batch}
    last = batch[-1].position
    print(last, flush=True)
"""


def test_kill_9_at_any_moment_never_yields_a_torn_block(tmp_path):
    """Kill a writer again and again at random moments; every block that comes back is whole."""
    committed_ever = 0
    for seed in range(12):
        command = [sys.executable, "-c", WRITER, tmp_path, os.path.dirname(__file__), str(seed)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE)
        for _ in range(random.Random(seed).randrange(1, 12)):
            assert writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
        writer.communicate()

        files, found = opened(tmp_path, 24)
        committed_ever += len(found)
        assert all(a.position + 1 == b.position for a, b in pairwise(found))
        for entry in found:
            target = aligned()
            files.read(entry.slot, target)
            verify(target, LAYOUT, NAMESPACE, entry.block)
            assert bytes(LAYOUT.payload(target)) == bytes(LAYOUT.payload(sealed(entry.position)))
        files.close()

    assert committed_ever > 0
