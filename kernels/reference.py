"""The specification of gather and scatter: plain torch, one page at a time, slow and obvious.

Every faster path (`copy`, the Triton kernels) must move the same bytes. Tensors in, tensors out.
"""

from collections.abc import Mapping, Sequence

import torch

from prefixfleet.kernels.paged import PagedLayout, block_views


def gather(
    caches: Mapping[str, torch.Tensor],
    layout: PagedLayout,
    block_ids: Sequence[int],
    outs: Sequence[torch.Tensor | memoryview],
) -> None:
    """Copy block ``block_ids[i]`` of the paged KV into ``outs[i]``, exact bytes.

    Each out is ``layout.block_bytes`` writable bytes: a contiguous uint8 tensor on the CPU or on
    the caches' device, or a memoryview of a slot's payload. An id may come twice.

    Raises:
        ValueError: a length, dtype or id does not fit; then nothing was written.
    """
    check_ids(layout, block_ids, len(outs))
    slots = [as_bytes(out, layout.block_bytes) for out in outs]
    views = block_views(caches, layout)
    for block, slot in zip(block_ids, slots, strict=True):
        for view, part in zip(views, _split(slot, layout), strict=True):
            part.copy_(view[block].contiguous().flatten().view(torch.uint8))


def scatter(
    caches: Mapping[str, torch.Tensor],
    layout: PagedLayout,
    block_ids: Sequence[int],
    slots: Sequence[torch.Tensor | memoryview],
) -> None:
    """Copy ``slots[i]`` into block ``block_ids[i]`` of the paged KV; the inverse of `gather`.

    Raises:
        ValueError: as `gather`, and if an id comes twice: which bytes would win is undefined.
    """
    check_ids(layout, block_ids, len(slots))
    check_distinct(block_ids)
    sources = [as_bytes(slot, layout.block_bytes) for slot in slots]
    views = block_views(caches, layout)
    for block, slot in zip(block_ids, sources, strict=True):
        for view, part in zip(views, _split(slot, layout), strict=True):
            # clone(): a slot may start at any address, an element must be aligned
            view[block].copy_(part.clone().view(view.dtype).view(view[block].shape))


def _split(slot: torch.Tensor, layout: PagedLayout) -> Sequence[torch.Tensor]:
    return torch.split(slot, [page.page_bytes for page in layout.pages])


def check_ids(layout: PagedLayout, block_ids: Sequence[int], num_slots: int) -> None:
    """Raises `ValueError` unless every id is a block and has its slot."""
    if len(block_ids) != num_slots:
        raise ValueError(f"blocks: got {len(block_ids)} ids for {num_slots} slots")
    wrong = [block for block in block_ids if not 0 <= block < layout.num_blocks]
    if wrong:
        raise ValueError(f"block ids: got {wrong[:8]}, expected 0 to {layout.num_blocks - 1}")


def check_distinct(block_ids: Sequence[int]) -> None:
    """Raises `ValueError` if two slots would be written into one block."""
    if len(set(block_ids)) != len(block_ids):
        twice = sorted({block for block in block_ids if list(block_ids).count(block) > 1})
        raise ValueError(f"block ids: got {twice[:8]} more than once, expected distinct targets")


def as_bytes(slot: torch.Tensor | memoryview, expected: int) -> torch.Tensor:
    """A slot's payload as a flat uint8 tensor over the same memory.

    Raises:
        ValueError: it is not ``expected`` contiguous bytes, or not writable memory.
    """
    if isinstance(slot, torch.Tensor):
        flat = slot
    elif slot.readonly or not slot.contiguous:
        raise ValueError("slot: got read-only or scattered memory, expected a writable buffer")
    else:
        flat = torch.frombuffer(slot, dtype=torch.uint8)
    if flat.dtype != torch.uint8 or flat.numel() != expected or not flat.is_contiguous():
        raise ValueError(
            f"slot: got {tuple(flat.shape)} {flat.dtype}, expected {expected} contiguous bytes"
        )
    return flat.view(-1)
