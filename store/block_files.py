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

    def close(self) -> None:
        """Write out what is known, and close."""
        ...
