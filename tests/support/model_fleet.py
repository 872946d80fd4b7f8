"""Nodes of real parts without sockets: pool, cache, announcer, server and puller over the
in-process link and an index whose answers may be lost. For the model checks."""

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from prefixfleet.cluster.announcer import Announcer
from prefixfleet.cluster.claims import Prepared
from prefixfleet.cluster.holders import Holders
from prefixfleet.cluster.node_cache import NodeCache
from prefixfleet.cluster.open_pool import pull_with
from prefixfleet.cluster.peer_book import PeerBook
from prefixfleet.cluster.pulls import Pull
from prefixfleet.store.errors import CorruptBlock, IndexUnavailable
from prefixfleet.store.eviction import LruOrder
from prefixfleet.store.index import PrefixIndex
from prefixfleet.store.memory_index import MemoryIndex
from prefixfleet.store.pool import SlotPool
from prefixfleet.store.records import NodeRecord
from prefixfleet.store.slot import SlotLayout, seal, verify
from prefixfleet.transfer.inproc import InprocLink, InprocListener, InprocNetwork
from prefixfleet.transfer.pull import Puller, PullResult
from prefixfleet.transfer.serve import BlockServer

NAMESPACE = b"n" * 16
SECRET = b"the secret of the model"
LAYOUT = SlotLayout(payload_bytes=100, shards=2)
SLOTS = 10


def chain_of(text: str) -> list[bytes]:
    """A prefix chain: block i is named by the first i + 1 letters, as a real hash is."""
    return [name_of(text[: i + 1]) for i in range(len(text))]


def name_of(prefix: str) -> bytes:
    """Short prefixes stay readable in a failure; the index looks at the first bytes only."""
    return prefix.encode().ljust(16, b".")


def payload_of(block: bytes, shard: int) -> bytes:
    """What every correct node holds for a shard of the block."""
    return hashlib.shake_128(block + bytes([shard])).digest(LAYOUT.payload_bytes)


class LossyIndex(MemoryIndex):
    """The real index behind a network: ``away`` loses questions, ``mute`` loses answers only."""

    def __init__(self) -> None:
        super().__init__(lease_s=3.0, clock=time.monotonic)
        self.away: set[str] = set()
        self.mute: set[str] = set()

    def seen_by(self, node: str) -> "NodesIndex":
        return NodesIndex(self, node)


class NodesIndex:
    """The index as one node reaches it; every method of the real one, through the network."""

    def __init__(self, index: LossyIndex, node: str) -> None:
        self.inner = index
        self._node = node

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)

        async def call(*arguments: object) -> object:
            await asyncio.sleep(0.001)
            if self._node in self.inner.away:
                await asyncio.sleep(1.0)
                raise IndexUnavailable("no answer within 1 s")
            answer = await method(*arguments)
            if self._node in self.inner.mute:
                await asyncio.sleep(1.0)
                raise IndexUnavailable("no answer within 1 s")
            return answer

        return call


@dataclass
class ModelNode:
    """One life of one node."""

    name: str
    index: LossyIndex
    network: InprocNetwork
    spoiled: set[bytes] = field(default_factory=set)  # by the test, in this node's memory
    tasks: list["asyncio.Task[None]"] = field(default_factory=list)
    listener: InprocListener = field(init=False)

    async def start(self) -> "ModelNode":
        clock = time.monotonic
        index = self.index.seen_by(self.name)
        self.pool = SlotPool(SLOTS, LruOrder(), clock)
        self.segment = memoryview(bytearray(SLOTS * LAYOUT.slot_bytes))
        self.link = InprocLink(self.network, node=self.name, secret=SECRET)
        self.server = BlockServer(
            self.pool,
            self.segment,
            LAYOUT,
            namespace=NAMESPACE,
            node=self.name,
            epoch=0,
            clock=clock,
            on_corrupt=lambda block: self.cache.drop(block),
        )
        self.announcer = Announcer(
            cast(PrefixIndex, index),
            record=lambda: NodeRecord(
                node=self.name, host="h", contacts={"inproc": self.listener.contact}
            ),
            resident=lambda: [block for block, _ in self.pool.resident()],
            segments=self.pool.segments_of,
            joined=lambda epoch: setattr(self.server, "epoch", epoch),
            clock=clock,
        )
        self.puller = Puller(self.pool, self.segment, LAYOUT, links={"inproc": self.link})
        peers = PeerBook(index.members, clock=clock)
        self.cache = NodeCache(
            self.pool,
            LAYOUT.shards,
            None,
            slot=self.memory,
            peers=peers,
            holders=Holders(index.match, peers, self.name),
            announcer=self.announcer,
            move=self._move,
            examine=self.examine,
            clock=clock,
        )
        self.listener = await self.link.listen("h", self.segment, self.server)
        self.tasks = [
            asyncio.create_task(self.announcer.run()),
            asyncio.create_task(self.cache.run()),
        ]
        return self

    async def die(self) -> None:
        """As kill -9: nothing is said to anybody."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.listener.close()
        await self.cache.close()
        await self.puller.close()

    def memory(self, slot: int) -> memoryview:
        return self.segment[slot * LAYOUT.slot_bytes : (slot + 1) * LAYOUT.slot_bytes]

    def write(self, block: bytes, slot: int, rank: int) -> None:
        LAYOUT.payload(self.memory(slot), rank)[:] = payload_of(block, rank)
        seal(self.memory(slot), LAYOUT, NAMESPACE, block, rank)

    def is_right(self, block: bytes, slot: int) -> bool:
        """Whether the slot holds the block, to the last byte of every shard."""
        try:
            for shard in range(LAYOUT.shards):
                verify(self.memory(slot), LAYOUT, NAMESPACE, block, shard)
                if LAYOUT.payload(self.memory(slot), shard) != payload_of(block, shard):
                    return False
        except CorruptBlock:
            return False
        return True

    def examine(self, block: bytes) -> None:
        with self.pool.pin([block]) as pin:
            if pin.slots and not self.is_right(block, pin.slots[0]):
                self.cache.drop(block)

    def spoil(self, block: bytes) -> None:
        """Change a byte of a block that is here."""
        with self.pool.pin([block]) as pin:
            for slot in pin.slots:
                LAYOUT.payload(self.memory(slot))[3] ^= 1
                self.spoiled.add(block)

    def leading(self, chain: Sequence[bytes]) -> int:
        return self.pool.match(chain)

    async def _move(self, pull: Pull) -> PullResult:
        return await pull_with(self.puller, NAMESPACE, pull)


@dataclass
class Holding:
    """A prefix that some request was promised, from its answer until its release."""

    node: ModelNode
    session: int
    request: str
    chain: list[bytes]
    prepared: Prepared
