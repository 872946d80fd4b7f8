"""One namespace's pool in a node's memory: opened for the first engine of it that says hello.

Only an engine knows how large a slot is, so nothing of this exists before. Must not know the
index or HTTP.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from prefixfleet.cluster.engine_questions import Hello
from prefixfleet.cluster.pool_memory import PoolMemory
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.errors import ConfigError, CorruptBlock
from prefixfleet.store.namespace import Namespace
from prefixfleet.store.orders import OrderName, new_order
from prefixfleet.store.pool import SlotPool
from prefixfleet.store.slot import SlotLayout, verify
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
    """One namespace's pool. Owned by the daemon's event loop.

    ``life`` names it to engines: slots that were named in another life mean nothing. ``on_corrupt``
    is called with a block whose bytes are spoiled in this pool; for ``bring`` see `BlockServer`.
    """

    def __init__(
        self,
        kind: Kind,
        memory: PoolMemory,
        pool: SlotPool,
        *,
        node: str,
        on_corrupt: Callable[[BlockHash], None],
        bring: Callable[[Sequence[BlockHash], float], Awaitable[None]],
    ) -> None:
        self.kind = kind
        self.memory = memory
        self.segment = memory.segment
        self.pool = pool
        self.life = time.time_ns()
        self._on_corrupt = on_corrupt
        self.server = BlockServer(
            pool,
            memory.segment.view,
            kind.layout,
            namespace=kind.digest,
            node=node,
            epoch=0,
            clock=time.monotonic,
            on_corrupt=on_corrupt,
            bring=bring,
            ids=memory.lease_ids,
        )

    @classmethod
    def open(
        cls,
        kind: Kind,
        memory: PoolMemory,
        *,
        shared: bool,
        node: str,
        eviction: OrderName,
        on_corrupt: Callable[[BlockHash], None],
        bring: Callable[[Sequence[BlockHash], float], Awaitable[None]],
    ) -> "PoolHost":
        """A pool of all slots that fit, or, where the memory is ``shared`` with others that were
        first, of none before it is given some."""
        slots = memory.segment.view.nbytes // kind.layout.slot_bytes
        log.info("pool of %d slots of %d bytes, %s", slots, kind.layout.slot_bytes, eviction)
        pool = SlotPool(slots, new_order(eviction, slots), time.monotonic, absent=shared)
        return cls(kind, memory, pool, node=node, on_corrupt=on_corrupt, bring=bring)

    def slot(self, number: int) -> memoryview:
        """The bytes of one slot."""
        size = self.kind.layout.slot_bytes
        return self.segment.view[number * size : (number + 1) * size]

    def check_same(self, kind: Kind) -> None:
        """Refuse an engine whose blocks of this namespace cannot lie here. Raises `ConfigError`."""
        if kind != self.kind:
            raise ConfigError(
                f"engine refused: slots of {kind.layout}, this node's pool of its namespace has "
                f"{self.kind.layout}; engines of one model must run it the same way"
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

    def close(self) -> None:
        """Serve nobody any more."""
        self.server.close()
