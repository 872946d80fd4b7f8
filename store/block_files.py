"""`BlockFiles`: what the disk tier asks of its files, plain or encrypted."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from prefixfleet.store.bucket_file import DiskBlock
from prefixfleet.store.slot import SlotLayout


class BlockFiles(Protocol):
    """Slots on disk: whatever moment the process dies at, what comes back is whole."""

    layout: SlotLayout
    num_slots: int

    @property
    def bucket_slots(self) -> int:
        """Slots of each file but the last: a file is made and deleted as a whole."""
        ...

    @property
    def bucket_bytes(self) -> int:
        """What a file takes of the disk."""
        ...

    @property
    def buckets(self) -> list[int]:
        """Numbers of the files that are there: number n has the slots from n x `bucket_slots`."""
        ...

    @property
    def direct(self) -> bool:
        """Whether reads and writes pass the page cache by."""
        ...

    def recover(self) -> list[DiskBlock]:
        """Every block that was committed, parents first. Raises `ConfigError`."""
        ...

    def write(self, blocks: Sequence[tuple[DiskBlock, memoryview]]) -> None:
        """Commit whole slots. Raises `OSError`; none of ``blocks`` is committed then."""
        ...

    def read(self, slot: int, target: memoryview) -> None:
        """Fill ``target`` with a slot; verify it. Raises `OSError`, `CorruptBlock`."""
        ...

    def forget(self, slots: Iterable[int]) -> None:
        """These slots hold nothing any more."""
        ...

    def delete(self, number: int) -> None:
        """Remove a file that nobody reads or writes. Raises `OSError`."""
        ...

    def close(self) -> None:
        """Write out what is known, and close."""
        ...
