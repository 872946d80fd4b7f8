"""Which bytes to read into which: neighbouring slots are one range. Pure."""

from collections.abc import Iterator, Sequence

from prefixfleet.transfer.link import Range
from prefixfleet.transfer.wire import MAX_RANGES


def extents(
    source_slots: Sequence[int], target_slots: Sequence[int], slot_bytes: int
) -> tuple[list[Range], list[Range]]:
    """Ranges of the source's segment and of ours, pairwise as long.

    Slots that follow each other on both sides are merged, whatever their order is elsewhere.
    """
    runs: list[tuple[int, int, int]] = []  # source slot, target slot, number of slots
    for source, target in sorted(zip(source_slots, target_slots, strict=True)):
        if runs and (source, target) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((source, target, 1))
    return (
        [Range(source * slot_bytes, count * slot_bytes) for source, _, count in runs],
        [Range(target * slot_bytes, count * slot_bytes) for _, target, count in runs],
    )


def cut(
    ranges: Sequence[Range], targets: Sequence[memoryview], limit: int
) -> Iterator[tuple[list[Range], list[memoryview]]]:
    """The same ranges and targets in portions of at most ``limit`` bytes; long ranges are cut."""
    parts: list[Range] = []
    views: list[memoryview] = []
    room = limit
    for part, target in zip(ranges, targets, strict=True):
        start = 0
        while start < part.length:
            take = min(part.length - start, room)
            parts.append(Range(part.offset + start, take))
            views.append(target[start : start + take])
            start += take
            room -= take
            if room == 0 or len(parts) == MAX_RANGES:
                yield parts, views
                parts, views, room = [], [], limit
    if parts:
        yield parts, views
