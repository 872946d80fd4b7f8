"""How large a namespace's files are on a disk, and which numbers they may have. Pure.

Files of the size that is there stay as they are when the cap changes, as long as there can be
neither too few nor too many of them: another size would lose what they hold.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from prefixfleet.store.bucket_file import ENTRY_BYTES, bucket_file_bytes
from prefixfleet.store.kept_files import KeptFile
from prefixfleet.store.slot import ALIGN_BYTES
from prefixfleet.store.slot_files import (
    LEAST_BUCKETS,
    MAX_BUCKET_SLOTS,
    bucket_number,
    bucket_size,
    bucket_slots,
)

SHRUNK = 4
"""To a cap so many times as low an earlier size is kept, and what stays of the files is found under
whatever numbers they have: books are for so many times the slots then."""
FEWEST_BUCKETS = (LEAST_BUCKETS - 1) // SHRUNK
"""Files of an earlier, larger size, at least. A power of two has room for `LEAST_BUCKETS` but for
their tables: one less."""
MOST_BUCKETS = 1024
"""Files of an earlier, smaller size, at most: each is open, with its table in memory."""


@dataclass(frozen=True, slots=True)
class BucketShape:
    """``slots`` of each file, and how many numbers there are for ``files``; what may be there at
    once is the matter of the cap. None where not one fits."""

    slots: int
    files: int


def shape_of(slot_bytes: int, room_bytes: int, found: Sequence[KeptFile]) -> BucketShape:
    """For slots of ``slot_bytes`` on a disk of ``room_bytes`` where these were ``found``."""
    slots = _earlier(slot_bytes, room_bytes, found)
    slots = slots or bucket_slots(slot_bytes, bucket_size(room_bytes))
    fit = room_bytes // bucket_file_bytes(slot_bytes, slots)
    numbers = (bucket_number(file.path) for file in found if _slots_in(file, slot_bytes) == slots)
    most = SHRUNK * (fit + 1) if fit else 0  # no more fit into so many times the room
    highest = max((number for number in numbers if number < most), default=-1)
    return BucketShape(slots, max(fit, highest + 1))


def _earlier(slot_bytes: int, room_bytes: int, found: Sequence[KeptFile]) -> int:
    """Slots of the files that are there, if they may go on; else 0."""
    sizes = Counter(_slots_in(file, slot_bytes) for file in found)
    slots = max(sizes, key=lambda slots: (slots > 0, sizes[slots]), default=0)
    files = room_bytes // bucket_file_bytes(slot_bytes, slots)
    return slots if FEWEST_BUCKETS <= files <= MOST_BUCKETS else 0


def _slots_in(file: KeptFile, slot_bytes: int) -> int:
    """Of a file of such slots; 0 if it is none."""
    slots = (file.size - ALIGN_BYTES) // (slot_bytes + ENTRY_BYTES)
    whole = 0 < slots <= MAX_BUCKET_SLOTS and bucket_file_bytes(slot_bytes, slots) == file.size
    return slots if whole else 0
