"""Prefixes kept in place for requests: pinned from the engine's question until it is done.

A hint of the router may start one before the engine asks; the engine's own question then joins
it. Must not know sockets, links or how pulls are made.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.errors import DeadlineExceeded, Overloaded
from prefixfleet.store.hit_times import HitTimes
from prefixfleet.store.holds import Pin
from prefixfleet.store.pool import SlotPool
from prefixfleet.store.records import PullPlan
from prefixfleet.transfer.pull import PullResult

EARLY_HOLD_S = 30.0
"""A prefetched prefix that no engine asked for is let go so long after its pull's deadline."""
MAX_EARLY = 1024
"""Hints that may wait for their engine; one more is refused."""

Bring = Callable[[Sequence[BlockHash], float], Awaitable[None]]
Fetch = Callable[[Sequence[BlockHash], PullPlan, float], Awaitable[PullResult]]


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is pinned for a request: the slots of the leading blocks of its chain, in order."""

    slots: tuple[int, ...]
    pulled: PullResult

    def fields(self) -> dict[str, Any]:
        """Fields of the answer to ``prepare``."""
        pulled = min(self.pulled.blocks, len(self.slots))
        return {
            "blocks": len(self.slots),
            "slots": list(self.slots),
            "local": len(self.slots) - pulled,
            "pulled": pulled,
            "pulled_bytes": self.pulled.bytes,
            "pull_s": self.pulled.seconds,
            "link": self.pulled.link,
            "failure": self.pulled.failure,
        }


@dataclass(frozen=True, slots=True)
class _Claim:
    pin: Pin
    pulled: PullResult
    hint: str  # request of the plan, "" without one


class Claims:
    """Pins by (session, request), and prefetches that wait for theirs.

    Owned by the daemon's event loop. ``bring`` has what this node keeps elsewhere of a chain in
    the pool by a deadline, ``fetch`` brings blocks of a plan here; neither fails. ``hit_times`` is
    told how long blocks of this node took.
    """

    def __init__(
        self,
        pool: SlotPool,
        bring: Bring,
        fetch: Fetch,
        hit_times: HitTimes,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._bring = bring
        self._fetch = fetch
        self._hit_times = hit_times
        self._clock = clock
        self._held: dict[tuple[int, str], _Claim] = {}
        self._early: dict[str, asyncio.Task[_Claim]] = {}
        self.joined_hints = 0
        self.expired_hints = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def waiting_hints(self) -> int:
        """Prefetches that no engine has asked for yet."""
        return len(self._early)

    async def claim(
        self,
        owner: tuple[int, str],
        chain: Sequence[BlockHash],
        plan: PullPlan | None,
        deadline: float,
    ) -> Prepared:
        """Pin what is here of ``chain``, with what the plan brings by ``deadline``."""
        self.release(owner)
        early = self._early.pop(plan.request, None) if plan else None
        if early is None:
            claim = await self._take(chain, plan, deadline)
        else:
            claim = await self._join(early, chain, deadline)
        self._held[owner] = claim
        return Prepared(slots=tuple(claim.pin.slots), pulled=claim.pulled)

    def release(self, owner: tuple[int, str]) -> None:
        """Unpin what (session, request) holds, if anything."""
        if (claim := self._held.pop(owner, None)) is not None:
            claim.pin.release()

    def disconnect(self, session: int) -> None:
        """Unpin everything of a session."""
        for owner in [o for o in self._held if o[0] == session]:
            self.release(owner)

    def start_early(self, chain: Sequence[BlockHash], plan: PullPlan) -> None:
        """Begin what the engine will soon ask for. Raises `Overloaded`.

        A hint that comes twice, or after its engine, does nothing.
        """
        if plan.request in self._early or any(c.hint == plan.request for c in self._held.values()):
            return
        if len(self._early) >= MAX_EARLY:
            raise Overloaded(f"{MAX_EARLY} prefetches wait for their engine", retry_after_s=1.0)
        deadline = self._clock() + plan.budget_s
        task = asyncio.create_task(self._take(chain, plan, deadline))
        self._early[plan.request] = task
        asyncio.get_running_loop().call_later(
            plan.budget_s + EARLY_HOLD_S, self._expire, plan.request, task
        )

    async def close(self) -> None:
        """Let everything go."""
        early = list(self._early.items())
        for request, task in early:
            self._expire(request, task)
        await asyncio.gather(*(task for _, task in early), return_exceptions=True)
        for owner in list(self._held):
            self.release(owner)

    async def _take(
        self, chain: Sequence[BlockHash], plan: PullPlan | None, deadline: float
    ) -> _Claim:
        pulled = PullResult()
        with self._pool.pin(chain):
            began_s = self._clock()
            await self._bring(chain, deadline)
            now = self._clock()
            with self._pool.pin(chain, used=False) as here:
                # where not one came in time, one takes longer still
                too_late = int(began_s < deadline <= now)
                self._hit_times.read(len(here.hashes) or too_late, now - began_s)
                if plan and plan.source and len(here.hashes) < min(plan.blocks, len(chain)):
                    pulled = await self._fetch(chain, plan, deadline)
                pin = self._pool.pin(chain, used=False)
        return _Claim(pin, pulled, plan.request if plan else "")

    async def _join(
        self, early: "asyncio.Task[_Claim]", chain: Sequence[BlockHash], deadline: float
    ) -> _Claim:
        """The prefetch's result, its pin replaced by one of the whole chain."""
        self.joined_hints += 1
        try:
            await asyncio.wait({early}, timeout=max(0.0, deadline - self._clock()))
            if not early.done():
                return _Claim(
                    self._pool.pin(chain), PullResult(failure=DeadlineExceeded.reason), ""
                )
            done = early.result()
            return _Claim(self._pool.pin(chain), done.pulled, done.hint)
        finally:
            _let_go(early)

    def _expire(self, request: str, task: "asyncio.Task[_Claim]") -> None:
        if self._early.get(request) is task:
            del self._early[request]
            self.expired_hints += 1
            _let_go(task)


def _let_go(task: "asyncio.Task[_Claim]") -> None:
    """Give back the pin of a claim in the making, now or when it is made."""
    task.add_done_callback(lambda t: None if t.cancelled() else t.result().pin.release())
    task.cancel()
