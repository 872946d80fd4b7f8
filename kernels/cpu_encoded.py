"""Gather and scatter of 8-bit blocks on the CPU: one compiled pass, bits as in `reference`.

Import it after the engine has started: vLLM 0.32's CPU worker looks through all modules when it
starts, and fails on those of llvmlite, which come with numba.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from prefixfleet.kernels.cpu_planes import Kind, copier, sections_decoder, sections_encoder
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
from prefixfleet.kernels.planes import Plane
from prefixfleet.kernels.slots import (
    Slot,
    addresses,
    as_bytes,
    check_distinct,
    check_headers,
    check_ids,
)

Integers = npt.NDArray[np.int64]
_TOGETHER = 2


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
        self._encoded = _Sections.of([s for s in parts if s.codec is not Codec.EXACT], self._views)
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
        copy, (kinds, *tables) = copier(to_slot=True), self._encoded
        for few in _few_at_once(len(ids)):
            copy(ids[few], starts[few], *self._exact)
            sections_encoder(kinds)(ids[few], starts[few], *tables, poisoned[few])
        for slot, groups in zip(slots, poisoned.tolist(), strict=True):
            first = bytearray(poisoned_header(self._header, groups))
            slot[: HEADER.size].copy_(torch.frombuffer(first, dtype=torch.uint8))

    def check(self, slots: Sequence[Slot]) -> None:
        """As `BlockMover.check`; `scatter` does it too."""
        check_headers([as_bytes(slot, self.payload_bytes) for slot in slots], self._header)

    def scatter(self, block_ids: Sequence[int], slots: Sequence[Slot]) -> None:
        """As `reference.scatter`; slots start on 16-byte boundaries."""
        check_ids(self._layout, block_ids, len(slots))
        check_distinct(block_ids)
        sources = [as_bytes(slot, self.payload_bytes) for slot in slots]
        ids, starts = _tables(block_ids, sources)
        check_headers(sources, self._header)
        copy, (kinds, *tables) = copier(to_slot=False), self._encoded
        for few in _few_at_once(len(ids)):
            copy(ids[few], starts[few], *self._exact)
            sections_decoder(kinds)(ids[few], starts[few], *tables)


def _few_at_once(count: int) -> Iterator[slice]:
    """So few blocks that K's cache lines, which V shares, are still there when it is V's turn."""
    for first in range(0, count or 1, _TOGETHER):  # once for nothing: it compiles
        yield slice(first, first + _TOGETHER)


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


class _Sections(NamedTuple):
    """Tables of `sections_encoder`; K and V may be of two kinds, and are in all pages alike."""

    kinds: tuple[Kind, Kind]
    table: Integers
    offsets: Integers

    @classmethod
    def of(cls, encoded: Sequence[Section], views: Sequence[torch.Tensor]) -> "_Sections":
        kinds = list(dict.fromkeys(_kind(s, views) for s in encoded))
        if len(kinds) > 2:  # one for K and one for V is all that engines have
            raise ValueError(f"8-bit encodings: got pages of {len(kinds)} kinds; set 'exact'")
        offsets: list[int] = []
        places: dict[tuple[int, ...], tuple[int, int]] = {}
        rows = []
        for section in encoded:
            view, plane = views[section.page], section.plane
            item = view.element_size()
            where: list[int] = []
            one_run, width = _one_run(plane)
            for starts in (plane.groups, one_run):
                in_bytes = tuple(start * item for start in starts)
                if in_bytes not in places:
                    places[in_bytes] = (len(offsets), len(offsets) + len(in_bytes))
                    offsets.extend(in_bytes)
                where.extend(places[in_bytes])
            kind = kinds.index(_kind(section, views))
            at = (view.data_ptr(), _block_bytes(view), section.scales, section.data, section.end)
            rows.append((kind, *at, width, *where))
        table = np.array(rows, np.int64)
        return cls((kinds[0], kinds[-1]), table, np.array(offsets, np.int64))


def _one_run(plane: Plane) -> tuple[tuple[int, ...], int]:
    """(rows, width) of a plane, as one long row where a group's rows follow one another: a row of
    32 elements costs the loops as much to begin as to do.
    """
    step = plane.width
    if plane.column_scales or plane.rows != tuple(range(0, len(plane.rows) * step, step)):
        return plane.rows, step
    return (0,), len(plane.rows) * step


def _kind(section: Section, views: Sequence[torch.Tensor]) -> Kind:
    return Kind(views[section.page].dtype, section.codec, section.plane.column_scales)


def _block_bytes(view: torch.Tensor) -> int:
    return view.stride(0) * view.element_size()
