"""Blocks that engines are writing into slots: who writes which shard, and when a block is whole.

Every rank of a tensor-parallel engine asks for itself and must hear the same, or one would wait
for shards that never come. Must not know sockets, bytes or the index.
"""

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.errors import ProtocolError
from prefixfleet.store.holds import NO_SLOT, Reservation
from prefixfleet.store.pool import SlotPool

MAX_REFUSALS = 4096
"""Refusals kept for ranks that have not asked yet; the oldest are forgotten beyond that."""
LATE_S = 10.0
"""An engine that gives up its connection, as it does when an answer comes too late, may be in the
middle of its copies: so long nobody else is given their slots. Its bytes between another one's copy
and its checksum would make a wrong block that looks right."""
AWAIT_S = 60.0
"""The ranks of an engine ask within moments of each other. One that has not asked by then (its
question was lost with its connection) may never: the block is lost for all, or it would keep its
slot for as long as the engine lives."""


@dataclass(slots=True)
class _Write:
    reservation: Reservation
    slot: int
    since_s: float
    awaited: set[int]  # ranks that have not asked yet
    sessions: dict[int, int] = field(default_factory=dict)  # of the ranks that have
    writing: set[int] = field(default_factory=set)
    failed: bool = False
    late_until_s: float = 0.0  # when nobody whose session ended writes there any more


class Writes:
    """Reserved slots by block. Owned by the daemon's event loop."""

    def __init__(self, pool: SlotPool, shards: int, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._clock = clock
        self._late: deque[tuple[float, int]] = deque()  # when a slot may be given away, which one
        self._ranks = frozenset(range(shards))
        self._writes: dict[BlockHash, _Write] = {}
        self._refused: OrderedDict[BlockHash, set[int]] = OrderedDict()  # ranks still to be told

    def __len__(self) -> int:
        return len(self._writes)

    def undecided(
        self, rank: int, parent: BlockHash, hashes: Sequence[BlockHash]
    ) -> list[BlockHash]:
        """Those of ``hashes``, which follow ``parent``, that `reserve` would give slots: not here,
        and this rank was told nothing of them."""
        if not self._pool.may_follow(parent):
            return []
        return [b for b in hashes if not (self._pool.knows(b) or self._decided(b, rank))]

    def reserve(
        self, session: int, rank: int, parent: BlockHash, hashes: Sequence[BlockHash]
    ) -> list[int]:
        """Slots aligned with ``hashes``; -1 where this rank has nothing to write.

        The first rank that asks decides for all. Raises `ProtocolError` for a rank that the
        engine does not have.
        """
        if rank not in self._ranks:
            raise ProtocolError(f"reserve: rank {rank}, expected below {len(self._ranks)}")
        first = next((i for i, b in enumerate(hashes) if not self._decided(b, rank)), len(hashes))
        if first < len(hashes):
            above = hashes[first - 1] if first else parent
            self._decide(rank, self._pool.reserve(above, hashes[first:]))
        return [self._tell(session, rank, block) for block in hashes]

    def commit(self, session: int, rank: int, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """The shards of ``rank`` are written. Returns the blocks that are resident by that."""
        whole = []
        for block in hashes:
            if (write := self._written_by(session, rank, block)) is None:
                continue
            write.writing.discard(rank)
            if write.failed or write.awaited or write.writing:
                self._end_if_failed(block, write)
                continue
            del self._writes[block]
            if write.reservation.commit(block):
                whole.append(block)
        return whole

    def abandon(self, session: int, rank: int, hashes: Sequence[BlockHash]) -> None:
        """``rank`` will not write these; the blocks are lost for all ranks."""
        for block in reversed(hashes):
            if (write := self._written_by(session, rank, block)) is not None:
                self._fail(block, write, rank)

    def disconnect(self, session: int) -> None:
        """A session ended: every block it took part in and that is not whole is lost. The slots
        that it was writing are in quarantine for `LATE_S`, see `expire`."""
        for block, write in reversed(list(self._writes.items())):
            for rank in [r for r, s in write.sessions.items() if s == session]:
                if rank in write.writing:
                    write.late_until_s = self._clock() + LATE_S
                self._fail(block, write, rank)

    def expire(self) -> None:
        """Give away the slots that nobody writes late any more, and those of blocks that a rank
        did not ask for within `AWAIT_S`."""
        now = self._clock()
        while self._late and self._late[0][0] <= now:
            self._pool.release_quarantine([self._late.popleft()[1]])
        old = itertools.takewhile(lambda w: w[1].since_s + AWAIT_S <= now, self._writes.items())
        for block, write in reversed([(b, w) for b, w in old if w.awaited]):
            write.failed = True
            write.awaited.clear()  # who asks after all begins anew
            self._end_if_failed(block, write)

    def _decided(self, block: BlockHash, rank: int) -> bool:
        write = self._writes.get(block)
        return (write is not None and rank in write.awaited) or rank in self._refused.get(block, ())

    def _decide(self, rank: int, reservation: Reservation) -> None:
        for block, slot in zip(reservation.hashes, reservation.slots, strict=True):
            if self._decided(block, rank):
                reservation.abandon(block)  # the other ranks were told something else
            elif slot != NO_SLOT:
                awaited = set(self._ranks)
                self._writes[block] = _Write(reservation, slot, self._clock(), awaited)
            elif block not in self._writes:
                self._refuse(block, set(self._ranks))

    def _tell(self, session: int, rank: int, block: BlockHash) -> int:
        write = self._writes.get(block)
        if write is not None and rank in write.awaited and not write.failed:
            write.awaited.discard(rank)
            write.sessions[rank] = session
            write.writing.add(rank)
            return write.slot
        if (ranks := self._refused.get(block)) is not None:
            ranks.discard(rank)
            if not ranks:
                del self._refused[block]
        return NO_SLOT

    def _refuse(self, block: BlockHash, ranks: set[int]) -> None:
        if ranks:
            self._refused[block] = ranks
        while len(self._refused) > MAX_REFUSALS:
            self._refused.popitem(last=False)

    def _written_by(self, session: int, rank: int, block: BlockHash) -> _Write | None:
        write = self._writes.get(block)
        if write is None or rank not in write.writing or write.sessions.get(rank) != session:
            return None
        return write

    def _fail(self, block: BlockHash, write: _Write, rank: int) -> None:
        write.failed = True
        write.writing.discard(rank)
        del write.sessions[rank]
        self._end_if_failed(block, write)

    def _end_if_failed(self, block: BlockHash, write: _Write) -> None:
        """Give the slot back once no rank writes into it any more."""
        if write.failed and not write.writing:
            self._writes.pop(block, None)
            self._give_back(block, write)
            self._refuse(block, write.awaited)

    def _give_back(self, block: BlockHash, write: _Write) -> None:
        now = self._clock()
        if write.late_until_s <= now:
            write.reservation.abandon(block)
        elif (slot := write.reservation.quarantine(block)) != NO_SLOT:
            self._late.append((now + LATE_S, slot))
