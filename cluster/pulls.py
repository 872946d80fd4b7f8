"""Pulls of one node: each block travels once, however many requests want it.

Decides whether to pull by the router's plan, and from whom by that and the index; the moving
itself is `prefixfleet.transfer.pull`. Every failure is a shorter prefix and a reason, never an
error.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from prefixfleet.cluster.holders import Holders
from prefixfleet.cluster.peer_book import PeerBook
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.errors import DeadlineExceeded, PullFailed
from prefixfleet.store.records import PullPlan
from prefixfleet.transfer.gather import Others, Source
from prefixfleet.transfer.pull import PullResult

MAX_ROUNDS = 8
"""Pulls of others that one request waits for, before it takes what is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """One pull to make: ``hashes`` follow ``parent`` (empty at the root) on a peer.

    ``others`` finds more sources when it is called, and does not raise.
    """

    source: Source
    others: Others
    link: str  # the only one to use; "" for any
    parent: BlockHash
    hashes: tuple[BlockHash, ...]
    deadline: float


class Pulls:
    """Pulls in flight, by block. Owned by the daemon's event loop.

    ``move`` makes one pull and does not raise; ``match`` counts the leading blocks of a chain
    that are here.
    """

    def __init__(
        self,
        *,
        peers: PeerBook,
        holders: Holders,
        match: Callable[[Sequence[BlockHash]], int],
        move: Callable[[Pull], Awaitable[PullResult]],
        clock: Callable[[], float],
    ) -> None:
        self._peers = peers
        self._holders = holders
        self._match = match
        self._move = move
        self._clock = clock
        self._running: dict[BlockHash, asyncio.Task[PullResult]] = {}

    async def fetch(
        self, chain: Sequence[BlockHash], plan: PullPlan, deadline: float
    ) -> PullResult:
        """Bring the plan's blocks of ``chain`` here by ``deadline``, or as many as come.

        Waits for pulls of other requests that carry the same blocks, and makes at most one of
        its own. It counts the blocks that arrived meanwhile, and the bytes of its own pull only.
        The caller keeps the blocks it already has pinned.
        """
        wanted = chain[: plan.blocks]
        before, started = self._match(wanted), self._clock()
        own: PullResult | None = None
        failure = ""
        for _ in range(MAX_ROUNDS):
            here = self._match(wanted)
            other = self._running.get(wanted[here]) if here < len(wanted) else None
            if here >= len(wanted) or (own is not None and (own.failure or other is None)):
                break
            task = other or self._start(wanted, here, plan, deadline)
            await asyncio.wait({task}, timeout=max(0.0, deadline - self._clock()))
            if not task.done():
                failure = DeadlineExceeded.reason
                break
            failure = task.result().failure
            if other is None:
                own = task.result()
        own = own or PullResult(failure=failure)
        return PullResult(
            blocks=max(0, self._match(wanted) - before),
            bytes=own.bytes,
            seconds=self._clock() - started,
            link=own.link,
            failure=own.failure,
        )

    async def close(self) -> None:
        """Cancel what is in flight."""
        tasks = set(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(
        self, wanted: Sequence[BlockHash], here: int, plan: PullPlan, deadline: float
    ) -> "asyncio.Task[PullResult]":
        hashes = []
        for block in wanted[here:]:  # up to a block that is already on its way
            if block in self._running:
                break
            hashes.append(block)
        task = asyncio.create_task(self._run(wanted, here, tuple(hashes), plan, deadline))
        for block in hashes:
            self._running[block] = task
        task.add_done_callback(lambda _: self._ended(hashes))
        return task

    def _ended(self, hashes: Sequence[BlockHash]) -> None:
        for block in hashes:
            del self._running[block]

    async def _run(
        self,
        wanted: Sequence[BlockHash],
        here: int,
        hashes: tuple[BlockHash, ...],
        plan: PullPlan,
        deadline: float,
    ) -> PullResult:
        chain = wanted[: here + len(hashes)]
        try:
            async with asyncio.timeout(max(0.0, deadline - self._clock())):
                source, others = await self._sources(chain, here, plan)
        except PullFailed as error:
            return PullResult(failure=error.reason)
        except TimeoutError:
            return PullResult(failure=DeadlineExceeded.reason)
        return await self._move(
            Pull(
                source=source,
                others=others,
                link=plan.link,
                parent=wanted[here - 1] if here else b"",
                hashes=hashes,
                deadline=deadline,
            )
        )

    async def _sources(
        self, chain: Sequence[BlockHash], here: int, plan: PullPlan
    ) -> tuple[Source, Others]:
        """The planned source, or where that life is gone the best that the index knows; and a
        way to find more. Raises `PullFailed`."""

        async def find() -> Sequence[Source]:
            planned = (plan.source, plan.source_epoch)
            return await self._holders.of(chain, beyond=here, but=planned)

        try:
            contacts = await self._peers.contacts(plan.source, plan.source_epoch)
        except PullFailed:
            found = await find()
            if not found:
                raise
            return found[0], _others(found[1:])
        return Source(contacts, plan.source_epoch), find


def _others(known: Sequence[Source]) -> Others:
    async def find() -> Sequence[Source]:
        return known

    return find
