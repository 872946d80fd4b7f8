"""Slots on disk: aligned files that tell after any crash which of their slots hold what.

Blocking I/O, no policy: which block goes into which slot is decided above. Slots are grouped in
`BucketFile`s. A bucket's table of contents is the commit: an entry is written after the slot's
bytes are on the device, and cleared before they change. So a slot that the table names was whole
when it was named; bytes that changed since (a bad disk) fail `slot.verify` when they are read.
"""

import contextlib
import errno
import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from prefixfleet.store.bucket_file import (
    BucketFile,
    DiskBlock,
    bucket_file_bytes,
    bucket_header,
)
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.slot import SlotLayout

log = logging.getLogger(__name__)

BUCKET_BYTES = 256 * 1024 * 1024
MAX_BUCKET_SLOTS = 4096
LEAST_BUCKETS = 32
IOV_MAX = 512  # parts of one vectored call; Linux allows 1,024
BUCKET_GLOB = "bucket-*.slots"


def bucket_number(path: Path) -> int:
    """Of a bucket's file; -1 for another one."""
    number = path.stem.removeprefix("bucket-")
    return int(number) if number.isdecimal() else -1


def bucket_size(room_bytes: int) -> int:
    """What new buckets on a disk of ``room_bytes`` may take, so that there are `LEAST_BUCKETS` or
    more for its namespaces. A power of two, so that most caps agree on it."""
    return min(BUCKET_BYTES, 1 << max(0, (room_bytes // LEAST_BUCKETS).bit_length() - 1))


def bucket_slots(slot_bytes: int, bucket_bytes: int = BUCKET_BYTES) -> int:
    """Slots of one bucket of about ``bucket_bytes``; at least one."""
    return max(1, min(bucket_bytes // slot_bytes, MAX_BUCKET_SLOTS))


class SlotFiles:
    """The bucket files of one namespace in one folder. Owned by the one thread that uses it.

    ``num_slots`` is how many there may be; buckets of about ``bucket_bytes`` come into being as
    slots are used. The constructor does no I/O; `recover` opens the folder.
    """

    def __init__(
        self,
        folder: Path,
        layout: SlotLayout,
        namespace: bytes,
        num_slots: int,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.layout = layout
        self.num_slots = num_slots
        self.bucket_slots = bucket_slots(layout.slot_bytes, bucket_bytes)
        self.direct = True  # False where the file system refuses O_DIRECT
        self._folder = folder
        self._header = bucket_header(namespace, layout, self.bucket_slots)
        self._buckets: dict[int, BucketFile] = {}
        self._closed = False

    @property
    def bucket_bytes(self) -> int:
        """Size of a bucket on the disk."""
        return bucket_file_bytes(self.layout.slot_bytes, self.bucket_slots)

    @property
    def buckets(self) -> list[int]:
        """Numbers of the buckets that are on the disk."""
        return sorted(self._buckets)

    def recover(self) -> list[DiskBlock]:
        """Every block that was committed, parents before their children, without holes.

        Buckets of another namespace, key, layout or size, and those past the cap, are deleted,
        which is logged.

        Raises:
            ConfigError: the folder cannot be made, read or written.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            paths = self._paths()
            found = [entry for path in paths for entry in self._recover_bucket(path)]
        except OSError as error:
            self._close_all()
            raise ConfigError(f"ssd tier, {self._folder}: {error}") from error
        if deleted := len(paths) - len(self._buckets):
            what = "bucket files of another key, block or file size, or past the cap, are deleted"
            log.warning("ssd tier, %s: %d %s", self._folder, deleted, what)
        return _without_holes(found)

    def write(self, blocks: Sequence[tuple[DiskBlock, memoryview]]) -> None:
        """Put whole slots on the device, then name them in the tables: they are committed.

        Data memory must be page aligned for direct I/O, as slots of a mapped pool are.

        Raises:
            OSError: the disk is full or fails, or the files are closed; none of ``blocks`` counts
                as committed then.
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

    def delete(self, number: int) -> None:
        """Give the space of a bucket back: nobody reads or writes it, and what it held is gone.
        Nothing happens for one that never was. Raises `OSError`, also when they are closed."""
        self._check_open()
        if (bucket := self._buckets.pop(number, None)) is not None:
            bucket.close()
            self._path(number).unlink(missing_ok=True)

    def close(self) -> None:
        """Write the tables out and close the files, for good; errors of a failing disk are ignored
        here, since an old table only brings old blocks back."""
        self._closed = True
        for bucket in self._buckets.values():
            with contextlib.suppress(OSError):
                bucket.flush()
        self._close_all()

    def _close_all(self) -> None:
        for bucket in self._buckets.values():
            bucket.close()
        self._buckets.clear()

    def _paths(self) -> list[Path]:
        return sorted(self._folder.glob(BUCKET_GLOB))

    def _path(self, number: int) -> Path:
        return self._folder / f"bucket-{number:06}.slots"

    def _recover_bucket(self, path: Path) -> list[DiskBlock]:
        number = bucket_number(path)
        first = number * self.bucket_slots
        bucket = self._open(path) if 0 <= first < self.num_slots else None
        if bucket is None:
            path.unlink()
            return []
        self._buckets[number] = bucket
        return [
            DiskBlock(first + place, block, parent, position)
            for place, block, parent, position in bucket.entries()
            if first + place < self.num_slots
        ]

    def _check_open(self) -> None:
        """What was asked for before the end may come after it: a bucket that is on the disk is not
        known any more, and would be made anew, empty."""
        if self._closed:
            raise OSError(errno.ESHUTDOWN, f"ssd tier, {self._folder}: the files are closed")

    def _bucket(self, number: int) -> BucketFile:
        self._check_open()
        if number not in self._buckets:
            path = self._path(number)
            bucket = self._file(path)
            try:
                bucket.create(self._header)
            except OSError:
                bucket.close()
                path.unlink(missing_ok=True)
                raise
            self._buckets[number] = bucket
        return self._buckets[number]

    def _open(self, path: Path) -> BucketFile | None:
        bucket, ours = self._file(path), False
        try:
            ours = bucket.load() == self._header
        finally:
            if not ours:
                bucket.close()
        return bucket if ours else None

    def _file(self, path: Path) -> BucketFile:
        bucket = BucketFile(path, self.layout.slot_bytes, self.bucket_slots, direct=self.direct)
        self.direct = bucket.direct
        return bucket


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
