"""`Read`: what one source is asked for in a pull or a probe, and what came of it. No I/O."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from prefixfleet.store.chain import BlockHash
from prefixfleet.transfer.assembly import Work
from prefixfleet.transfer.link import Deadline
from prefixfleet.transfer.paths import Paths


@dataclass(slots=True)
class Read:
    """What one source is asked for, and what came of it. Owned by its pull."""

    contacts: Mapping[str, str]
    epoch: int
    namespace: bytes
    hashes: tuple[BlockHash, ...]
    deadline: Deadline
    forced: str | None = None
    background: bool = False
    link: str = ""
    contact: str = ""
    started: float = field(default_factory=time.monotonic)
    leased: float = 0.0  # when the lease was granted; 0: never
    ended: float = 0.0
    node: str = ""
    lanes: str = ""
    blocks: int = 0  # read and proved
    queued_bytes: int = 0  # that the source had promised to others when it was asked
    read_s: float = 0.0  # that the source read from its disk before it granted the lease
    failed: list[Work] = field(default_factory=list)
    spoiled: BlockHash = b""

    def of(self, contacts: Mapping[str, str], epoch: int) -> Self:
        """The same question to another source, or to this one once more."""
        return type(self)(
            contacts,
            epoch,
            self.namespace,
            self.hashes,
            self.deadline,
            self.forced,
            self.background,
        )

    @property
    def stopped(self) -> bool:
        """Whether it makes no sense to read on."""
        return bool(self.failed or self.spoiled)


def learn(paths: Paths, read: Read, slot_bytes: int) -> None:
    """What a read that brought blocks, and came to a good end, says of its path.

    That the source had to read them first says nothing of the path: the source tells what that
    takes.
    """
    paths.proved(read.link, read.contact, read.node, read.lanes)
    paths.estimates.observe(
        read.node,
        read.link,
        size_bytes=read.blocks * slot_bytes,
        transfer_s=read.ended - read.leased,
        setup_s=max(0.0, read.leased - read.started - read.read_s),
        queued_bytes=read.queued_bytes,
    )
