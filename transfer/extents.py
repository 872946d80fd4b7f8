"""Which bytes to read into which: neighbouring slots are one range. Pure."""

from collections.abc import Sequence

from prefixfleet.transfer.link import Range


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
