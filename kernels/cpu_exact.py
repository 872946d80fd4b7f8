"""Gather and scatter of exact blocks on the CPU: one strided copy a block, if pages are alike."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from prefixfleet.kernels.paged import PagedLayout, block_views
from prefixfleet.kernels.slots import Slot, as_bytes, check_distinct, check_ids


class ExactCpuMover:
    """Moves exact blocks. Holds views of the caches and nothing else; any thread may call it."""

    def __init__(self, caches: Mapping[str, torch.Tensor], layout: PagedLayout) -> None:
        self._layout = layout
        self._runs = _runs(block_views(caches, layout))
        self.payload_bytes = layout.block_bytes

    def gather(self, block_ids: Sequence[int], outs: Sequence[Slot]) -> None:
        """As `reference.gather`."""
        check_ids(self._layout, block_ids, len(outs))
        slots = [as_bytes(out, self.payload_bytes) for out in outs]
        for block, slot in zip(block_ids, slots, strict=True):
            for run in self._runs:
                run.part(slot).copy_(run.blocks[block])

    def scatter(self, block_ids: Sequence[int], slots: Sequence[Slot]) -> None:
        """As `reference.scatter`."""
        check_ids(self._layout, block_ids, len(slots))
        check_distinct(block_ids)
        sources = [as_bytes(slot, self.payload_bytes) for slot in slots]
        for block, slot in zip(block_ids, sources, strict=True):
            for run in self._runs:
                run.blocks[block].copy_(run.part(slot))


class _Run(NamedTuple):
    """Pages that one strided copy moves; ``blocks`` is uint8 [B, (L,) page axes]."""

    blocks: torch.Tensor
    start: int
    end: int

    def part(self, slot: torch.Tensor) -> torch.Tensor:
        return slot[self.start : self.end].view(self.blocks.shape[1:])


def _runs(views: Sequence[torch.Tensor]) -> list[_Run]:
    """One run for all pages if they are alike and lie at equal distances, else one a page."""
    pages = [view.unsqueeze(-1).view(torch.uint8) for view in views]
    together = _stacked(pages)
    if together is not None:
        pages = [together]
    runs, end = [], 0
    for blocks in pages:
        start, end = end, end + blocks[0].numel()
        runs.append(_Run(blocks, start, end))
    return runs


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
