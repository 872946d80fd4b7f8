"""Gather and scatter of 8-bit blocks on the CPU: one compiled pass, bits as in `reference`.

Import it after the engine has started: vLLM 0.32's CPU worker looks through all modules when it
starts, and fails on those of llvmlite, which come with numba.
"""

from collections.abc import Mapping, Sequence
from itertools import product
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
    poisoned_header,
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
    """Moves blocks of one set of caches. Holds views of them and nothing else; thread-safe.

    Making one compiles its loops, once a process: a second or two.

    Raises:
        ValueError: the layout cannot be held in this encoding.
    """

    def __init__(
        self, caches: Mapping[str, torch.Tensor], layout: PagedLayout, encoding: str
    ) -> None:
        chosen = encoding_of(encoding)
        self._layout = layout
        self._views = block_views(caches, layout)  # keeps alive what the loops know by address
        parts = sections(layout, chosen)
        self._exact = _Runs.of([s for s in parts if s.codec is Codec.EXACT], self._views)
        self._loops = [
            _Loop.of(s, self._views[s.page]) for s in parts if s.codec is not Codec.EXACT
        ]
        self._header = header(layout, chosen)
        self.payload_bytes = encoded_bytes(layout, encoding)
        self.gather([], [])  # compiles now, not while a request waits
        self.scatter([], [])

    def gather(self, block_ids: Sequence[int], outs: Sequence[Slot]) -> None:
        """As `reference.gather`; slots start on 16-byte boundaries."""
        check_ids(self._layout, block_ids, len(outs))
        slots = [as_bytes(out, self.payload_bytes) for out in outs]
        ids, starts = _tables(block_ids, slots)
        poisoned = np.zeros(len(slots), np.int64)
        copier(to_slot=True)(ids, starts, *self._exact)
        for loop in self._loops:
            loop.encode(ids, starts, poisoned)
        for slot, groups in zip(slots, poisoned.tolist(), strict=True):
            first = bytearray(poisoned_header(self._header, groups))
            slot[: HEADER.size].copy_(torch.frombuffer(first, dtype=torch.uint8))

    def scatter(self, block_ids: Sequence[int], slots: Sequence[Slot]) -> None:
        """As `reference.scatter`; slots start on 16-byte boundaries."""
        check_ids(self._layout, block_ids, len(slots))
        check_distinct(block_ids)
        sources = [as_bytes(slot, self.payload_bytes) for slot in slots]
        ids, starts = _tables(block_ids, sources)
        check_headers(sources, self._header)
        copier(to_slot=False)(ids, starts, *self._exact)
        for loop in self._loops:
            loop.decode(ids, starts)


def _tables(block_ids: Sequence[int], slots: Sequence[torch.Tensor]) -> tuple[Integers, Integers]:
    return np.array(block_ids, np.int64), np.array(addresses(slots), np.int64)


class _Runs(NamedTuple):
    """Tables of `copier`: where runs of exact bytes start, and where they lie in a slot."""

    starts: Integers
    block_bytes: Integers
    parts: Integers
    lengths: Integers
    gaps: Integers
    gap_ends: Integers

    @classmethod
    def of(cls, exact: Sequence[Section], views: Sequence[torch.Tensor]) -> "_Runs":
        runs, gaps = [], []
        for section in exact:
            view, plane = views[section.page], section.plane
            item, length = view.element_size(), plane.width * view.element_size()
            for i, start in enumerate(map(sum, product(plane.groups, plane.rows))):
                at = view.data_ptr() + start * item
                runs.append((at, _block_bytes(view), section.data + i * length, length))
            gaps.append((section.data + plane.num_elements * item, section.end))
        columns = np.array(runs, np.int64).reshape(-1, 4).T.copy()
        return cls(*columns, *np.array(gaps, np.int64).reshape(-1, 2).T.copy())


class _Loop(NamedTuple):
    """One section's compiled loops with what they need besides blocks and slots."""

    section: Section
    dtype: torch.dtype
    page: int
    block_bytes: int
    groups: Integers
    rows: Integers

    @classmethod
    def of(cls, section: Section, view: torch.Tensor) -> "_Loop":
        item, plane = view.element_size(), section.plane
        groups = np.array(plane.groups, np.int64) * item
        rows = np.array(plane.rows, np.int64) * item
        return cls(section, view.dtype, view.data_ptr(), _block_bytes(view), groups, rows)

    def encode(self, ids: Integers, slots: Integers, poisoned: Integers) -> None:
        s, plane = self.section, self.section.plane
        encoder(self.dtype, s.codec, column_scales=plane.column_scales)(
            self.page, self.block_bytes, ids, slots, s.scales, s.data, s.end,
            self.groups, self.rows, plane.width, poisoned,
        )  # fmt: skip

    def decode(self, ids: Integers, slots: Integers) -> None:
        s, plane = self.section, self.section.plane
        decoder(self.dtype, s.codec, column_scales=plane.column_scales)(
            self.page, self.block_bytes, ids, slots, s.scales, s.data,
            self.groups, self.rows, plane.width,
        )  # fmt: skip


def _block_bytes(view: torch.Tensor) -> int:
    return view.stride(0) * view.element_size()
