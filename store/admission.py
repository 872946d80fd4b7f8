"""Admission: of the new blocks of a request, store those that are worth more than what must go.

A block that will hardly return would push out one that may. The eviction order prices both, so
the decision is one comparison; an order without prices (LRU) admits everything.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.holds import Victims
from prefixfleet.store.pool import SlotPool

ASKED_BLOCKS = 64
"""Blocks that are next to go of which a node asks the index, ahead of the need, who else holds
them: a copy goes before a last copy (`SlotPool.note_copies`)."""


@dataclass(frozen=True, slots=True)
class Room:
    """``blocks`` leading blocks can be stored once ``victims`` are withdrawn and freed."""

    blocks: int
    victims: Victims


def make_room(pool: SlotPool, missing: Sequence[BlockHash]) -> Room:
    """Victims for ``missing``, neighbouring blocks of a chain that are not in the pool.

    The pool must have observed the request. Free slots are used whatever a block is worth. Pin
    what lies before ``missing`` first, or it may be among the victims. The victims *must* be
    freed, as those of `SlotPool.choose_victims`.
    """
    blocks = min(pool.free_slots, len(missing))
    leaving = Victims((), ())
    for worth, group in itertools.groupby(missing[blocks:], key=pool.worth):
        wanted = len(list(group))
        victims = pool.choose_victims(wanted, below=worth)
        leaving += victims
        blocks += len(victims.slots)
        if len(victims.slots) < wanted:
            break
    return Room(blocks, leaving)
