"""What both ends of a broadcast know: who takes part, where its bytes lie, how long it may take."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.pool import SlotPool
from prefixfleet.store.replication import BUDGET_S
from prefixfleet.store.slot import SlotLayout
from prefixfleet.transfer.collective_worker import CollectiveWorker
from prefixfleet.transfer.link import Deadline

INVITE_S = 3.0
"""Who has not accepted after so long stays out."""
STALL_S = 3.0
"""A rank that moves nothing for so long breaks the group."""


@dataclass(frozen=True, slots=True)
class Member:
    """A node in one life, and where it is reached over the link that invitations go by."""

    node: str
    epoch: int
    contact: str

    @property
    def name(self) -> str:
        """Its name in a group: another life is another member."""
        return f"{self.node}/{self.epoch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One node's means to take part. ``worker``'s child maps the file behind ``segment``;
    ``host`` is the address that other ranks reach."""

    pool: SlotPool
    segment: memoryview
    layout: SlotLayout
    namespace: bytes
    node: str
    host: str
    worker: CollectiveWorker
    budget_s: float = BUDGET_S
    stall_s: float = STALL_S
    counters: Counter[str] = field(default_factory=Counter)
    arrived: Callable[[Sequence[BlockHash]], None] = lambda blocks: None  # proved, and in the pool

    async def host_store(self, deadline: Deadline) -> str:
        """Address of the store that the ranks meet at. Raises the errors of the worker."""
        told = await self.worker.call({"do": "host", "host": self.host}, deadline)
        return f"{self.host}:{told['port']}"

    async def run(
        self,
        group: str,
        store: str,
        me: str,
        slots: Sequence[int],
        *,
        roster: Sequence[str] = (),
        deadline: Deadline,
    ) -> None:
        """Take part as ``me``, with these slots, -1 for a block that is only passed on. The
        first of the ranks says who they are: ``roster``. Raises the errors of the worker."""
        command = {
            "do": "run",
            "group": group,
            "store": store,
            "me": me,
            "host": self.host,
            "slots": list(slots),
            "slot_bytes": self.layout.slot_bytes,
            "meet_s": INVITE_S + self.stall_s,
            "stall_s": self.stall_s,
            "roster": list(roster),
        }
        told = await self.worker.call(command, deadline)
        self.counters[f"by_{told['lane']}"] += 1
