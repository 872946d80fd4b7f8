"""`Puller`: the receiving side, and the one read path. It never raises for a pull that failed.

A pull leases a chain at the source, reserves slots in our pool, reads the source's slots into
them in portions, proves every shard, and commits block after block in the order of the chain.
Whatever goes wrong ends in a shorter prefix and a reason; the caller recomputes the rest.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.errors import CorruptBlock, PeerLost, ProtocolError, PullFailed
from prefixfleet.store.pool import NO_SLOT, Reservation, SlotPool
from prefixfleet.store.slot import SlotLayout, verify
from prefixfleet.transfer import wire
from prefixfleet.transfer.choice import choose_link
from prefixfleet.transfer.estimates import Estimates
from prefixfleet.transfer.extents import Portion, portions
from prefixfleet.transfer.in_order import in_order
from prefixfleet.transfer.link import Deadline, Link, Peer, Range
from prefixfleet.transfer.messages import Lease, Leased, Release, decode_answer, join_hashes
from prefixfleet.transfer.peers import PeerCache

log = logging.getLogger(__name__)

PORTION_BYTES = 4 * 1024 * 1024
READ_AHEAD = 3
"""Portions of one pull under way: one is proved while the next ones arrive."""
IN_THREAD_BYTES = 256 * 1024
"""Longer portions are proved in a thread; the event loop is the engines' too."""
RELEASE_S = 2.0
CLOSE_S = 10.0

MISSING = "missing"
"""Failure of a pull whose source no longer had all blocks."""
POOL_FULL = "pool_full"
"""Failure of a pull that got no slot here: the pool is full, or somebody else writes the block."""


@dataclass(frozen=True, slots=True)
class PullResult:
    """What a pull brought. ``blocks`` leading blocks of those asked for are in the pool now.

    ``bytes`` were committed, headers and padding included; ``link`` is "" before one was chosen.
    ``failure`` is "" or says why there are fewer blocks than asked for: the ``reason`` of an
    error of `prefixfleet.store.errors`, `MISSING` or `POOL_FULL`.
    """

    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    link: str = ""
    failure: str = ""


@dataclass(slots=True)
class _Pull:
    """One pull under way. Owned by its task; ``blocks`` and ``bytes`` grow as it commits."""

    namespace: bytes
    epoch: int
    parent: BlockHash
    hashes: tuple[BlockHash, ...]
    deadline: Deadline
    started: float
    link: str = ""
    contact: str = ""
    blocks: int = 0
    bytes: int = 0


class Puller:
    """Pulls into one pool. Owned by the daemon's event loop, as the pool is.

    ``links`` are by name those this node can use, ``forced`` the only one it may use (None:
    chosen by what was learned), ``rdma`` whether its UCX has an RDMA lane.
    """

    def __init__(
        self,
        pool: SlotPool,
        segment: memoryview,
        layout: SlotLayout,
        *,
        links: Mapping[str, Link],
        forced: str | None = None,
        rdma: bool = False,
    ) -> None:
        self.estimates = Estimates()
        self.counters: Counter[str] = Counter()  # pulls by outcome: "ok" or a failure
        self.lanes: dict[str, str] = {}  # by link: what carried the bytes of the latest pull
        self._pool = pool
        self._segment = segment
        self._layout = layout
        self._links = links
        self._forced = forced
        self._rdma = rdma
        self._peers = PeerCache(links)
        self._afterwards: set[asyncio.Task[None]] = set()

    async def pull(
        self,
        contacts: Mapping[str, str],
        *,
        namespace: bytes,
        epoch: int,
        parent: BlockHash,
        hashes: Sequence[BlockHash],
        deadline: Deadline,
        link: str | None = None,
    ) -> PullResult:
        """Bring the leading ones of ``hashes``, a chain that follows ``parent`` (b"" at the
        root), from life ``epoch`` of the peer with these contacts (link name to address).

        Ends by ``deadline``, in `time.monotonic` seconds. ``link`` forces one. Blocks that are
        here already count as brought; make room in the pool before. Never raises, except when
        it is cancelled; the slots it was reading into come back to the pool by themselves.
        """
        pull = _Pull(namespace, epoch, parent, tuple(hashes), deadline, time.monotonic())
        try:
            pull.link = choose_link(
                contacts, self._links, forced=link or self._forced, rdma=self._rdma
            )
            pull.contact = contacts[pull.link]
            async with self._peers.place(pull.contact, deadline):
                failure = await self._pull(pull)
        except PullFailed as error:
            failure = error.reason
            log.info("pull from %s: %s", pull.contact, error)
        self.counters[failure or "ok"] += 1
        seconds = time.monotonic() - pull.started
        return PullResult(pull.blocks, pull.bytes, seconds, pull.link, failure)

    async def close(self) -> None:
        """Close every connection. Pulls in flight must have ended or been cancelled."""
        await self._peers.close()
        if self._afterwards:
            await asyncio.wait(self._afterwards, timeout=CLOSE_S)

    async def _pull(self, pull: _Pull) -> str:
        """Returns the failure, "" for none. Raises `PullFailed`."""
        peer, leased = await self._lease(pull)
        leased_at = time.monotonic()
        self.lanes[pull.link] = peer.lanes
        unsafe: list[int] = []
        spoiled = b""
        try:
            await self._fill(pull, peer, leased.slots, unsafe)
        except CorruptBlock:
            spoiled = pull.hashes[pull.blocks]
            raise
        finally:
            self._later(self._end(pull.contact, peer, Release(leased.lease, spoiled), unsafe))
        self.estimates.observe(
            peer.node,
            pull.link,
            size_bytes=pull.bytes,
            transfer_s=time.monotonic() - leased_at,
            setup_s=leased_at - pull.started,
        )
        if pull.blocks < len(leased.slots):
            return POOL_FULL
        return MISSING if pull.blocks < len(pull.hashes) else ""

    async def _lease(self, pull: _Pull) -> tuple[Peer, Leased]:
        """A connection and a read lease over it. A stale idle connection is replaced once."""
        for fresh in (False, True):
            held = await self._peers.take(pull.link, pull.contact, pull.deadline, fresh=fresh)
            question = Lease(
                namespace=pull.namespace,
                epoch=pull.epoch,
                payload_bytes=self._layout.payload_bytes,
                shards=self._layout.shards,
                hashes=join_hashes(pull.hashes),
                budget_s=max(0.001, pull.deadline - time.monotonic()),
            )
            try:
                body = await held.peer.ask(wire.pack(question), deadline=pull.deadline)
            except PeerLost:
                await held.peer.close()
                if held.fresh:
                    raise
                continue
            except BaseException:
                await held.peer.close()
                raise
            return held.peer, await self._read_lease(pull, held.peer, body)
        raise AssertionError("a fresh connection either answers or raises")

    async def _read_lease(self, pull: _Pull, peer: Peer, body: bytes) -> Leased:
        try:
            leased = decode_answer(body, peer.node)
            if not isinstance(leased, Leased) or len(leased.slots) > len(pull.hashes):
                raise ProtocolError(f"{peer.node}: an answer that does not fit a lease")
        except ProtocolError:
            await peer.close()
            raise
        except PullFailed:
            await self._peers.give_back(pull.contact, peer)
            raise
        return leased

    async def _fill(self, pull: _Pull, peer: Peer, slots: Sequence[int], unsafe: list[int]) -> None:
        """Read, prove and commit. When it raises, ``unsafe`` are slots now in quarantine."""
        wanted = pull.hashes[: len(slots)]
        with (
            self._pool.pin([pull.parent] if pull.parent else []),
            self._pool.reserve(pull.parent, wanted) as reservation,
        ):
            try:
                await self._read(pull, peer, slots, reservation)
            except BaseException:
                put_aside = (reservation.quarantine(block) for block in wanted)
                unsafe.extend(slot for slot in put_aside if slot != NO_SLOT)
                raise

    async def _read(
        self, pull: _Pull, peer: Peer, slots: Sequence[int], reservation: Reservation
    ) -> None:
        reads, whole = self._to_read(reservation)
        blocks = [reservation.hashes[i] for i in reads]
        targets = [reservation.slots[i] for i in reads]
        ends = [*reads[1:], whole]  # blocks that are here once that one is
        pull.blocks = reads[0] if reads else whole

        async def fetch(portion: Portion) -> tuple[Portion, int]:
            await peer.read(
                portion.sources,
                [self._memory(part) for part in portion.targets],
                deadline=pull.deadline,
            )
            mine = slice(portion.first, portion.last)
            return portion, await self._prove(pull.namespace, blocks[mine], targets[mine])

        todo = portions([slots[i] for i in reads], targets, self._layout.slot_bytes, PORTION_BYTES)
        async with contextlib.aclosing(in_order(fetch, todo, READ_AHEAD)) as fetched:
            async for portion, good in fetched:
                for i in range(portion.first, portion.first + good):
                    if not reservation.commit(blocks[i]):
                        raise PullFailed("a block before this one left the pool meanwhile")
                    pull.blocks = ends[i]
                    pull.bytes += self._layout.slot_bytes
                if portion.first + good < portion.last:
                    raise CorruptBlock(f"block {blocks[portion.first + good].hex()} is spoiled")

    def _to_read(self, reservation: Reservation) -> tuple[list[int], int]:
        """Positions of the blocks to read, and how many blocks are here when they are."""
        reads: list[int] = []
        for i, slot in enumerate(reservation.slots):
            if slot != NO_SLOT:
                reads.append(i)
            elif not self._pool.match([reservation.hashes[i]]):
                return reads, i
        return reads, len(reservation.slots)

    async def _prove(
        self, namespace: bytes, blocks: Sequence[BlockHash], slots: Sequence[int]
    ) -> int:
        """Number of leading blocks whose every shard is what it must be."""
        if len(slots) * self._layout.slot_bytes < IN_THREAD_BYTES:
            return self._prove_now(namespace, blocks, slots)
        return await asyncio.to_thread(self._prove_now, namespace, blocks, slots)

    def _prove_now(
        self, namespace: bytes, blocks: Sequence[BlockHash], slots: Sequence[int]
    ) -> int:
        size = self._layout.slot_bytes
        for i, (block, slot) in enumerate(zip(blocks, slots, strict=True)):
            memory = self._segment[slot * size : (slot + 1) * size]
            try:
                for shard in range(self._layout.shards):
                    verify(memory, self._layout, namespace, block, shard)
            except CorruptBlock as error:
                log.warning("a pulled block does not pass its check: %s", error)
                return i
        return len(blocks)

    def _memory(self, part: Range) -> memoryview:
        return self._segment[part.offset : part.offset + part.length]

    async def _end(self, contact: str, peer: Peer, release: Release, unsafe: Sequence[int]) -> None:
        """Release the lease and keep the connection; or drop it, then trust the slots again."""
        if not peer.broken and release.lease:
            with contextlib.suppress(PullFailed):  # the lease ends by itself
                deadline = time.monotonic() + RELEASE_S
                decode_answer(await peer.ask(wire.pack(release), deadline=deadline), peer.node)
        if peer.broken:
            await peer.close()
        else:
            await self._peers.give_back(contact, peer)
        self._pool.release_quarantine(unsafe)

    def _later(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._afterwards.add(task)
        task.add_done_callback(self._afterwards.discard)
