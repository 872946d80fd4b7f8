"""Bucket files that somebody changed: recovery names no block whose bytes it would give wrongly."""

import mmap
import os
import random
import tempfile
from contextlib import suppress
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefixfleet.store.bucket_file import DiskBlock
from prefixfleet.store.errors import ConfigError, CorruptBlock
from prefixfleet.store.slot import SlotLayout, seal, verify
from prefixfleet.store.slot_files import SlotFiles

NAMESPACE = b"n" * 16
LAYOUT = SlotLayout(payload_bytes=3000)
SLOTS = 6
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "48"))


def payload_of(block):
    return random.Random(block).randbytes(LAYOUT.payload_bytes)


def aligned():
    return memoryview(mmap.mmap(-1, LAYOUT.slot_bytes))


def sealed(block):
    slot = aligned()
    LAYOUT.payload(slot)[:] = payload_of(block)
    seal(slot, LAYOUT, NAMESPACE, block)
    return slot


def written(folder):
    """A file of two chains; its path."""
    files = SlotFiles(folder, LAYOUT, NAMESPACE, SLOTS)
    files.bucket_slots = files.num_slots
    files.recover()
    names = [bytes([i]) * 16 for i in range(SLOTS)]
    blocks = [DiskBlock(i, names[i], names[i - 1] if i % 3 else b"", i % 3) for i in range(SLOTS)]
    files.write([(block, sealed(block.block)) for block in blocks])
    files.close()
    return next(folder.glob("bucket-*"))


@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), database=None)
@given(
    edits=st.lists(
        st.tuples(
            st.one_of(st.integers(0, 60), st.integers(4096, 4096 + 6 * 64), st.integers(0, 40_000)),
            st.binary(min_size=1, max_size=70),
        ),
        max_size=4,
    ),
    length=st.one_of(st.none(), st.integers(0, 40_000)),
    name=st.sampled_from(["", "bucket-.slots", "bucket-²²².slots", "bucket-999999999999.slots"]),
)
def test_changed_files_lose_blocks_and_never_give_wrong_ones(edits, length, name):
    with tempfile.TemporaryDirectory(prefix="pf-fuzz-") as folder_name:
        folder = Path(folder_name)
        path = written(folder)
        with path.open("r+b") as file:
            for place, data in edits:
                file.seek(place)
                file.write(data)
            if length is not None:
                file.truncate(length)
        if name:
            (folder / name).write_bytes(path.read_bytes())
        files = SlotFiles(folder, LAYOUT, NAMESPACE, SLOTS)
        files.bucket_slots = files.num_slots
        try:
            found = files.recover()
        except ConfigError:
            return
        for entry in found:
            target = aligned()
            with suppress(CorruptBlock, OSError):
                files.read(entry.slot, target)
                verify(target, LAYOUT, NAMESPACE, entry.block)
                assert LAYOUT.payload(target) == payload_of(entry.block)
        assert len(found) == len({entry.block for entry in found})
        files.write([(DiskBlock(0, b"z" * 16, b"", 0), sealed(b"z" * 16))])  # it goes on
        files.close()
