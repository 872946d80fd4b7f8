"""`BucketFile`: one file of slots, whose table of contents says after any crash what is whole.

A header page, a table of 64 bytes a slot, then the slots. The table is kept in memory and written
page by page.
"""

import errno
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.slot import ALIGN_BYTES, SlotLayout

ENTRY_BYTES = 64
_HEADER = struct.Struct("<8s16sQHHI")  # magic, namespace, payload bytes, shards, pad, slots
_ENTRY = struct.Struct("<4sI16s16sI")  # magic, position, hash, parent, crc of the rest
_MAGIC, _ENTRY_MAGIC = b"pfbuck\x00\x01", b"pfe1"


@dataclass(frozen=True, slots=True)
class DiskBlock:
    """A block and its place in its chain: what the table of contents says of a slot."""

    slot: int
    block: BlockHash
    parent: BlockHash  # empty at the chain's root
    position: int


def bucket_header(namespace: bytes, layout: SlotLayout, slots: int) -> bytes:
    """The first bytes of each bucket of ``slots`` slots of a namespace (16 bytes) and layout."""
    return _HEADER.pack(_MAGIC, namespace, layout.payload_bytes, layout.shards, 0, slots)


def bucket_file_bytes(slot_bytes: int, slots: int) -> int:
    """Size of a bucket on the disk, header and table included."""
    return ALIGN_BYTES + _table_bytes(slots) + slots * slot_bytes


def _table_bytes(slots: int) -> int:
    return -(-slots * ENTRY_BYTES // ALIGN_BYTES) * ALIGN_BYTES


class BucketFile:
    """One file of ``slots`` slots. Owned by its `SlotFiles`. The constructor opens or makes the
    file; then `create` it or `load` it. ``direct`` says whether I/O goes past the page cache.

    Raises:
        OSError: the file cannot be opened; and from every method that reaches the disk.
    """

    def __init__(self, path: Path, slot_bytes: int, slots: int, *, direct: bool) -> None:
        self._slot_bytes = slot_bytes
        self._table_bytes = _table_bytes(slots)
        self._table = mmap.mmap(-1, ALIGN_BYTES + self._table_bytes)  # aligned, header first
        self._slots = slots
        self._on_disk: set[int] = set()  # places that the table on the device names
        self._fd, self.direct = _open_direct(path, direct)

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
        """Fill ``target`` with one slot's bytes."""
        done = os.preadv(self._fd, [target], self._start(place))
        if done != self._slot_bytes:
            raise OSError(errno.EIO, f"read {done} of {self._slot_bytes} bytes of a slot")

    def sync(self) -> None:
        """What was written is on the device when this returns."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the file; writes nothing."""
        os.close(self._fd)

    def _write_pages(self, places: Sequence[int]) -> None:
        pages = {self._at(place) // ALIGN_BYTES for place in places}
        on_pages = {p for p in self._on_disk if self._at(p) // ALIGN_BYTES in pages}
        cleared = {p for p in on_pages if self._table[self._at(p)] == 0}  # others may be meanwhile
        for page in pages:
            self._put(page * ALIGN_BYTES, ALIGN_BYTES)
        if pages:
            self.sync()
            self._on_disk -= cleared

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
