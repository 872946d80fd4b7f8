"""`Replicator`: a hot prefix goes to all nodes that lack it in one broadcast, not in as many pulls.

The source of a prefix that many nodes ask for invites the others; those that accept, and the
source, are the group of this one broadcast. Nobody waits for anybody beyond its budget: whoever
fails keeps the leading blocks that it can prove, and pulls the rest when a request wants it.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.errors import PeerBusy, PeerRefused, PullFailed
from prefixfleet.store.heat import Heat
from prefixfleet.store.holds import Reservation
from prefixfleet.store.replication import Mode, enough, lacking
from prefixfleet.transfer.collective_group import Member, Part
from prefixfleet.transfer.collective_receive import Receiver
from prefixfleet.transfer.collective_send import Sender
from prefixfleet.transfer.link import Link
from prefixfleet.transfer.messages import Join

log = logging.getLogger(__name__)


class Replicator:
    """One node's part in broadcasts, one at a time; fulfils `serve.Replication`.

    Owned by the daemon's event loop. ``members`` gives the live nodes. ``part.counters`` counts
    as a source "observed", "broadcasts", "broken", "too_few" and "busy", as a receiver "received",
    "refused", "spoiled" or the reason of what ended it, and the bytes of each; "by_gloo" and
    "by_nccl" the broadcasts that went to their end.
    """

    def __init__(
        self,
        part: Part,
        *,
        mode: Mode,
        link: Link,
        members: Callable[[], Sequence[Member]],
        clock: Callable[[], float],
        heat: Heat | None = None,
    ) -> None:
        self.mode = mode
        self.part = part
        self._heat = Heat() if heat is None else heat  # an empty one is false
        self._members = members
        self._clock = clock
        self._sender = Sender(part, link)
        self._receiver = Receiver(part)
        self._down = ""
        self.taking_part = False  # as a source or a receiver, from the invitation to the end
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def degraded(self) -> str:
        """Why this node takes no part although it should, or not over NCCL; "" if it does."""
        fault = self.part.worker.fault
        return self._down or (fault and f"collective replication: Gloo instead of NCCL: {fault}")

    def open(self) -> None:
        """Start the process that takes part, if this node may, in the background. Until it is
        up, the node refuses."""
        if self.mode is Mode.ENFORCE:
            self._start(self._revive())

    async def close(self) -> None:
        """End what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.part.worker.kill()

    def leased(self, node: str, chain: Sequence[BlockHash]) -> None:
        """See `Replication`: perhaps that makes the chain hot."""
        if self.mode is Mode.OFF:
            return
        askers = self._heat.asked(node, chain, self._clock())
        if askers and self.mode is Mode.ENFORCE:
            self.replicate(chain, askers)
        elif askers and enough(receivers := len(self._lacking(askers))):
            size_bytes = len(chain) * self.part.layout.slot_bytes
            self.part.counters["observed"] += 1
            self.part.counters["observed_bytes"] += receivers * size_bytes

    def replicate(self, chain: Sequence[BlockHash], askers: frozenset[str] = frozenset()) -> None:
        """Send a chain of this pool, from its root, to all but the askers, in the background."""
        if self.taking_part or not self.part.worker.ready:
            self.part.counters["busy"] += 1
            return
        invited = partial(self._lacking, askers)
        self._take_part(self._sender.replicate(tuple(chain), invited, revive=self._revive))

    def join(self, node: str, asked: Join) -> None:
        """See `Replication`: reserve what is not here, and wait for it in the background."""
        try:
            reservation = self._accept(asked)
        except PullFailed:
            self.part.counters["refused"] += 1
            raise
        self._take_part(self._receiver.receive(asked, reservation))

    def _accept(self, asked: Join) -> Reservation:
        if self.mode is not Mode.ENFORCE:
            raise PeerRefused("this node takes part in no collective replication")
        if self.taking_part or not self.part.worker.ready:
            raise PeerBusy("this node takes part in another broadcast, or cannot yet")
        return self._receiver.accept(asked)

    def _lacking(self, askers: frozenset[str]) -> list[Member]:
        members = {member.node: member for member in self._members()}
        return [members[node] for node in lacking(members, self.part.node, askers)]

    def _take_part(self, work: Coroutine[Any, Any, None]) -> None:
        self.taking_part = True
        self._start(self._to_its_end(work))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _to_its_end(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
            await self._revive()
        finally:
            self.taking_part = False

    async def _revive(self) -> None:
        """A process that was killed is replaced."""
        if self.part.worker.ready:
            return
        try:
            await self.part.worker.start()
        except PullFailed as error:
            self._down = f"collective replication: its process does not start: {error}"
            log.error("%s", self._down)
        else:
            self._down = ""
            if self.part.worker.fault:
                log.warning("%s", self.degraded)
