"""`Reader`: reading from one source, over one connection, under one lease, to a clean end.

What is read from whom is decided by the pull's `Assembly`, how much at once by `Flow`.
"""

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.errors import (
    CorruptBlock,
    PeerLost,
    ProtocolError,
    PullFailed,
)
from prefixfleet.store.pool import SlotPool
from prefixfleet.store.slot import SlotLayout
from prefixfleet.transfer import wire
from prefixfleet.transfer.assembly import Assembly, Work
from prefixfleet.transfer.deadline import until
from prefixfleet.transfer.extents import extents
from prefixfleet.transfer.flow import Flow
from prefixfleet.transfer.link import Peer
from prefixfleet.transfer.messages import Lease, Leased, Release, decode_answer, join_hashes
from prefixfleet.transfer.peers import PeerCache
from prefixfleet.transfer.proof import Proof
from prefixfleet.transfer.reading import Read

ALONG_BYTES = 256 * 1024
"""A pull of at most so much is asked for with the lease: one round trip and no more. Its few bytes
are copied some more times, and take the channel whatever the link is."""
LANES = 2
"""Portions from one source under way: the next one is asked for before one is here."""
RELEASE_S = 2.0

Later = Callable[[Coroutine[None, None, None]], object]


class Reader:
    """Owned by a `Puller`. ``later`` runs what may outlast the pull."""

    def __init__(
        self,
        pool: SlotPool,
        segment: memoryview,
        layout: SlotLayout,
        *,
        peers: PeerCache,
        flow: Flow,
        later: Later,
    ) -> None:
        self._pool = pool
        self._segment = segment
        self._layout = layout
        self._peers = peers
        self._flow = flow
        self._later = later

    async def run(self, read: Read, assembly: Assembly) -> None:
        """Read what ``assembly`` still wants and this source has.

        When it ends, by itself, by an error or cancelled, nothing writes into a slot that the
        assembly could commit or give to another source.

        Raises:
            PullFailed: what ended it before all was read; work that it had taken is given back.
        """
        short = self._flow.is_short(len(read.hashes) * self._layout.slot_bytes)
        async with self._peers.place(read.contact, read.deadline, short=short):
            peer, leased = await self._lease(read)
            read.leased = time.monotonic()
            read.node, read.lanes = peer.node, peer.lanes
            read.queued_bytes, read.read_s = leased.queued_bytes, leased.read_s
            try:
                if leased.along:
                    await self._unpack_all(read, leased, assembly)
                else:
                    await self._read_all(read, peer, leased.slots, assembly)
                if read.spoiled:
                    raise CorruptBlock(f"{read.node}: block {read.spoiled.hex()} is spoiled")
            finally:
                read.ended = read.leased if leased.along else time.monotonic()
                if peer.broken:
                    await self._drop(read, peer, assembly)
                else:
                    for work in read.failed:  # its turn did not come
                        assembly.give_back(work)
                    if leased.lease or read.spoiled:
                        self._later(self._release(read, peer, leased.lease))
                    else:
                        self._peers.give_back(read.link, read.contact, peer)

    async def _lease(self, read: Read) -> tuple[Peer, Leased]:
        """A connection and a lease over it. A stale idle connection is replaced once."""
        for fresh in (False, True):
            now = time.monotonic()
            half = now + (read.deadline - now) / 2  # the rest is for another link or source
            held = await self._peers.take(read.link, read.contact, half, fresh=fresh)
            question = Lease(
                namespace=read.namespace,
                epoch=read.epoch,
                payload_bytes=self._layout.payload_bytes,
                shards=self._layout.shards,
                hashes=join_hashes(read.hashes),
                budget_s=max(0.001, read.deadline - time.monotonic()),
                along_bytes=0 if read.background else ALONG_BYTES,  # a probe measures the link
            )
            try:
                body = await held.peer.ask(wire.pack(question), deadline=read.deadline)
            except PeerLost:
                self._peers.drop(read.link, held.peer)
                if held.fresh:
                    raise
                continue
            except BaseException:
                self._peers.drop(read.link, held.peer)
                raise
            return held.peer, await self._check_lease(read, held.peer, body)
        raise AssertionError("a fresh connection either answers or raises")

    async def _check_lease(self, read: Read, peer: Peer, body: bytes) -> Leased:
        try:
            leased = decode_answer(body, peer.node)
            if not isinstance(leased, Leased) or len(leased.slots) > len(read.hashes):
                raise ProtocolError(f"{peer.node}: an answer that does not fit a lease")
            whole = len(leased.slots) * self._layout.slot_bytes
            if leased.along and (read.background or len(leased.along) != whole):
                raise ProtocolError(f"{peer.node}: slots that came along unasked, or not whole")
        except ProtocolError:
            self._peers.drop(read.link, peer)
            raise
        except PullFailed:  # a refusal: the connection itself is fine
            self._peers.give_back(read.link, read.contact, peer)
            raise
        return leased

    async def _read_all(
        self, read: Read, peer: Peer, slots: Sequence[int], assembly: Assembly
    ) -> None:
        async def fetch(work: Work) -> int:
            return await self._fetch(read, peer, [slots[i] for i in work], work, assembly)

        once = functools.partial(self._lane, read, len(slots), assembly, fetch)
        lanes = [asyncio.create_task(once()) for _ in range(LANES)]
        try:
            await asyncio.wait(lanes)
        except asyncio.CancelledError:
            for lane in lanes:
                lane.cancel()
            await asyncio.gather(*lanes, return_exceptions=True)
            raise
        errors = [error for lane in lanes if (error := lane.exception())]
        if errors:
            raise errors[0]

    async def _unpack_all(self, read: Read, leased: Leased, assembly: Assembly) -> None:
        size, along = self._layout.slot_bytes, memoryview(leased.along)

        async def fetch(work: Work) -> int:
            blocks, slots = assembly.hashes(work), assembly.slots(work)
            for i, slot in zip(work, slots, strict=True):
                self._segment[slot * size : (slot + 1) * size] = along[i * size : (i + 1) * size]
            return await self._prove(read, dict(zip(slots, blocks, strict=True))).good(blocks)

        await self._lane(read, len(leased.slots), assembly, fetch)

    async def _lane(
        self, read: Read, have: int, assembly: Assembly, fetch: Callable[[Work], Awaitable[int]]
    ) -> None:
        """One portion after the other, until there is none or something fails. ``fetch`` brings
        one and says how many of its leading blocks are good; the source has ``have`` of all."""
        while not read.stopped and (work := assembly.take(have)):
            try:
                good = await fetch(work)
            except BaseException:
                read.failed.append(work)
                raise
            read.blocks += good
            assembly.landed(work[:good])
            if good < len(work):
                read.spoiled = read.hashes[work[good]]
                assembly.give_back(work[good:])

    async def _fetch(
        self, read: Read, peer: Peer, sources: Sequence[int], work: Work, assembly: Assembly
    ) -> int:
        """Read one portion and prove it. Returns how many of its leading blocks are good."""
        size_bytes = len(work) * self._layout.slot_bytes
        targets = assembly.slots(work)
        ranges, ours = extents(sources, targets, self._layout.slot_bytes)
        views = [self._segment[part.offset : part.offset + part.length] for part in ours]
        blocks = assembly.hashes(work)
        filled = sorted(zip(sources, targets, blocks, strict=True))  # as `extents` orders them
        proof = self._prove(read, {target: block for _, target, block in filled})
        rank = (read.background, assembly.committed)
        async with until(read.deadline, f"turn to read from {read.node}"):
            turn = await self._flow.enter(read.node, size_bytes, rank)
        try:
            await peer.read(ranges, views, deadline=read.deadline, arrived=proof.arrived)
        finally:
            turn.leave()
        return await proof.good(blocks)

    def _prove(self, read: Read, blocks: Mapping[int, BlockHash]) -> Proof:
        return Proof(self._segment, self._layout, read.namespace, blocks)

    async def _drop(self, read: Read, peer: Peer, assembly: Assembly) -> None:
        """Close the connection, then let others read what it did not bring.

        Where that takes too long, the slots go to quarantine until it is closed.
        """
        closing = self._peers.drop(read.link, peer)
        try:
            async with until(read.deadline, f"close the connection to {read.node}"):
                await asyncio.shield(closing)
        except (PullFailed, OSError, asyncio.CancelledError) as error:
            slots = [slot for work in read.failed for slot in assembly.quarantine(work)]
            self._later(self._release_quarantine(closing, slots))
            if isinstance(error, asyncio.CancelledError):
                raise
        else:
            for work in read.failed:
                assembly.give_back(work)

    async def _release_quarantine(
        self, closing: "asyncio.Future[None]", slots: Sequence[int]
    ) -> None:
        """Not before the connection is known to be gone, and never where that fails."""
        await asyncio.wait({closing})
        if not closing.cancelled() and closing.exception() is None:
            self._pool.release_quarantine(slots)

    async def _release(self, read: Read, peer: Peer, lease: int) -> None:
        """End the lease, tell what was spoiled, and keep the connection. Without an answer, the
        lease ends by itself."""
        if lease or read.spoiled:
            with contextlib.suppress(PullFailed):
                question = wire.pack(Release(lease, read.spoiled))
                answer = await peer.ask(question, deadline=time.monotonic() + RELEASE_S)
                decode_answer(answer, peer.node)
        if peer.broken:
            self._peers.drop(read.link, peer)
        else:
            self._peers.give_back(read.link, read.contact, peer)
