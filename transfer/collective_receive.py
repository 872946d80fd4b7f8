"""`Receiver`: a node that takes part in somebody's broadcast and keeps what it can prove."""

import logging
import time

from prefixfleet.store.errors import PeerRefused, PullFailed
from prefixfleet.store.holds import NO_SLOT, Reservation
from prefixfleet.store.replication import reserved_for
from prefixfleet.transfer.collective_group import Part
from prefixfleet.transfer.messages import Join, split_hashes
from prefixfleet.transfer.proof import Proof

log = logging.getLogger(__name__)


class Receiver:
    """Owned by a `Replicator`."""

    def __init__(self, part: Part) -> None:
        self._part = part

    def accept(self, join: Join) -> Reservation:
        """Slots for the blocks that are not here; pass it to `receive`, which gives them back.

        Raises:
            PeerRefused: there is nothing to receive, or no room for all of it.
        """
        reservation = reserved_for(self._part.pool, split_hashes(join.hashes))
        if reservation is None:
            raise PeerRefused("the blocks are here, on their way, or there is no room")
        return reservation

    async def receive(self, join: Join, reservation: Reservation) -> None:
        """Take part, then commit the leading blocks that pass their check. Ends in a counter."""
        part, failure = self._part, ""
        deadline = time.monotonic() + min(join.budget_s, part.budget_s)
        me = f"{part.node}/{join.epoch}"
        with reservation:
            try:
                await part.run(join.group, join.store, me, reservation.slots, deadline=deadline)
            except PullFailed as error:
                failure = error.reason
                log.warning("a broadcast that this node joined: %s", error)
            pairs = zip(reservation.hashes, reservation.slots, strict=True)
            wanted = {block: slot for block, slot in pairs if slot != NO_SLOT}
            blocks = await self._commit(reservation, wanted)
        outcome = "received" if blocks == len(wanted) else failure or "spoiled"
        part.counters[outcome] += 1
        part.counters["received_bytes"] += blocks * part.layout.slot_bytes

    async def _commit(self, reservation: Reservation, wanted: dict[bytes, int]) -> int:
        part, blocks = self._part, list(wanted)
        slots = {slot: block for block, slot in wanted.items()}
        good = await Proof(part.segment, part.layout, part.namespace, slots).good(blocks)
        arrived = [block for block in blocks[:good] if reservation.commit(block)]
        part.arrived(arrived)
        return len(arrived)
