"""Loads that the scheduler half handed to the copiers of all ranks and that are not over yet.

Must not know the daemon, nor when a load is worth it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prefixfleet.cluster.connector_lookup import Lookup
from prefixfleet.cluster.connector_records import Load


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load that is over at all ranks: ``good`` of its ``wanted`` blocks arrived, in ``seconds``
    of copying at the slowest rank."""

    good: int
    wanted: int
    seconds: float


class OpenLoads:
    """At most one a request. Owned by the scheduler half, in its thread."""

    def __init__(self) -> None:
        self._open: dict[str, Load] = {}
        self._new: list[Load] = []
        self._arrived: dict[str, int] = {}  # blocks before the fault, of loads that failed
        self._seconds: dict[str, float] = {}  # of copying, so far

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def begin(
        self, request_id: str, lookup: Lookup, positions: range, block_ids: Sequence[int]
    ) -> None:
        """Copy the blocks at ``positions`` of the prompt, which ``lookup`` found, into the
        request's ``block_ids`` at the same positions.
        """
        found = lookup.poll()
        assert found is not None
        blocks = tuple((found.slots[i], lookup.chain[i], block_ids[i]) for i in positions)
        load = Load(request_id, blocks)
        self._open[request_id] = load
        self._new.append(load)

    def note_failed(self, failed: Mapping[str, int]) -> None:
        """Of these requests' loads only so many leading blocks arrived at a rank."""
        for request_id, blocks in failed.items():  # of the ranks, the one with fewest counts
            self._arrived[request_id] = min(blocks, self._arrived.get(request_id, blocks))

    def note_seconds(self, seconds: Mapping[str, float]) -> None:
        """So long a rank copied for these requests."""
        for request_id, copy_s in seconds.items():
            self._seconds[request_id] = max(copy_s, self._seconds.get(request_id, 0.0))

    def end(self, request_id: str) -> Loaded:
        """The request's load is over at all ranks."""
        wanted = len(self._open.pop(request_id).blocks)
        good = self._arrived.pop(request_id, wanted)
        return Loaded(good, wanted, self._seconds.pop(request_id, 0.0))

    def take_new(self) -> tuple[Load, ...]:
        """Loads begun since the last call."""
        new, self._new = tuple(self._new), []
        return new
