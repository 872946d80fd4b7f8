"""Gather and scatter of 8-bit blocks on the CPU: one compiled pass a plane, bits as `reference`."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from prefixfleet.kernels.cpu_planes import copier, decoder, encoder
from prefixfleet.kernels.encoding import (
    HEADER,
    Codec,
    Section,
    encoded_bytes,
    encoding_of,
    header,
    sections,
)
from prefixfleet.kernels.paged import PagedLayout, block_views
from prefixfleet.kernels.slots import (
    Slot,
    addresses,
    as_bytes,
    check_distinct,
    check_headers,
    check_ids,
)

Integers = npt.NDArray[np.int64]


class EncodedCpuMover:
    """Moves 8-bit blocks. Holds views of the caches and nothing else; any thread may call it.

    Raises:
        ValueError: the layout cannot be held in this encoding.
    """

    def __init__(
        self, caches: Mapping[str, torch.Tensor], layout: PagedLayout, encoding: str
    ) -> None:
        self._layout = layout
        self._encoding = encoding_of(encoding)
        views = block_views(caches, layout)
        self._loops = [_Loop.of(s, views[s.page]) for s in sections(layout, self._encoding)]
        self.payload_bytes = encoded_bytes(layout, encoding)

    def gather(self, block_ids: Sequence[int], outs: Sequence[Slot]) -> None:
        """As `reference.gather`; slots start on 16-byte boundaries."""
        check_ids(self._layout, block_ids, len(outs))
        slots = [as_bytes(out, self.payload_bytes) for out in outs]
        ids, starts = np.array(block_ids, np.int64), np.array(addresses(slots), np.int64)
        poisoned = np.zeros(len(slots), np.int64)
        for loop in self._loops:
            loop.encode(ids, starts, poisoned)
        for slot, groups in zip(slots, poisoned.tolist(), strict=True):
            first = bytearray(header(self._layout, self._encoding, groups))
            slot[: HEADER.size].copy_(torch.frombuffer(first, dtype=torch.uint8))

    def scatter(self, block_ids: Sequence[int], slots: Sequence[Slot]) -> None:
        """As `reference.scatter`; slots start on 16-byte boundaries."""
        check_ids(self._layout, block_ids, len(slots))
        check_distinct(block_ids)
        sources = [as_bytes(slot, self.payload_bytes) for slot in slots]
        check_headers(sources, header(self._layout, self._encoding))
        ids, starts = np.array(block_ids, np.int64), np.array(addresses(sources), np.int64)
        for loop in self._loops:
            loop.decode(ids, starts)


class _Loop(NamedTuple):
    """One section's compiled loops with what they need besides blocks and slots."""

    section: Section
    page: torch.Tensor  # keeps the memory alive
    groups: Integers
    rows: Integers

    @classmethod
    def of(cls, section: Section, page: torch.Tensor) -> "_Loop":
        item, plane = page.element_size(), section.plane
        return cls(
            section,
            page,
            np.array(plane.groups, np.int64) * item,
            np.array(plane.rows, np.int64) * item,
        )

    def encode(self, ids: Integers, slots: Integers, poisoned: Integers) -> None:
        s, where = self.section, self._blocks(ids, slots)
        grid = (self.groups, self.rows, s.plane.width)
        if s.codec is Codec.EXACT:
            copier(self.page.dtype, to_slot=True)(*where, s.data, s.end, *grid)
            return
        loop = encoder(self.page.dtype, s.codec, column_scales=s.plane.column_scales)
        loop(*where, s.scales, s.data, s.end, *grid, poisoned)

    def decode(self, ids: Integers, slots: Integers) -> None:
        s, where = self.section, self._blocks(ids, slots)
        grid = (self.groups, self.rows, s.plane.width)
        if s.codec is Codec.EXACT:
            copier(self.page.dtype, to_slot=False)(*where, s.data, s.end, *grid)
            return
        loop = decoder(self.page.dtype, s.codec, column_scales=s.plane.column_scales)
        loop(*where, s.scales, s.data, *grid)

    def _blocks(self, ids: Integers, slots: Integers) -> tuple[int, int, Integers, Integers]:
        return (self.page.data_ptr(), self.page.stride(0) * self.page.element_size(), ids, slots)
