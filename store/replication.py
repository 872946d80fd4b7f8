"""Whether a hot prefix is broadcast, to whom, and who takes part. Pure but for the pool's books.

Which prefix is hot says `heat`; how its bytes travel, the transfer.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.holds import NO_SLOT, Reservation
from prefixfleet.store.pool import SlotPool

MIN_RECEIVERS = 2
"""For one node alone a pull is as good."""
BUDGET_S = 30.0
"""A prefix is broadcast for so long at most, in all attempts together."""


class Mode(StrEnum):
    """What to do with a hot prefix: nothing, count what would be done, or do it."""

    OFF = "off"
    OBSERVE = "observe"
    ENFORCE = "enforce"


def lacking(nodes: Iterable[str], source: str, askers: frozenset[str]) -> list[str]:
    """Whom the source of a hot prefix invites, in the order of ``nodes``: not those that asked
    for it, for they have it or pull it now."""
    return [node for node in nodes if node != source and node not in askers]


def enough(receivers: int) -> bool:
    """Whether so many are worth a broadcast."""
    return receivers >= MIN_RECEIVERS


def reserved_for(pool: SlotPool, chain: Sequence[BlockHash]) -> Reservation | None:
    """Slots for the blocks of a chain, from its root, that are not in the pool of a node that was
    invited. None, and no slot is taken, where it takes no part: nothing is missing, something is
    on its way already, or there is no room for all."""
    missing = [block for block in chain if not pool.match([block])]
    reservation = pool.reserve(b"", chain)
    pairs = zip(chain, reservation.slots, strict=True)
    if missing and missing == [block for block, slot in pairs if slot != NO_SLOT]:
        return reservation
    with reservation:  # gives all of it back
        return None
