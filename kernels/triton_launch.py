"""Launches of the Triton kernels: alike pages of many layers behind one table of addresses."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from prefixfleet.kernels.encoding import LARGEST, Codec, Section
from prefixfleet.kernels.triton_kernels import copy_kernel, decode_kernel, encode_kernel

_TILE = 2048  # elements of a program's tile: 16 for each thread of 4 warps
_VECTOR_BYTES = 16
_ITEMS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
_FLOATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_EXACTLY = {"enable_fp_fusion": False}  # a fused multiply-add would round other than the reference


class Batch(NamedTuple):
    """Blocks and their slots, on the device: int64 ids and addresses, int32 poisoned groups."""

    block_ids: torch.Tensor
    slots: torch.Tensor
    poisoned: torch.Tensor

    @classmethod
    def on(cls, device: torch.device, block_ids: Sequence[int], slots: Sequence[int]) -> "Batch":
        locked = device.type == "cuda"  # else the copy would wait for all that is enqueued
        tables = [torch.tensor(t, dtype=torch.int64, pin_memory=locked) for t in (block_ids, slots)]
        ids, starts = (table.to(device, non_blocking=True) for table in tables)
        return cls(ids, starts, torch.zeros(len(slots), dtype=torch.int32, device=device))


@dataclass(frozen=True, slots=True)
class Pages:
    """Alike pages: a device table of where each one starts."""

    addresses: torch.Tensor
    block_bytes: int
    multiple: int  # a power of two up to 16 that divides every address and ``block_bytes``

    @classmethod
    def of(cls, numbers: Sequence[int], views: Sequence[torch.Tensor]) -> "Pages":
        """Of the block views ``views[n]``, all of one shape, stride and dtype."""
        first = views[numbers[0]]
        starts = [views[n].data_ptr() for n in numbers]
        block_bytes = first.stride(0) * first.element_size()
        return cls(_table(starts, first.device), block_bytes, _multiple(block_bytes, *starts))


class CopyLaunch:
    """Moves runs of exact bytes; in the slot they lie packed."""

    def __init__(
        self, pages: Pages, parts: Sequence[int], runs: Sequence[int], run_bytes: int, gap: int = 0
    ) -> None:
        """``parts``: a page's offset in the slot; ``runs``: offsets in the page; all in bytes."""
        multiple = min(pages.multiple, _multiple(run_bytes, *runs, *parts))
        item = min(multiple, max(_ITEMS))
        device = pages.addresses.device
        self._pages, self._gap = pages, gap
        self._parts = _table(parts, device)
        self._runs = _table([run // item for run in runs], device)
        self._length = run_bytes // item
        self._constants = {
            "ITEM": _ITEMS[item],
            "TILE": min(_TILE, triton.next_power_of_2(self._length)),
            "ALIGN": multiple // item,
        }

    def move(self, batch: Batch, *, to_slot: bool) -> None:
        """Enqueue it for all pages."""
        addresses = self._pages.addresses
        tiles = triton.cdiv(self._length, self._constants["TILE"])
        num_runs = len(self._runs)
        copy_kernel[(num_runs * tiles, len(addresses), len(batch.slots))](
            addresses, self._pages.block_bytes, batch.block_ids, batch.slots,
            self._parts, self._runs, num_runs, self._length, self._gap,
            TO_SLOT=to_slot, **self._constants,
        )  # fmt: skip


class PlaneLaunch:
    """Encodes and decodes planes in 8 bits."""

    def __init__(self, pages: Pages, like: Sequence[Section], dtype: torch.dtype) -> None:
        """``like``: a section a page, of one plane and codec."""
        plane, codec, device = like[0].plane, like[0].codec, pages.addresses.device
        multiple = min(pages.multiple // dtype.itemsize, _multiple(*plane.groups, *plane.rows))
        width = triton.next_power_of_2(plane.width)
        self._pages, self._section = pages, like[0]
        self._scales = _table([s.scales for s in like], device)
        self._data = _table([s.data for s in like], device)
        self._groups, self._rows = _table(plane.groups, device), _table(plane.rows, device)
        self._constants: dict[str, Any] = {
            "KV": _FLOATS[dtype],
            "INT8": codec is Codec.INT8,
            "COLUMNS": plane.column_scales,
            "ROWS": max(1, min(triton.next_power_of_2(len(plane.rows)), _TILE // width)),
            "WIDTH": width,
            "ALIGN": max(1, multiple),
        }

    def encode(self, batch: Batch) -> None:
        """Enqueue it for all pages."""
        section, plane = self._section, self._section.plane
        scale_gap = section.data - section.scales - 4 * plane.num_scales
        data_gap = section.end - section.data - plane.num_elements
        grid, tables, sizes = self._launch(batch)
        encode_kernel[grid](
            *tables, batch.poisoned, *sizes, scale_gap, data_gap,
            RATIO=1 / LARGEST[section.codec], **self._constants, **_EXACTLY,
        )  # fmt: skip

    def decode(self, batch: Batch) -> None:
        """Enqueue it for all pages."""
        tiles = triton.cdiv(len(self._rows), self._constants["ROWS"])
        grid, tables, sizes = self._launch(batch)
        decode_kernel[(*grid, tiles)](*tables, *sizes, **self._constants, **_EXACTLY)

    def _launch(self, batch: Batch) -> Any:  # noqa: ANN401
        pages, plane = self._pages, self._section.plane
        return (
            (len(plane.groups) * len(batch.slots), len(pages.addresses)),
            (
                pages.addresses, pages.block_bytes, batch.block_ids, batch.slots,
                self._scales, self._data, self._groups, self._rows,
            ),
            (len(plane.groups), len(plane.rows), plane.width),
        )  # fmt: skip


def _table(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _multiple(*values: int) -> int:
    """The largest power of two, up to 16, that divides all values."""
    common = gcd(_VECTOR_BYTES, *values)
    return common & -common
