"""`Sender`: the source of broadcasts: invite who lacks a chain, and send it to who accepts."""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.errors import PeerBusy, PullFailed
from prefixfleet.store.replication import enough
from prefixfleet.transfer import wire
from prefixfleet.transfer.collective_group import INVITE_S, Member, Part
from prefixfleet.transfer.link import Deadline, Link
from prefixfleet.transfer.messages import Join, decode_answer, join_hashes

log = logging.getLogger(__name__)

ATTEMPTS = 2
"""Groups made for one hot chain; the second without whoever broke the first."""
RETRY_S = 0.2

Members = Callable[[], Sequence[Member]]
"""Nodes that live now and are not known to have the chain."""


class Sender:
    """Owned by a `Replicator`. Invitations go over ``link``."""

    def __init__(self, part: Part, link: Link) -> None:
        self._part = part
        self._link = link

    async def replicate(
        self,
        chain: Sequence[BlockHash],
        lacking: Members,
        *,
        revive: Callable[[], Awaitable[None]],
    ) -> None:
        """Send a chain of our pool, from its root, to the nodes that lack it.

        A group that broke is made anew once, of those that are left then, within the budget;
        ``revive`` replaces a worker that was killed. Ends in a counter, never in an error.
        """
        part = self._part
        deadline = time.monotonic() + part.budget_s
        with part.pool.pin(chain) as pin:
            for _ in range(ATTEMPTS if len(pin.hashes) == len(chain) else 0):
                try:
                    ranks = await self._broadcast(chain, pin.slots, lacking(), deadline)
                except PullFailed as error:
                    log.warning("a broadcast of %d blocks broke: %s", len(chain), error)
                    part.counters["broken"] += 1
                    await revive()
                else:
                    part.counters["broadcasts" if ranks else "too_few"] += 1
                    part.counters["sent_bytes"] += ranks * len(chain) * part.layout.slot_bytes
                    return

    async def _broadcast(
        self,
        chain: Sequence[BlockHash],
        slots: Sequence[int],
        lacking: Sequence[Member],
        deadline: Deadline,
    ) -> int:
        """One group, one attempt. How many nodes got it; 0 if too few would have it."""
        if not enough(len(lacking)):
            return 0
        group, store = secrets.token_hex(8), await self._part.host_store(deadline)
        until = min(deadline, time.monotonic() + INVITE_S)
        joins = [self.invitation(member, chain, group, store, deadline) for member in lacking]
        accepted = await asyncio.gather(
            *(self._invite(*pair, until) for pair in zip(lacking, joins, strict=True))
        )
        roster = [member.name for member, yes in zip(lacking, accepted, strict=True) if yes]
        if not enough(len(roster)):
            return 0
        me = f"{self._part.node}/source"
        await self._part.run(group, store, me, slots, roster=[me, *roster], deadline=deadline)
        return len(roster)

    def invitation(
        self, member: Member, chain: Sequence[BlockHash], group: str, store: str, deadline: Deadline
    ) -> Join:
        """The question to one node whether it takes part."""
        return Join(
            namespace=self._part.namespace,
            epoch=member.epoch,
            payload_bytes=self._part.layout.payload_bytes,
            shards=self._part.layout.shards,
            hashes=join_hashes(chain),
            group=group,
            store=store,
            budget_s=max(0.001, deadline - time.monotonic()),
        )

    async def _invite(self, member: Member, join: Join, until: Deadline) -> bool:
        """Whether the member takes part. Who is busy, perhaps with the group that broke, is
        asked again until ``until``; whoever refuses or does not answer stays out."""
        while time.monotonic() < until:
            try:
                await self.ask(member, join, until)
            except PeerBusy:
                await asyncio.sleep(RETRY_S)
            except PullFailed as error:
                log.info("broadcast: %s stays out: %s", member.name, error)
                return False
            else:
                return True
        return False

    async def ask(self, member: Member, join: Join, until: Deadline) -> None:
        """Invite one node. Raises why it does not take part."""
        peer = await self._link.connect(member.contact, deadline=until)
        try:
            decode_answer(await peer.ask(wire.pack(join), deadline=until), member.node)
        finally:
            await peer.close()
