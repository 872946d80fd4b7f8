"""Saves that the scheduler half handed to the copiers of all ranks and that are not over yet.

Must not know the daemon, nor when a save is worth it.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prefixfleet.cluster.connector_prefix import Prefix
from prefixfleet.cluster.connector_records import Save

MAX_OPEN_BLOCKS = 4096
"""Blocks handed to the copiers and not done; more wait in their requests, or are dropped."""


@dataclass(slots=True)
class _OpenSave:
    save: Save
    ranks: int  # that are not done
    cancelled: bool = False


class OpenSaves:
    """Owned by the scheduler half, in its thread."""

    def __init__(self) -> None:
        self._open: dict[int, _OpenSave] = {}
        self._numbers = itertools.count()
        self._new: list[Save] = []
        self._cancelled: set[int] = set()

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, prefix: Prefix, full: int, block_ids: Sequence[int], ranks: int) -> int:
        """Hand over the blocks before ``full`` that are not saved; how many those are.

        0 with too many in hand: they stay with the request.
        """
        first = prefix.saved
        in_hand = sum(len(o.save.blocks) for o in self._open.values())
        if full - first + in_hand > MAX_OPEN_BLOCKS:
            return 0
        blocks = tuple(zip(prefix.chain[first:full], block_ids[first:full], strict=True))
        number = next(self._numbers)
        save = Save(number, prefix.request.request_id, prefix.parent_of(first), blocks)
        prefix.saved = full
        self._open[number] = _OpenSave(save, ranks)
        self._new.append(save)
        return len(blocks)

    def cancel(self, request_id: str) -> None:
        """The engine may overwrite the blocks of the request's saves in this step."""
        for number, open_save in self._open.items():
            if open_save.save.request == request_id and not open_save.cancelled:
                open_save.cancelled = True
                self._cancelled.add(number)

    def note_done(self, saves: Mapping[int, int]) -> None:
        """So many more ranks are done with these saves."""
        for number, ranks in saves.items():
            self._open[number].ranks -= ranks
            if self._open[number].ranks == 0:
                del self._open[number]

    def holds(self, request_id: str) -> bool:
        """Whether blocks of the request must stay as they are."""
        return any(o.save.request == request_id and not o.cancelled for o in self._open.values())

    def take_new(self) -> tuple[tuple[Save, ...], frozenset[int]]:
        """Saves begun, and numbers of those cancelled, since the last call."""
        new, cancelled = tuple(self._new), frozenset(self._cancelled)
        self._new, self._cancelled = [], set()
        return new, cancelled
