"""The prefix index in a dict: for tests, the simulator and fleets in one process."""

import asyncio
import heapq
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.errors import Fenced
from prefixfleet.store.index import FIELD_BYTES, IndexEvent, Membership, Snapshot, StreamGap
from prefixfleet.store.records import NodeRecord

Segments: TypeAlias = Mapping[BlockHash, Sequence[BlockHash]]


@dataclass(slots=True)
class _Life:
    member: Membership
    record: NodeRecord
    deadline: float


class MemoryIndex:
    """`PrefixIndex` in this process. Owned by one event loop, shared by everybody on it.

    ``clock`` is in seconds; leases end when somebody asks after their time.
    """

    def __init__(
        self,
        *,
        lease_s: float = 3.0,
        clock: Callable[[], float] = time.monotonic,
        max_events: int = 10_000,
    ) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._lives: dict[int, _Life] = {}  # by slot
        self._holders: dict[bytes, int] = {}
        self._epoch = 0
        self._slots = 0  # ever given out
        self._free: list[int] = []
        self._events: deque[IndexEvent] = deque(maxlen=max_events)
        self._number = 0  # of the last event
        self._news = asyncio.Event()

    async def join(self, record: NodeRecord) -> Membership:
        """See `PrefixIndex`."""
        self._end_lapsed()
        for slot, life in list(self._lives.items()):
            if life.member.node == record.node:
                self._end_life(slot)
        self._epoch += 1
        member = Membership(record.node, self._epoch, self._take_slot())
        self._lives[member.slot] = _Life(member, record, self._clock() + self._lease_s)
        self._add_event("join", member)
        return member

    async def renew(self, member: Membership, record: NodeRecord) -> None:
        """See `PrefixIndex`."""
        life = self._life(member)
        life.record = record
        life.deadline = self._clock() + self._lease_s

    async def leave(self, member: Membership) -> None:
        """See `PrefixIndex`."""
        self._end_lapsed()
        life = self._lives.get(member.slot)
        if life is not None and life.member == member:
            self._end_life(member.slot)

    async def publish(self, member: Membership, segments: Segments) -> None:
        """See `PrefixIndex`."""
        self._life(member)
        bit = 1 << member.slot
        changed = [f for f in _fields(segments) if not self._holders.get(f, 0) & bit]
        for field in changed:
            self._holders[field] = self._holders.get(field, 0) | bit
        if changed:
            self._add_event("publish", member, changed)

    async def withdraw(self, member: Membership, segments: Segments) -> None:
        """See `PrefixIndex`. Raises `Fenced` too."""
        self._life(member)
        bit = 1 << member.slot
        changed = [f for f in _fields(segments) if self._holders.get(f, 0) & bit]
        for field in changed:
            self._clear(field, bit)
        if changed:
            self._add_event("withdraw", member, changed)

    async def match(self, chain: Sequence[BlockHash]) -> dict[str, int]:
        """See `PrefixIndex`."""
        self._end_lapsed()
        found: dict[str, int] = {}
        alive = {slot: life.member.node for slot, life in self._lives.items()}
        for length, block in enumerate(chain):
            holders = self._holders.get(block[:FIELD_BYTES], 0)
            for slot in [slot for slot in alive if not holders >> slot & 1]:
                node = alive.pop(slot)
                if length:
                    found[node] = length
            if not alive:
                break
        return found | {node: len(chain) for node in alive.values() if chain}

    async def copies(self, segments: Segments) -> dict[BlockHash, int]:
        """See `PrefixIndex`."""
        self._end_lapsed()
        return {
            block: self._holders.get(block[:FIELD_BYTES], 0).bit_count()
            for blocks in segments.values()
            for block in blocks
        }

    async def members(self) -> list[tuple[Membership, NodeRecord]]:
        """See `PrefixIndex`."""
        self._end_lapsed()
        return [(life.member, life.record) for life in self._lives.values()]

    async def snapshot(self) -> Snapshot:
        """See `PrefixIndex`."""
        self._end_lapsed()
        members = tuple(life.member for life in self._lives.values())
        return Snapshot(members, dict(self._holders), str(self._number))

    async def follow(self, cursor: str) -> AsyncIterator[IndexEvent]:
        """See `PrefixIndex`."""
        number = int(cursor) if cursor.isdecimal() else -1
        while True:
            while number != self._number:
                oldest = self._number - len(self._events) + 1
                if not oldest <= number + 1 <= self._number:
                    raise StreamGap(f"event {number + 1} is gone, the oldest one is {oldest}")
                number += 1
                yield self._events[number - oldest]
            await self._news.wait()

    async def close(self) -> None:
        """See `PrefixIndex`: nothing to give back."""

    def _life(self, member: Membership) -> _Life:
        self._end_lapsed()
        life = self._lives.get(member.slot)
        if life is None or life.member != member:
            raise Fenced(f"slot {member.slot} is not held by {member}")
        return life

    def _end_lapsed(self) -> None:
        now = self._clock()
        for slot in [slot for slot, life in self._lives.items() if life.deadline <= now]:
            self._end_life(slot)

    def _end_life(self, slot: int) -> None:
        member = self._lives.pop(slot).member
        bit = 1 << slot
        for field in [field for field, holders in self._holders.items() if holders & bit]:
            self._clear(field, bit)
        heapq.heappush(self._free, slot)
        self._add_event("leave", member)

    def _take_slot(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self._slots += 1
        return self._slots - 1

    def _clear(self, field: bytes, bit: int) -> None:
        if left := self._holders[field] & ~bit:
            self._holders[field] = left
        else:
            del self._holders[field]

    def _add_event(self, kind: str, member: Membership, fields: Iterable[bytes] = ()) -> None:
        self._events.append(IndexEvent(kind, member, tuple(fields)))
        self._number += 1
        self._news.set()
        self._news = asyncio.Event()


def _fields(segments: Segments) -> Iterator[bytes]:
    seen: set[bytes] = set()
    for blocks in segments.values():
        for block in blocks:
            field = block[:FIELD_BYTES]
            if len(field) != FIELD_BYTES:
                raise ValueError(f"a block hash is shorter than {FIELD_BYTES} bytes")
            if field not in seen:
                seen.add(field)
                yield field
