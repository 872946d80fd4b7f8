"""Every backend of the prefix index, behind one face: contract tests run on each of them."""

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

from clocks import ManualClock
from eventually import until

from prefixfleet.store.chain import BlockHash, segment_heads
from prefixfleet.store.errors import Fenced, IndexUnavailable
from prefixfleet.store.index import Membership, PrefixIndex
from prefixfleet.store.memory_index import MemoryIndex
from prefixfleet.store.records import NodeRecord
from prefixfleet.store.redis_index import RedisIndex

MAX_EVENTS = 200


def chain_of(text: str, length: int) -> list[BlockHash]:
    """``length`` block hashes that follow each other; equal texts share a chain."""
    hashes, parent = [], text.encode()
    for _ in range(length):
        parent = hashlib.blake2b(parent, digest_size=16).digest()
        hashes.append(parent)
    return hashes


def fork(chain: list[BlockHash], at: int, text: str, length: int) -> list[BlockHash]:
    """A chain that shares the first ``at`` blocks with ``chain``."""
    return chain[:at] + chain_of(text + chain[at - 1].hex(), length - at)


def segments(chain: Sequence[BlockHash], *positions: int) -> dict[BlockHash, list[BlockHash]]:
    """Blocks of ``chain`` (at ``positions``; all by default) by the head of their segment."""
    heads = segment_heads(chain)
    groups: dict[BlockHash, list[BlockHash]] = {}
    for position in positions or range(len(chain)):
        groups.setdefault(heads[position], []).append(chain[position])
    return groups


def node_record(name: str, **fields: Any) -> NodeRecord:
    return NodeRecord(node=name, host="h", **fields)


class Backend(Protocol):
    """One index of a kind. A mortal member's lease ends with `lapse`, those of others go on."""

    @property
    def index(self) -> PrefixIndex: ...

    async def join(self, name: str, *, mortal: bool = False) -> Membership: ...

    async def lapse(self) -> None: ...

    async def close(self) -> None: ...


class MemoryBackend:
    """The index in a dict, on a clock moved by hand."""

    LEASE_S = 10.0

    def __init__(self) -> None:
        self._clock = ManualClock()
        self.index = MemoryIndex(lease_s=self.LEASE_S, clock=self._clock, max_events=MAX_EVENTS)
        self._mortal: list[Membership] = []

    async def join(self, name: str, *, mortal: bool = False) -> Membership:
        member = await self.index.join(node_record(name))
        if mortal:
            self._mortal.append(member)
        return member

    async def lapse(self) -> None:
        self._clock.advance(0.9 * self.LEASE_S)
        for member, record in await self.index.members():
            if member not in self._mortal:
                await self.index.renew(member, record)
        self._clock.advance(0.1 * self.LEASE_S)

    async def close(self) -> None:
        await self.index.close()


class RedisBackend:
    """The index in a real server, whose clock nobody moves: mortal leases are made short."""

    def __init__(self, url: str, fleet: str) -> None:
        self.index = RedisIndex(url, fleet, lease_s=60.0, timeout_s=20.0, max_events=MAX_EVENTS)
        self._short = RedisIndex(url, fleet, lease_s=0.05, timeout_s=20.0, max_events=MAX_EVENTS)
        self._mortal: list[Membership] = []

    async def join(self, name: str, *, mortal: bool = False) -> Membership:
        member = await self.index.join(node_record(name))
        if mortal:
            self._mortal.append(member)
        return member

    async def lapse(self) -> None:
        for member in self._mortal:
            await self._short.renew(member, node_record(member.node))

        async def gone() -> bool:
            listed = {member for member, _ in await self.index.members()}
            return not listed & set(self._mortal)

        await until(gone)

    async def close(self) -> None:
        await self.index.close()
        await self._short.close()


async def until_fenced(index: PrefixIndex, member: Membership) -> None:
    """Until the life has ended; meanwhile there may be no primary."""

    async def fenced() -> bool:
        try:
            await index.renew(member, node_record(member.node))
        except (Fenced, IndexUnavailable) as error:
            return isinstance(error, Fenced)
        return False

    await until(fenced, 60)
