"""`Proof`: header, length and checksum of every shard of blocks that a read brings.

A link that tells how far it has come has the bytes proved while they are still in the cache, by
the thread that received them; what it did not tell of is proved at the end.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.errors import CorruptBlock
from prefixfleet.store.slot import ShardProof, SlotLayout

log = logging.getLogger(__name__)

IN_THREAD_BYTES = 256 * 1024
"""More bytes are proved in a thread; the event loop is the engines' too."""


class Proof:
    """Of ``blocks``, slot to hash, in the order in which the slots are filled.

    Owned by one read; one thread at a time. Nothing may write into what has arrived.
    """

    def __init__(
        self,
        segment: memoryview,
        layout: SlotLayout,
        namespace: bytes,
        blocks: Mapping[int, BlockHash],
    ) -> None:
        self._segment = segment
        self._layout = layout
        self._namespace = namespace
        self._blocks = tuple(blocks.items())
        self._spoiled: set[BlockHash] = set()
        self._at = 0  # the shard that is being proved, counted through all slots
        self._shard: ShardProof | None = None

    def arrived(self, count: int) -> None:
        """The first ``count`` bytes of the slots, one after another, are in place."""
        size = self._layout.shard_bytes
        while self._at < len(self._blocks) * self._layout.shards:
            here = count - self._at * size
            if here <= 0:
                return
            self._shard = self._shard or self._begin()
            if here < size:
                self._shard.arrived(here)
                return
            self._finish(self._shard)

    async def good(self, blocks: Sequence[BlockHash]) -> int:
        """All bytes are in place: how many leading ``blocks`` are what they must be."""
        whole = len(self._blocks) * self._layout.slot_bytes
        if whole - self._at * self._layout.shard_bytes < IN_THREAD_BYTES:
            self.arrived(whole)
        else:
            await asyncio.to_thread(self.arrived, whole)
        return next((i for i, block in enumerate(blocks) if block in self._spoiled), len(blocks))

    def _begin(self) -> ShardProof:
        which, shard = divmod(self._at, self._layout.shards)
        slot, block = self._blocks[which]
        start = slot * self._layout.slot_bytes
        memory = self._segment[start : start + self._layout.slot_bytes]
        return ShardProof(memory, self._layout, self._namespace, block, shard)

    def _finish(self, shard: ShardProof) -> None:
        try:
            shard.finish()
        except CorruptBlock as error:
            _, block = self._blocks[self._at // self._layout.shards]
            if not self._spoiled:  # one is enough to know where to look
                log.warning("block %s does not pass its check: %s", block.hex(), error)
            self._spoiled.add(block)
        self._at += 1
        self._shard = None
