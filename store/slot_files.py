"""Slots on disk: aligned files that tell after any crash which of their slots hold what.

Blocking I/O, no policy: which block goes into which slot is decided above. Slots are grouped in
bucket files. A bucket is a header page, a table of contents (64 bytes a slot), then the slots.
The table entry is the commit: it is written after the slot's bytes are on the device, and cleared
before they change. So a slot that the table names was whole when it was named; bytes that changed
since (a bad disk) fail `slot.verify` when they are read.
"""

import contextlib
import errno
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.slot import ALIGN_BYTES, SlotLayout

BUCKET_BYTES = 256 * 1024 * 1024
MAX_BUCKET_SLOTS = 4096
IOV_MAX = 512  # parts of one vectored call; Linux allows 1,024
_HEADER = struct.Struct("<8s16sQHHI")  # magic, namespace, payload bytes, shards, pad, slots
_ENTRY = struct.Struct("<4sI16s16sI")  # magic, position, hash, parent, crc of the rest
_MAGIC, _ENTRY_MAGIC = b"pfbuck\x00\x01", b"pfe1"
ENTRY_BYTES = 64


@dataclass(frozen=True, slots=True)
class DiskBlock:
    """A block and its place in its chain: what the table of contents says of a slot."""

    slot: int
    block: BlockHash
    parent: BlockHash  # empty at the chain's root
    position: int


class SlotFiles:
    """The bucket files of one namespace in one folder. Owned by the one thread that uses it.

    ``num_slots`` is the cap; buckets come into being as slots are used. The constructor does no
    I/O; `recover` opens the folder.
    """

    def __init__(self, folder: Path, layout: SlotLayout, namespace: bytes, num_slots: int) -> None:
        self.layout = layout
        self.num_slots = num_slots
        self.bucket_slots = max(1, min(BUCKET_BYTES // layout.slot_bytes, MAX_BUCKET_SLOTS))
        self.direct = True  # False where the file system refuses O_DIRECT
        self._folder = folder
        self._header = _HEADER.pack(
            _MAGIC, namespace, layout.payload_bytes, layout.shards, 0, self.bucket_slots
        )
        self._buckets: dict[int, _Bucket] = {}

    def recover(self) -> list[DiskBlock]:
        """Every block that was committed, parents before their children, without holes.

        Buckets of another namespace, layout or size, and those past the cap, are deleted.

        Raises:
            ConfigError: the folder cannot be made, read or written.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            found = [entry for path in self._paths() for entry in self._recover_bucket(path)]
        except OSError as error:
            raise ConfigError(f"ssd tier, {self._folder}: {error}") from error
        return _without_holes(found)

    def write(self, blocks: Sequence[tuple[DiskBlock, memoryview]]) -> None:
        """Put whole slots on the device, then name them in the tables: they are committed.

        Data memory must be page aligned for direct I/O, as slots of a mapped pool are.

        Raises:
            OSError: the disk is full or fails; none of ``blocks`` counts as committed then.
        """
        by_slot = sorted(blocks, key=lambda item: item[0].slot)
        for number, group in groupby(by_slot, key=lambda i: i[0].slot // self.bucket_slots):
            items = list(group)
            bucket = self._bucket(number)
            places = [item[0].slot % self.bucket_slots for item in items]
            bucket.clear(places)
            try:
                for run in _runs(places, [item[1] for item in items]):
                    bucket.write_slots(*run)
                bucket.sync()
                bucket.name({p: i[0] for p, i in zip(places, items, strict=True)})
            except OSError:
                bucket.unname(places)
                raise

    def read(self, slot: int, target: memoryview) -> None:
        """Fill ``target`` (a whole, aligned slot) with the slot's bytes; verify them yourself.

        Raises:
            OSError: the disk fails, or the file is shorter than its table says.
        """
        bucket = self._buckets.get(slot // self.bucket_slots)
        if bucket is None:
            raise OSError(errno.ENOENT, f"ssd tier: slot {slot} was never written")
        bucket.read_slot(slot % self.bucket_slots, target)

    def forget(self, slots: Iterable[int]) -> None:
        """These slots hold nothing any more. Reaches the disk with the next write to them: until
        then a crash brings the old blocks back, whole, as cached blocks may be."""
        for slot in slots:
            if (bucket := self._buckets.get(slot // self.bucket_slots)) is not None:
                bucket.unname([slot % self.bucket_slots])

    def close(self) -> None:
        """Write the tables out and close the files; errors of a failing disk are ignored here,
        since an old table only brings old blocks back."""
        for bucket in self._buckets.values():
            with contextlib.suppress(OSError):
                bucket.flush()
            bucket.close()
        self._buckets.clear()

    def _paths(self) -> list[Path]:
        return sorted(self._folder.glob("bucket-*.slots"))

    def _recover_bucket(self, path: Path) -> list[DiskBlock]:
        number = path.stem.removeprefix("bucket-")
        first = int(number) * self.bucket_slots if number.isdecimal() else self.num_slots
        bucket = self._open(path) if first < self.num_slots else None
        if bucket is None:
            path.unlink()
            return []
        self._buckets[int(number)] = bucket
        return [
            DiskBlock(first + place, block, parent, position)
            for place, block, parent, position in bucket.entries()
            if first + place < self.num_slots
        ]

    def _bucket(self, number: int) -> "_Bucket":
        if number not in self._buckets:
            path = self._folder / f"bucket-{number:06}.slots"
            bucket = _Bucket(path, self)
            try:
                bucket.create(self._header)
            except OSError:
                bucket.close()
                path.unlink(missing_ok=True)
                raise
            self._buckets[number] = bucket
        return self._buckets[number]

    def _open(self, path: Path) -> "_Bucket | None":
        bucket = _Bucket(path, self)
        if bucket.load() == self._header:
            return bucket
        bucket.close()
        return None


class _Bucket:
    """One file. The table of contents is kept in memory and written page by page."""

    def __init__(self, path: Path, owner: SlotFiles) -> None:
        self._slot_bytes = owner.layout.slot_bytes
        table = owner.bucket_slots * ENTRY_BYTES
        self._table_bytes = -(-table // ALIGN_BYTES) * ALIGN_BYTES
        self._table = mmap.mmap(-1, ALIGN_BYTES + self._table_bytes)  # aligned, header first
        self._slots = owner.bucket_slots
        self._on_disk: set[int] = set()  # places that the table on the device names
        self._fd, owner.direct = _open_direct(path, owner.direct)

    def create(self, header: bytes) -> None:
        """Take the space and write header and empty table. Raises `OSError` when it is full."""
        os.posix_fallocate(self._fd, 0, self._start(self._slots))
        self._table[: len(header)] = header
        self._put(0, len(self._table))
        self.sync()

    def load(self) -> bytes:
        """Read header and table; returns the header's bytes."""
        got = os.preadv(self._fd, [self._table], 0)
        if got < len(self._table) or os.fstat(self._fd).st_size < self._start(self._slots):
            return b""
        self._on_disk = {place for place, *_ in self.entries()}
        return bytes(self._table[: _HEADER.size])

    def entries(self) -> Iterator[tuple[int, BlockHash, BlockHash, int]]:
        """(place, hash, parent, position) of every entry that is whole."""
        for place in range(self._slots):
            at = self._at(place)
            data = self._table[at : at + _ENTRY.size]
            magic, position, block, parent, crc = _ENTRY.unpack(data)
            if magic == _ENTRY_MAGIC and crc == zlib.crc32(data[:-4]):
                yield place, block, parent if position else b"", position

    def clear(self, places: Sequence[int]) -> None:
        """Make sure that the device's table names none of ``places``."""
        stale = [place for place in places if place in self._on_disk]
        self.unname(stale)
        self._write_pages(stale)

    def name(self, blocks: dict[int, DiskBlock]) -> None:
        """Commit: the device's table names ``blocks`` when this returns."""
        for place, entry in blocks.items():
            data = _ENTRY.pack(_ENTRY_MAGIC, entry.position, entry.block, entry.parent, 0)[:-4]
            at = self._at(place)
            self._table[at : at + _ENTRY.size] = data + zlib.crc32(data).to_bytes(4, "little")
        self._on_disk.update(blocks)  # before the write: it may reach the disk and still fail
        self._write_pages(list(blocks))

    def unname(self, places: Iterable[int]) -> None:
        """Clear entries in memory only."""
        for place in places:
            at = self._at(place)
            self._table[at : at + ENTRY_BYTES] = bytes(ENTRY_BYTES)

    def flush(self) -> None:
        """Write the whole table."""
        self._put(ALIGN_BYTES, self._table_bytes)
        self.sync()

    def write_slots(self, place: int, parts: Sequence[memoryview]) -> None:
        """Slots side by side in one vectored write."""
        offset, size = self._start(place), self._slot_bytes * len(parts)
        if (done := os.pwritev(self._fd, parts, offset)) != size:
            raise OSError(errno.EIO, f"wrote {done} of {size} bytes at {offset}")

    def read_slot(self, place: int, target: memoryview) -> None:
        done = os.preadv(self._fd, [target], self._start(place))
        if done != self._slot_bytes:
            raise OSError(errno.EIO, f"read {done} of {self._slot_bytes} bytes of a slot")

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)

    def _write_pages(self, places: Sequence[int]) -> None:
        pages = {self._at(place) // ALIGN_BYTES for place in places}
        for page in pages:
            self._put(page * ALIGN_BYTES, ALIGN_BYTES)
        if pages:
            self.sync()
            named = {p for p in self._on_disk if self._at(p) // ALIGN_BYTES in pages}
            self._on_disk -= {p for p in named if self._table[self._at(p)] == 0}

    def _put(self, at: int, length: int) -> None:
        view = memoryview(self._table)[at : at + length]
        if os.pwritev(self._fd, [view], at) != length:
            raise OSError(errno.EIO, "table of contents not written whole")

    def _at(self, place: int) -> int:
        return ALIGN_BYTES + place * ENTRY_BYTES

    def _start(self, place: int) -> int:
        return ALIGN_BYTES + self._table_bytes + place * self._slot_bytes


def _open_direct(path: Path, direct: bool) -> tuple[int, bool]:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    if direct:
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return os.open(path, flags, 0o600), False


def _runs(
    places: Sequence[int], parts: Sequence[memoryview]
) -> Iterator[tuple[int, list[memoryview]]]:
    """Neighbouring places joined, at most `IOV_MAX` together."""
    start = 0
    for i in range(1, len(places) + 1):
        joined = i < len(places) and places[i] == places[i - 1] + 1 and i - start < IOV_MAX
        if not joined:
            yield places[start], list(parts[start:i])
            start = i


def _without_holes(found: list[DiskBlock]) -> list[DiskBlock]:
    """Parents first; a block named twice counts once, one whose parent is lost not at all."""
    kept: dict[BlockHash, DiskBlock] = {}
    for entry in sorted(found, key=lambda e: e.position):
        above = kept.get(entry.parent)
        at_root = entry.parent == b"" and entry.position == 0
        linked = above is not None and above.position == entry.position - 1
        if (at_root or linked) and entry.block not in kept:
            kept[entry.block] = entry
    return list(kept.values())
