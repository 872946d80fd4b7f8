"""`BlockServer`: the sending side of pulls. The owner of a block decides; the index only hinted.

A puller asks for a read lease on a chain of hashes, reads the slots it is told, and releases the
lease. What it reads are whole slots, headers included, so that it can prove each byte.
"""

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Protocol

from msgspec import structs

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.errors import (
    CorruptBlock,
    EpochChanged,
    LayoutMismatch,
    LeaseExpired,
    PeerBusy,
    PeerRefused,
    ProtocolError,
    PullFailed,
)
from prefixfleet.store.holds import Pin
from prefixfleet.store.pool import SlotPool
from prefixfleet.store.slot import SlotLayout, verify
from prefixfleet.transfer import wire
from prefixfleet.transfer.leases import Leases
from prefixfleet.transfer.link import Caller, Range
from prefixfleet.transfer.messages import (
    Answer,
    Join,
    Joined,
    Lease,
    Leased,
    Question,
    Release,
    Released,
    refusal,
    split_hashes,
)

log = logging.getLogger(__name__)

GRACE_S = 0.5
"""A lease outlasts the asker's budget by so much: its release may still be on the way."""
MAX_LEASE_S = 60.0
MAX_LEASES = 256
BRING_SHARE = 0.5
"""Part of the asker's budget that may go by before it is answered."""


class Replication(Protocol):
    """What a server tells of its leases, and asks when it is invited to a broadcast."""

    def leased(self, node: str, chain: Sequence[BlockHash]) -> None:
        """``node`` was granted a lease on ``chain``, which starts at the root."""
        ...

    def join(self, node: str, asked: Join) -> None:
        """Take part in a broadcast of ``node``. Raises `PullFailed` to refuse."""
        ...


class BlockServer:
    """Serves the blocks of one pool; a `Service` for the listeners of every link at once.

    Owned by the daemon's event loop, as the pool is. ``epoch`` may be set when the node has
    joined anew; leases go on, their bytes did not change. ``max_leased_slots`` bounds what pulls
    keep from being evicted (default: half of the pool). ``on_corrupt`` is called with a block
    whose bytes are spoiled in this node's own pool: drop and withdraw it. ``bring`` is given
    the hashes that a peer asks for and the seconds it waits at most, and has in the pool what
    this node keeps elsewhere. ``ids`` numbers the leases; see `Leases`.
    """

    def __init__(
        self,
        pool: SlotPool,
        segment: memoryview,
        layout: SlotLayout,
        *,
        namespace: bytes,
        node: str,
        epoch: int,
        clock: Callable[[], float],
        on_corrupt: Callable[[BlockHash], None] = lambda block: None,
        bring: Callable[[Sequence[BlockHash], float], Awaitable[None]] | None = None,
        max_leases: int = MAX_LEASES,
        max_leased_slots: int | None = None,
        ids: Iterator[int] | None = None,
    ) -> None:
        self.epoch = epoch
        self.namespace = namespace
        self.counters: Counter[str] = Counter()  # questions by outcome: "leased" or a reason
        self.leased_blocks = 0  # in all, since the start
        self._pool = pool
        self._segment = segment
        self._layout = layout
        self._node = node
        self._on_corrupt = on_corrupt
        self._bring = bring
        self._max_leased_slots = max_leased_slots
        self._clock = clock
        ids = ids or itertools.count(1)
        self._leases = Leases(clock, max_leases=max_leases, max_slots=self._most, ids=ids)
        self.replication: Replication | None = None  # set by who replicates this pool

    @property
    def leases(self) -> Leases:
        """The live leases, for status and tests."""
        return self._leases

    async def answer(self, caller: Caller, question: bytes) -> bytes:
        """See `Service`. Raises `ProtocolError` on a question that no correct peer asks."""
        return await self.reply(caller, wire.unpack(question, Question))

    async def reply(self, caller: Caller, asked: Question) -> bytes:
        """The answer to a question that is unpacked already. Raises `ProtocolError`."""
        self._leases.end_expired()
        reply: Answer
        try:
            if isinstance(asked, Lease):
                self._check_same(asked)
                hashes = split_hashes(asked.hashes)
                began_s = self._clock()
                if self._bring is not None:
                    await self._bring(hashes, BRING_SHARE * asked.budget_s)
                read_s = self._clock() - began_s
                reply = structs.replace(self._lease(caller, asked, hashes), read_s=read_s)
            elif isinstance(asked, Join):
                reply = self._join(caller, asked)
            else:
                reply = self._release(caller, asked)
        except ProtocolError:
            raise
        except PullFailed as error:
            log.info("refused %s: %s", caller.node, error)
            self.counters[error.reason] += 1
            reply = refusal(error)
        return wire.pack(reply)

    def grants(self, caller: Caller, part: Range) -> bool:
        """See `Service`: whether live leases of the caller cover every slot of the range."""
        slot_bytes = self._layout.slot_bytes
        last = max(part.offset, part.offset + part.length - 1)
        return self._leases.covers(caller.id, part.offset // slot_bytes, last // slot_bytes)

    def disconnected(self, caller: Caller) -> None:
        """See `Service`: the caller's leases end."""
        self._leases.end_all(caller.id)

    def close(self) -> None:
        """End every lease."""
        self._leases.end_all()

    def concerns(self, caller: Caller, asked: Release) -> bool:
        """Whether what is released, or said to be spoiled, is of this pool."""
        return self._leases.holds(asked.lease, caller.id) or self._pool.knows(asked.spoiled)

    def _most(self) -> int:
        """Slots that leases may keep; half of a pool follows its size."""
        return self._max_leased_slots or max(1, self._pool.capacity // 2)

    def _lease(self, caller: Caller, asked: Lease, hashes: Sequence[BlockHash]) -> Leased:
        queued_bytes = self._leases.slots * self._layout.slot_bytes
        pin = self._pool.pin(hashes)
        if not pin.hashes:
            self.counters["nothing"] += 1
            return Leased(0, [], 0.0, queued_bytes)
        if len(pin.slots) * self._layout.slot_bytes <= asked.along_bytes:
            return self._send_along(caller, pin, queued_bytes)
        seconds = min(asked.budget_s, MAX_LEASE_S) + GRACE_S
        try:
            id = self._leases.grant(caller.id, pin, seconds)
        except PeerBusy:
            pin.release()
            raise
        self.counters["leased"] += 1
        asyncio.get_running_loop().call_later(seconds, self._leases.end_expired)
        self._note(caller, pin)
        return Leased(id, list(pin.slots), seconds, queued_bytes)

    def _send_along(self, caller: Caller, pin: Pin, queued_bytes: int) -> Leased:
        """A few small blocks: a lease, a read and a release would cost more than their bytes."""
        with pin:
            size = self._layout.slot_bytes
            along = b"".join(self._segment[slot * size : (slot + 1) * size] for slot in pin.slots)
            self.counters["sent_along"] += 1
            self._note(caller, pin)
            return Leased(0, list(pin.slots), 0.0, queued_bytes, along)

    def _note(self, caller: Caller, pin: Pin) -> None:
        self.leased_blocks += len(pin.hashes)
        if self.replication is not None and not self._pool.position(pin.slots[0]):
            self.replication.leased(caller.node, pin.hashes)

    def _join(self, caller: Caller, asked: Join) -> Joined:
        self._check_same(asked)
        if self.replication is None:
            raise PeerRefused("this node takes part in no collective replication")
        self.replication.join(caller.node, asked)
        return Joined()

    def _check_same(self, asked: Lease | Join) -> None:
        if asked.epoch != self.epoch:
            raise EpochChanged(f"asked for epoch {asked.epoch}; this node lives in {self.epoch}")
        if asked.namespace != self.namespace:
            raise PeerRefused(
                f"namespace {asked.namespace.hex()}; this pool holds {self.namespace.hex()}: "
                "models, layouts or engines of the two nodes differ"
            )
        layout = SlotLayout(payload_bytes=asked.payload_bytes, shards=asked.shards)
        if layout != self._layout:
            raise LayoutMismatch(f"slots of {layout}; this pool has {self._layout}")

    def _release(self, caller: Caller, asked: Release) -> Released:
        if asked.spoiled:
            self._look_at(asked.spoiled)
        if asked.lease and not self._leases.end(asked.lease, caller.id):
            raise LeaseExpired(f"read lease {asked.lease} has ended before its release")
        return Released()

    def _look_at(self, block: BlockHash) -> None:
        """A puller says that the block is spoiled; believe our own eyes only."""
        with self._pool.pin([block]) as pin:
            for slot in pin.slots:
                start = slot * self._layout.slot_bytes
                memory = self._segment[start : start + self._layout.slot_bytes]
                try:
                    for shard in range(self._layout.shards):
                        verify(memory, self._layout, self.namespace, block, shard)
                except CorruptBlock as error:
                    log.error("this node's own pool is spoiled: %s", error)
                    self.counters["corrupt"] += 1
                    self._on_corrupt(block)
