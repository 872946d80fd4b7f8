"""Loads that the scheduler half handed to the copiers of all ranks and that are not over yet.

Must not know the daemon, nor when a load is worth it.
"""

from collections.abc import Mapping, Sequence

from prefixfleet.cluster.connector_lookup import Lookup
from prefixfleet.cluster.connector_records import Load


class OpenLoads:
    """At most one a request. Owned by the scheduler half, in its thread."""

    def __init__(self) -> None:
        self._open: dict[str, Load] = {}
        self._new: list[Load] = []
        self._arrived: dict[str, int] = {}  # blocks before the fault, of loads that failed

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

    def end(self, request_id: str) -> tuple[int, int]:
        """The request's load is over at all ranks: (blocks that arrived, blocks of it)."""
        wanted = len(self._open.pop(request_id).blocks)
        return self._arrived.pop(request_id, wanted), wanted

    def take_new(self) -> tuple[Load, ...]:
        """Loads begun since the last call."""
        new, self._new = tuple(self._new), []
        return new
