"""Read leases of one source: pins that always end. No I/O; whoever owns it calls `end_expired`."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prefixfleet.store.errors import PeerBusy
from prefixfleet.store.holds import Pin


@dataclass(frozen=True, slots=True)
class _ReadLease:
    caller: int
    pin: Pin
    ends_at: float


class Leases:
    """Who may read which slots until when. Owned by one `BlockServer`.

    At most ``max_leases`` leases and ``max_slots`` slots of them at a time; ``ids`` numbers them,
    those of other sources behind the same listener too.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        max_leases: int,
        max_slots: Callable[[], int],
        ids: Iterator[int],
    ) -> None:
        self._clock = clock
        self._max_leases = max_leases
        self._max_slots = max_slots
        self._ids = ids
        self._leases: dict[int, _ReadLease] = {}
        self._granted: dict[int, Counter[int]] = {}  # caller to slots with their leases' number
        self._pinned: Counter[int] = Counter()  # the same of all callers together
        self._next_end = math.inf
        self.expired = 0

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def slots(self) -> int:
        """Slots that some lease keeps; one under several leases counts once."""
        return len(self._pinned)

    def grant(self, caller: int, pin: Pin, seconds: float) -> int:
        """Keep ``pin`` for the caller, ``seconds`` at most. Returns the lease's number.

        The only lease may be of any size: a long chain must not be refused for ever.

        Raises:
            PeerBusy: it would be too much beside the leases that live; ``pin`` is untouched.
        """
        more = len(set(pin.slots) - self._pinned.keys())
        max_slots = self._max_slots()
        too_many = len(self._leases) >= self._max_leases
        if too_many or (more and self._leases and self.slots + more > max_slots):
            raise PeerBusy(
                f"{len(self._leases)} read leases on {self.slots} slots, and {more} more asked "
                f"for; at most {self._max_leases} on {max_slots}"
            )
        id = next(self._ids)
        ends_at = self._clock() + seconds
        self._leases[id] = _ReadLease(caller, pin, ends_at)
        self._next_end = min(self._next_end, ends_at)
        self._granted.setdefault(caller, Counter()).update(pin.slots)
        self._pinned.update(pin.slots)
        return id

    def covers(self, caller: int, first_slot: int, last_slot: int) -> bool:
        """Whether the caller holds leases on all these slots now."""
        self.end_expired()
        granted = self._granted.get(caller)
        return granted is not None and all(
            slot in granted for slot in range(first_slot, last_slot + 1)
        )

    def holds(self, id: int, caller: int) -> bool:
        """Whether the caller has a lease of that number here."""
        lease = self._leases.get(id)
        return lease is not None and lease.caller == caller

    def end(self, id: int, caller: int) -> bool:
        """End one lease of the caller. False if it has none of that number (any more)."""
        if not self.holds(id, caller):
            return False
        lease = self._leases.pop(id)
        _take_out(self._granted[caller], lease.pin.slots)
        if not self._granted[caller]:
            del self._granted[caller]
        _take_out(self._pinned, lease.pin.slots)
        lease.pin.release()
        return True

    def end_all(self, caller: int | None = None) -> None:
        """End every lease of the caller, or of everybody."""
        for id, lease in list(self._leases.items()):
            if caller in (None, lease.caller):
                self.end(id, lease.caller)

    def end_expired(self) -> None:
        """End the leases whose time is over."""
        now = self._clock()
        if now < self._next_end:
            return
        for id, lease in list(self._leases.items()):
            if lease.ends_at <= now:
                self.expired += 1
                self.end(id, lease.caller)
        self._next_end = min((lease.ends_at for lease in self._leases.values()), default=math.inf)


def _take_out(counts: Counter[int], slots: Sequence[int]) -> None:
    for slot in slots:
        counts[slot] -= 1
        if not counts[slot]:
            counts.pop(slot)
