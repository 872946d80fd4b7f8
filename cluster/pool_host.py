"""A node's pool with its bytes and its listeners: opened for the first engine that says hello.

Only an engine knows how large a slot is, so nothing of this exists before. Must not know the
index or HTTP.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prefixfleet.cluster.engine_questions import Hello
from prefixfleet.cluster.segment import Segment
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.errors import ConfigError, CorruptBlock
from prefixfleet.store.namespace import Namespace
from prefixfleet.store.orders import OrderName, new_order
from prefixfleet.store.pool import SlotPool
from prefixfleet.store.populate import Populating
from prefixfleet.store.slot import SlotLayout, verify
from prefixfleet.transfer.link import Link, Listener
from prefixfleet.transfer.serve import BlockServer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What all blocks of one pool have in common."""

    namespace: Namespace
    digest: bytes
    layout: SlotLayout

    @classmethod
    def of(cls, hello: Hello, secret: bytes) -> "Kind":
        """What an engine needs. Raises `ConfigError`. ``secret`` is the fleet's."""
        namespace = hello.identity()
        return cls(namespace=namespace, digest=namespace.digest(secret), layout=hello.layout())


class PoolHost:
    """One opened pool. Owned by the daemon's event loop; `close` removes its memory.

    ``life`` names it to engines: slots that were named in another life mean nothing. ``on_corrupt``
    is called with a block whose bytes are spoiled in this pool; for ``bring`` see `BlockServer`.
    """

    def __init__(
        self,
        kind: Kind,
        segment: Segment,
        pool: SlotPool,
        *,
        node: str,
        on_corrupt: Callable[[BlockHash], None],
        bring: Callable[[Sequence[BlockHash], float], Awaitable[None]],
    ) -> None:
        self.kind = kind
        self.segment = segment
        self.pool = pool
        self.life = time.time_ns()
        self.listeners: dict[str, Listener] = {}
        self._populating = Populating(segment.view)
        self._on_corrupt = on_corrupt
        self.server = BlockServer(
            pool,
            segment.view,
            kind.layout,
            namespace=kind.digest,
            node=node,
            epoch=0,
            clock=time.monotonic,
            on_corrupt=on_corrupt,
            bring=bring,
        )

    @classmethod
    def open(
        cls,
        kind: Kind,
        path: Path,
        pool_bytes: int,
        *,
        node: str,
        eviction: OrderName,
        on_corrupt: Callable[[BlockHash], None],
        bring: Callable[[Sequence[BlockHash], float], Awaitable[None]],
    ) -> "PoolHost":
        """A pool of as many slots as fit. Raises `ConfigError` if not even one does."""
        slots = pool_bytes // kind.layout.slot_bytes
        if slots < 1:
            raise ConfigError(
                f"a block of this engine takes {kind.layout.slot_bytes} bytes, the pool has "
                f"{pool_bytes}; set PREFIXFLEET_NODE_POOL_BYTES higher"
            )
        segment = Segment.create(path, slots * kind.layout.slot_bytes)
        log.info("pool of %d slots of %d bytes, %s", slots, kind.layout.slot_bytes, eviction)
        pool = SlotPool(slots, new_order(eviction, slots), time.monotonic)
        return cls(kind, segment, pool, node=node, on_corrupt=on_corrupt, bring=bring)

    def slot(self, number: int) -> memoryview:
        """The bytes of one slot."""
        size = self.kind.layout.slot_bytes
        return self.segment.view[number * size : (number + 1) * size]

    async def listen(self, links: Sequence[Link], host: str) -> None:
        """Serve the pool over every link. Raises `ConfigError` if an address cannot be used."""
        for link in links:
            self.listeners[link.name] = await link.listen(host, self.segment.view, self.server)

    def contacts(self) -> dict[str, str]:
        """Where peers connect, by link."""
        return {name: listener.contact for name, listener in self.listeners.items()}

    def check_same(self, kind: Kind) -> None:
        """Refuse an engine whose blocks cannot live here. Raises `ConfigError`."""
        if kind == self.kind:
            return
        ours, theirs = self.kind.namespace.encoding, kind.namespace.encoding
        if ours != theirs:
            what = (
                f"blocks stored as {theirs!r}, this node's pool holds {ours!r} (set "
                "PREFIXFLEET_WORKER_ENCODING alike for all)"
            )
        elif kind.layout != self.kind.layout:
            what = f"slots of {kind.layout}, this node's pool has {self.kind.layout}"
        else:
            what = f"namespace {kind.namespace}, this node's pool holds {self.kind.namespace}"
        raise ConfigError(
            f"engine refused: {what}; engines of one node must run the same model the same way "
            "(give another one a node daemon of its own)"
        )

    def examine(self, block: BlockHash) -> None:
        """Somebody says that a block is spoiled: look, and report it if it is."""
        with self.pool.pin([block]) as pin:
            for slot in pin.slots:
                memory = self.slot(slot)
                try:
                    for shard in range(self.kind.layout.shards):
                        verify(memory, self.kind.layout, self.kind.digest, block, shard)
                except CorruptBlock as error:
                    log.error("this node's own pool is spoiled: %s", error)
                    self._on_corrupt(block)

    async def close(self) -> None:
        """Stop serving, then remove the memory."""
        for listener in self.listeners.values():
            await listener.close()
        self.server.close()
        self._populating.stop()
        self.segment.close()
