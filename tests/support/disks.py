"""A disk of one tier, for tests of a single namespace."""

from collections.abc import Callable

from prefixfleet.store.disk_space import DiskSpace
from prefixfleet.store.disk_threads import DiskThreads
from prefixfleet.store.ssd import SharedDisk
from prefixfleet.store.wear import WearBudget
from prefixfleet.store.wear_file import WearFile

ROOM_BYTES = 1 << 40


def disk_of(
    clock: Callable[[], float],
    *,
    cap_bytes: int = ROOM_BYTES,
    budget: WearBudget | None = None,
    wear_file: WearFile | None = None,
    takes_all: bool = False,
) -> SharedDisk:
    """What tiers share; close its threads, or leave them to the interpreter's end."""
    return SharedDisk(
        DiskThreads(wear_file),
        budget or WearBudget(None, clock),
        DiskSpace(cap_bytes, clock),
        takes_all,
    )
