"""Nodes with real pools and real bytes, for tests of serving and pulling."""

import contextlib
import hashlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import links
from links import Rig, soon

from prefixfleet.store.eviction import LruOrder
from prefixfleet.store.pool import SlotPool
from prefixfleet.store.slot import SlotLayout, seal, verify
from prefixfleet.transfer.gather import Source
from prefixfleet.transfer.link import Link
from prefixfleet.transfer.pull import Puller, PullResult
from prefixfleet.transfer.serve import BlockServer

NAMESPACE = b"n" * 16
LAYOUT = SlotLayout(payload_bytes=8000, shards=2)
EPOCH = 7


def chain(count: int, name: str = "chain") -> list[bytes]:
    """Hashes of a prefix; the same each time."""
    return [hashlib.sha256(f"{name}/{i}".encode()).digest()[:16] for i in range(count)]


def payload(block: bytes, shard: int, size: int) -> bytes:
    """What the block's shard holds on every node."""
    return hashlib.shake_128(block + bytes([shard])).digest(size)


class PoolNode:
    """A node's pool with its bytes. Owned by the test."""

    def __init__(
        self,
        name: str,
        slots: int = 128,
        layout: SlotLayout = LAYOUT,
        segment: memoryview | None = None,
        **serving: Any,
    ) -> None:
        self.name = name
        self.layout = layout
        self.now_s = 1000.0  # of the pool and the server; moved by hand
        self.pool = SlotPool(slots, LruOrder(), lambda: self.now_s)
        self.segment = segment or links.shared_memory(slots * layout.slot_bytes)
        self.corrupt: list[bytes] = []
        self.server = BlockServer(
            self.pool,
            self.segment,
            layout,
            namespace=NAMESPACE,
            node=name,
            epoch=EPOCH,
            clock=lambda: self.now_s,
            on_corrupt=self.corrupt.append,
            **serving,
        )

    def slot(self, number: int) -> memoryview:
        """Memory of one slot."""
        size = self.layout.slot_bytes
        return self.segment[number * size : (number + 1) * size]

    def fill(self, hashes: Sequence[bytes], parent: bytes = b"") -> None:
        """Make blocks resident, with their bytes."""
        with self.pool.reserve(parent, hashes) as reservation:
            for block, number in zip(hashes, reservation.slots, strict=True):
                memory = self.slot(number)
                for shard in range(self.layout.shards):
                    part = self.layout.payload(memory, shard)
                    part[:] = payload(block, shard, part.nbytes)
                    seal(memory, self.layout, NAMESPACE, block, shard)
                assert reservation.commit(block)

    def evict(self, count: int) -> None:
        """Blocks leave as the daemon lets them go."""
        self.pool.free(self.pool.choose_victims(count))

    def holds(self, hashes: Sequence[bytes]) -> int:
        """Leading blocks that are here, each proved and compared byte for byte."""
        self.pool.check()
        with self.pool.pin(hashes) as pin:
            for block, number in zip(pin.hashes, pin.slots, strict=True):
                for shard in range(self.layout.shards):
                    verify(self.slot(number), self.layout, NAMESPACE, block, shard)
                    part = self.layout.payload(self.slot(number), shard)
                    assert part == payload(block, shard, part.nbytes)
            return len(pin.hashes)


class PullRig:
    """Sources and one puller over links of one kind."""

    def __init__(self, rig: Rig, puller: Puller, target: PoolNode, link: Link) -> None:
        self.rig = rig
        self.puller = puller
        self.target = target
        self.link = link

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, kind: str, slots: int = 64, **options: Any) -> "AsyncIterator[PullRig]":
        """A puller with an empty pool of so many slots."""
        async with Rig(kind) as rig:
            link, target = rig.link("target"), PoolNode("target", slots)
            puller = Puller(target.pool, target.segment, LAYOUT, links={link.name: link}, **options)
            try:
                yield cls(rig, puller, target, link)
            finally:
                await puller.close()
                assert target.pool.counts().reserved == 0
                assert target.pool.counts().quarantined == 0

    async def serve(self, node: PoolNode) -> dict[str, str]:
        """Contacts of a source in this process."""
        listener = await self.rig.listen(self.rig.link(node.name), node.segment, node.server)
        return {self.link.name: listener.contact}

    async def pull(
        self,
        contacts: dict[str, str],
        hashes: Sequence[bytes],
        *,
        parent: bytes = b"",
        namespace: bytes = NAMESPACE,
        epoch: int = EPOCH,
        seconds: float = 20.0,
        others: Sequence[dict[str, str]] = (),
    ) -> PullResult:
        """One pull into the target's pool."""
        self.asked_others = 0

        async def find() -> list[Source]:
            self.asked_others += 1
            return [Source(contacts, EPOCH) for contacts in others]

        return await self.puller.pull(
            contacts,
            namespace=namespace,
            epoch=epoch,
            parent=parent,
            hashes=hashes,
            deadline=soon(seconds),
            others=find,
        )


def pull_source(kind: str, blocks: int) -> contextlib.AbstractAsyncContextManager[links.Source]:
    """A process that serves ``chain(blocks)``."""
    return links.Source.of("pull_source.py", kind, blocks)
