"""The prefix index in Redis: segments of blocks as hashes of node bitmaps, leases by Redis's time.

All decisions are in `redis_index.lua`, one atomic call each; this is its caller. What is read
without it is in `redis_reads`. Replies are checked by `redis_replies`: what no sound server sends
is `IndexUnavailable`, never a match.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence

from prefixfleet.store import redis_replies
from prefixfleet.store.chain import SEGMENT_BLOCKS, BlockHash
from prefixfleet.store.errors import ConfigError, Fenced, IndexUnavailable
from prefixfleet.store.index import IndexEvent, Membership, Snapshot, StreamGap
from prefixfleet.store.records import NodeRecord
from prefixfleet.store.redis_functions import Argument, RedisFunctions, Reply
from prefixfleet.store.redis_reads import is_ahead, read_events, read_holders
from prefixfleet.store.redis_replies import Position, Segments, sound

log = logging.getLogger(__name__)

MATCH_BLOCKS = 8 * SEGMENT_BLOCKS
"""Blocks one lookup call covers."""
SWEEP_STEPS = 8
"""Bounded steps of the sweep that follow a renewal."""
SNAPSHOT_LIMIT_S = 60.0


class RedisIndex:
    """`PrefixIndex` in Redis >= 7 or Valkey. Owned by one event loop; connects at the first call.

    ``max_events`` bounds the stream that `follow` reads; who falls behind sees a `StreamGap`.
    Indexes of one fleet with different ``area`` know nothing of each other.
    """

    def __init__(
        self,
        url: str,
        fleet: str,
        *,
        lease_s: float = 3.0,
        timeout_s: float = 1.0,
        max_events: int = 10_000,
        area: str = "",
    ) -> None:
        self._functions = RedisFunctions(
            url, fleet, "bitmaps", "redis_index", area=area, timeout_s=timeout_s
        )
        self._lease_s = lease_s
        self._max_events = max_events
        self._term = 0
        self._joined_at = self._followed_at = 0  # moves of the index by then
        self.corrupt_records = 0

    async def prepare(self) -> None:
        """Check the server. Raises `ConfigError` or `IndexUnavailable`; see `RedisFunctions`."""
        await self._functions.prepare()

    async def join(self, record: NodeRecord) -> Membership:
        """See `PrefixIndex`."""
        reply = await self._functions.call(
            "join", record.node, record.encode(), self._lease_s, self._max_events
        )
        with sound("join"):
            slot, epoch, dirty = map(int, reply)
        self._joined_at = self._functions.moves
        await self._sweep(dirty)
        return Membership(record.node, epoch, slot)

    async def renew(self, member: Membership, record: NodeRecord) -> None:
        """See `PrefixIndex`. Sweeps a little of what ended lives have left."""
        dirty = await self._change("renew", member, record.encode(), self._lease_s)
        await self._sweep(dirty)

    async def leave(self, member: Membership) -> None:
        """See `PrefixIndex`."""
        with contextlib.suppress(Fenced):
            await self._change("leave", member)

    async def publish(self, member: Membership, segments: Segments) -> None:
        """See `PrefixIndex`. In calls of `CALL_BLOCKS`; one that fails leaves the rest undone."""
        for batch in redis_replies.batches(segments):
            await self._change("publish", member, *batch)

    async def withdraw(self, member: Membership, segments: Segments) -> None:
        """See `PrefixIndex`. Raises `Fenced` too."""
        for batch in redis_replies.batches(segments):
            await self._change("withdraw", member, *batch)

    async def match(self, chain: Sequence[BlockHash]) -> dict[str, int]:
        """See `PrefixIndex`."""
        found: dict[bytes, int] = {}
        for start in range(0, len(chain), MATCH_BLOCKS):
            part = chain[start : start + MATCH_BLOCKS]
            reply = await self._functions.ask(
                "match", redis_replies.pack(part), *part[::SEGMENT_BLOCKS]
            )
            with sound("match"):
                lengths = redis_replies.as_lengths(reply, len(part))
            whole_so_far = {i for i, length in found.items() if length == start}
            found |= {i: start + n for i, n in lengths.items() if not start or i in whole_so_far}
            if start + len(part) not in found.values():
                break
        with sound("match"):
            return {
                redis_replies.as_member(0, identity).node: length
                for identity, length in found.items()
            }

    async def copies(self, segments: Segments) -> dict[BlockHash, int]:
        """See `PrefixIndex`."""
        counts: list[int] = []
        for batch in redis_replies.batches(segments):
            reply = await self._functions.ask("copies", *batch)
            with sound("copies"):
                counts += map(int, reply)
        blocks = [block for group in segments.values() for block in group]
        with sound("copies"):
            return dict(zip(blocks, counts, strict=True))

    async def members(self) -> list[tuple[Membership, NodeRecord]]:
        """See `PrefixIndex`. A record that cannot be read is left out, logged and counted."""
        found = []
        for member, record in (await self._state())[1]:
            try:
                found.append((member, NodeRecord.decode(record)))
            except ConfigError as error:
                self._ignore(member.node, error)
        return found

    async def snapshot(self) -> Snapshot:
        """See `PrefixIndex`. Read in pages after the cursor was taken: events that come in
        meanwhile are read again by `follow`, and each of them says the last word on its blocks.
        """
        self._followed_at = self._functions.moves
        try:
            async with asyncio.timeout(SNAPSHOT_LIMIT_S):
                position, found = await self._state()
                members = tuple(member for member, _ in found)
                holders = await read_holders(self._functions, sum(1 << m.slot for m in members))
        except TimeoutError as error:
            raise IndexUnavailable(f"no snapshot within {SNAPSHOT_LIMIT_S} s") from error
        return Snapshot(members, holders, redis_replies.format_position(position))

    async def follow(self, cursor: str) -> AsyncIterator[IndexEvent]:
        """See `PrefixIndex`. Event ids have no holes within a generation, and a server that
        lost its memory begins another one. One that took over from another may have other events
        under the same ids."""
        try:
            position = redis_replies.parse_position(cursor.encode())
        except ValueError as error:
            raise StreamGap(f"cursor {cursor!r} is none of ours") from error
        was_ahead = False
        while True:
            entries = await read_events(self._functions, position)
            if self._functions.moves != self._followed_at:
                raise StreamGap("the index moved to another server")
            for entry_id, event in entries:
                position = redis_replies.advance(position, entry_id)
                yield event
            ahead = not entries and await is_ahead(self._functions, position)
            if ahead and was_ahead:
                raise StreamGap(f"events after {position} are gone")
            was_ahead = ahead

    async def close(self) -> None:
        """See `PrefixIndex`."""
        await self._functions.close()

    async def _change(self, function: str, member: Membership, *args: Argument) -> Reply:
        """A call without an answer may still be under way: the next one begins a new term, behind
        which the server does not do it any more. A server that took over may lack what the last
        one knew: a life does not go on there."""
        if self._functions.moves != self._joined_at:
            raise Fenced(f"the index moved to another server since {member.node} joined")
        who = (member.slot, f"{member.epoch} {member.node}", self._max_events, self._term)
        try:
            return await self._functions.call(function, *who, *args)
        except BaseException as error:
            if not isinstance(error, Fenced):
                self._term += 1
            raise

    async def _sweep(self, dirty: object) -> None:
        """Clear the bits of ended lives, a bounded number of steps."""
        for _ in range(SWEEP_STEPS):
            if not dirty:
                return
            dirty = await self._functions.call("sweep")

    async def _state(self) -> tuple[Position, list[tuple[Membership, bytes]]]:
        """Where the stream is, and every live member that can be read, with its record."""
        reply = await self._functions.ask("members")
        with sound("members"):
            if not isinstance(reply, list):
                raise TypeError(f"got {reply!r:.80}, expected a list")
            position = (int(reply[0]), int(reply[1]))
            entries = list(zip(reply[2::3], reply[3::3], reply[4::3], strict=True))
        found = []
        for slot, identity, record in entries:
            try:
                found.append(
                    (redis_replies.as_member(slot, identity), redis_replies.as_bytes(record))
                )
            except redis_replies.UNSOUND as error:
                self._ignore(identity, error)
        return position, found

    def _ignore(self, who: object, why: Exception) -> None:
        self.corrupt_records += 1
        log.warning("record of node %r in the index ignored: %s", who, why)
