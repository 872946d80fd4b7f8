"""Proving blocks that have arrived: header, length and checksum of every shard."""

import asyncio
import logging
from collections.abc import Sequence

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.errors import CorruptBlock
from prefixfleet.store.slot import SlotLayout, verify

log = logging.getLogger(__name__)

IN_THREAD_BYTES = 256 * 1024
"""More bytes are proved in a thread; the event loop is the engines' too."""


async def count_good(
    segment: memoryview,
    layout: SlotLayout,
    namespace: bytes,
    blocks: Sequence[BlockHash],
    slots: Sequence[int],
) -> int:
    """Number of leading ``blocks`` whose every shard, in its slot, is what it must be."""
    arguments = (segment, layout, namespace, blocks, slots)
    if len(slots) * layout.slot_bytes < IN_THREAD_BYTES:
        return _count_good(*arguments)
    return await asyncio.to_thread(_count_good, *arguments)


def _count_good(
    segment: memoryview,
    layout: SlotLayout,
    namespace: bytes,
    blocks: Sequence[BlockHash],
    slots: Sequence[int],
) -> int:
    size = layout.slot_bytes
    for i, (block, slot) in enumerate(zip(blocks, slots, strict=True)):
        memory = segment[slot * size : (slot + 1) * size]
        try:
            for shard in range(layout.shards):
                verify(memory, layout, namespace, block, shard)
        except CorruptBlock as error:
            log.warning("block %s does not pass its check: %s", block.hex(), error)
            return i
    return len(blocks)
