"""`PrefixIndex`: who has which block. A hint, never a promise; the owner of a block decides.

Two backends pass `tests/contracts/test_index.py`: `memory_index` and `redis_index`.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.records import NodeRecord


@dataclass(frozen=True, slots=True)
class Membership:
    """One life of a node: its name, its epoch and the bit it owns in the index's bitmaps."""

    node: str
    epoch: int
    slot: int


@dataclass(frozen=True, slots=True)
class IndexEvent:
    """A change of the index, in the order in which the index applied it.

    ``kind`` is "publish", "withdraw", "join" or "leave". ``hashes`` is empty for the last two,
    and holds fields (the first `FIELD_BYTES` bytes of each block hash) for the others. Every
    life ends with a "leave", also one whose lease ended or whose node joined again; it comes
    before any other life's "join" on the same slot.
    """

    kind: str
    member: Membership
    hashes: tuple[BlockHash, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Whole content of the index and the cursor from which `PrefixIndex.follow` goes on.

    ``holders`` maps a block's field (the first `FIELD_BYTES` bytes of its hash) to a bitmap of
    slots, as an int; only bits of live members are set.
    """

    members: tuple[Membership, ...]
    holders: Mapping[bytes, int]
    cursor: str


ENGINE_AREA = "engines"
"""Name of the fleet's second index: what engines hold in their own caches. Its members are
engines, and nobody can pull from them."""

FIELD_BYTES = 8
"""Bytes of a block hash that the index keeps. The puller compares the whole hash."""


class PrefixIndex(Protocol):
    """The fleet's index. Every call raises `IndexUnavailable` instead of waiting past its limit.

    Order matters to the callers: publish after the bytes are committed, withdraw before a slot
    is given away. A member whose lease has ended, or whose node joined again, matches nothing.
    """

    async def join(self, record: NodeRecord) -> Membership:
        """Start a new life of ``record.node``: a higher epoch, a fresh slot, an empty holding."""
        ...

    async def renew(self, member: Membership, record: NodeRecord) -> None:
        """Extend the lease and replace the node's record. Raises `Fenced` if the epoch is old
        or its lease had ended: the node must join again and publish anew."""
        ...

    async def leave(self, member: Membership) -> None:
        """End this life at once; repeated calls and calls of a fenced member do nothing."""
        ...

    async def publish(
        self, member: Membership, segments: Mapping[BlockHash, Sequence[BlockHash]]
    ) -> None:
        """Say that ``member`` holds these blocks, grouped by the head of their segment.

        Idempotent: publishing twice and withdrawing once leaves the block absent.
        Raises `Fenced`.
        """
        ...

    async def withdraw(
        self, member: Membership, segments: Mapping[BlockHash, Sequence[BlockHash]]
    ) -> None:
        """Say that ``member`` no longer holds these blocks. Unknown blocks are ignored.
        Raises `Fenced`."""
        ...

    async def match(self, chain: Sequence[BlockHash]) -> dict[str, int]:
        """Live nodes to the number of leading blocks of ``chain`` they hold; zeros left out."""
        ...

    async def copies(self, segments: Mapping[BlockHash, Sequence[BlockHash]]) -> dict[bytes, int]:
        """Number of live holders of each block, by block hash."""
        ...

    async def members(self) -> list[tuple[Membership, NodeRecord]]:
        """Every live member with its latest record."""
        ...

    async def snapshot(self) -> Snapshot:
        """The whole index at one moment."""
        ...

    def follow(self, cursor: str) -> AsyncIterator[IndexEvent]:
        """Events after ``cursor``, for ever. Raises `StreamGap` when some were lost (trimmed
        stream, restarted or flushed server): take a new snapshot."""
        ...

    async def close(self) -> None:
        """Give back connections. The lease is left to end by itself; `leave` ends it at once."""
        ...


class StreamGap(Exception):
    """Events between the cursor and now are lost; whoever follows must take a new snapshot."""
