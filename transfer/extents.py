"""Which bytes to read into which: neighbouring slots are one range. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prefixfleet.transfer.link import Range


@dataclass(frozen=True, slots=True)
class Portion:
    """Blocks ``first`` to ``last`` (exclusive) of a pull, read by one call.

    ``sources`` are ranges of the peer's segment, ``targets`` those of ours, pairwise as long.
    """

    first: int
    last: int
    sources: tuple[Range, ...]
    targets: tuple[Range, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all its ranges."""
        return sum(part.length for part in self.sources)


def portions(
    source_slots: Sequence[int], target_slots: Sequence[int], slot_bytes: int, limit_bytes: int
) -> Iterator[Portion]:
    """The blocks in order, in portions of about ``limit_bytes``, a whole block at least.

    Neighbours that are neighbours on both sides are merged, in ascending order only.
    """
    step = max(1, limit_bytes // slot_bytes)
    for first in range(0, len(target_slots), step):
        last = min(first + step, len(target_slots))
        sources, targets = _merge(source_slots[first:last], target_slots[first:last], slot_bytes)
        yield Portion(first, last, sources, targets)


def _merge(
    source_slots: Sequence[int], target_slots: Sequence[int], slot_bytes: int
) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
    runs: list[tuple[int, int, int]] = []  # source slot, target slot, number of slots
    for source, target in zip(source_slots, target_slots, strict=True):
        if runs and (source, target) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((source, target, 1))
    return (
        tuple(Range(source * slot_bytes, count * slot_bytes) for source, _, count in runs),
        tuple(Range(target * slot_bytes, count * slot_bytes) for _, target, count in runs),
    )
