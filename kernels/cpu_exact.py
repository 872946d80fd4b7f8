"""Gather and scatter of exact blocks on the CPU: numpy's strided copy, a memcpy for each run."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from prefixfleet.kernels.paged import PagedLayout, block_views
from prefixfleet.kernels.slots import Slot, as_bytes, check_distinct, check_ids

Bytes = npt.NDArray[np.uint8]


class ExactCpuMover:
    """Moves exact blocks. Holds views of the caches and nothing else; any thread may call it."""

    def __init__(self, caches: Mapping[str, torch.Tensor], layout: PagedLayout) -> None:
        self._layout = layout
        self._parts = _parts(block_views(caches, layout))
        self.payload_bytes = layout.block_bytes

    def gather(self, block_ids: Sequence[int], outs: Sequence[Slot]) -> None:
        """As `reference.gather`."""
        check_ids(self._layout, block_ids, len(outs))
        slots = [as_bytes(out, self.payload_bytes).numpy() for out in outs]
        for block, slot in zip(block_ids, slots, strict=True):
            for part in self._parts:
                np.copyto(part.of(slot), part.blocks[block])

    def check(self, slots: Sequence[Slot]) -> None:
        """As `BlockMover.check`: any bytes of the right number are exact blocks."""
        for slot in slots:
            as_bytes(slot, self.payload_bytes)

    def scatter(self, block_ids: Sequence[int], slots: Sequence[Slot]) -> None:
        """As `reference.scatter`."""
        check_ids(self._layout, block_ids, len(slots))
        check_distinct(block_ids)
        sources = [as_bytes(slot, self.payload_bytes).numpy() for slot in slots]
        for block, slot in zip(block_ids, sources, strict=True):
            for part in self._parts:
                np.copyto(part.blocks[block], part.of(slot))


class _Part(NamedTuple):
    """Pages that one strided copy moves; ``blocks`` is uint8 [B, (pages,) page axes]."""

    blocks: Bytes
    start: int
    end: int

    def of(self, slot: Bytes) -> Bytes:
        return slot[self.start : self.end].reshape(self.blocks.shape[1:])


def _parts(views: Sequence[torch.Tensor]) -> list[_Part]:
    """One part for all pages if they are alike and lie at equal distances, else one a page."""
    pages = [view.unsqueeze(-1).view(torch.uint8) for view in views]
    together = _stacked(pages)
    parts, end = [], 0
    for blocks in pages if together is None else [together]:
        start, end = end, end + blocks[0].numel()
        parts.append(_Part(blocks.numpy(), start, end))
    return parts


def _stacked(pages: Sequence[torch.Tensor]) -> torch.Tensor | None:
    first = pages[0]
    kinds = {(p.shape, p.stride(), p.untyped_storage().data_ptr()) for p in pages}
    offsets = [p.storage_offset() for p in pages]
    steps = {b - a for a, b in pairwise(offsets)}
    if len(kinds) != 1 or len(steps) != 1 or min(steps) <= 0:
        return None
    num_blocks, *sizes = first.shape
    block_stride, *strides = first.stride()
    return first.as_strided(
        (num_blocks, len(pages), *sizes), (block_stride, steps.pop(), *strides), offsets[0]
    )
