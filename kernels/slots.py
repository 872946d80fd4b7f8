"""What a gather or scatter is handed, checked: block ids, and slots as flat byte tensors."""

from collections.abc import Sequence

import torch

from prefixfleet.kernels.encoding import HEADER, check_payload
from prefixfleet.kernels.paged import PagedLayout

Slot = torch.Tensor | memoryview
"""Writable memory of one block's payload."""


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


def as_bytes(slot: Slot, expected: int) -> torch.Tensor:
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


def check_headers(slots: Sequence[torch.Tensor], expected: bytes) -> None:
    """Raises `ValueError` unless every encoded slot, in host memory, says that it is what the
    reader decodes.
    """
    for slot in slots:
        check_payload(slot[: HEADER.size].numpy().tobytes(), expected)


def addresses(slots: Sequence[torch.Tensor]) -> list[int]:
    """Where each slot starts. Raises `ValueError` if one is not on a 16-byte boundary."""
    starts = [slot.data_ptr() for slot in slots]
    odd = [start for start in starts if start % 16]
    if odd:
        raise ValueError(f"slot: got address {odd[0]:#x}, expected a multiple of 16")
    return starts
