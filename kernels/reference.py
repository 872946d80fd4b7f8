"""The specification of gather and scatter: plain torch, one page at a time, slow and obvious.

Every faster path must move the same bytes; encoded payloads are defined in `encoding`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from prefixfleet.kernels.encoding import (
    HEADER,
    LARGEST,
    LIMIT,
    SMALLEST_SCALE,
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
from prefixfleet.kernels.slots import Slot, as_bytes, check_distinct, check_headers, check_ids

_FORMAT = {Codec.INT8: torch.int8, Codec.FP8: torch.float8_e4m3fn}


def gather(
    caches: Mapping[str, torch.Tensor],
    layout: PagedLayout,
    block_ids: Sequence[int],
    outs: Sequence[Slot],
    encoding: str = "exact",
) -> None:
    """Copy block ``block_ids[i]`` of the paged KV into ``outs[i]``, encoded.

    Each out is `encoded_bytes` writable bytes: a contiguous uint8 tensor on the CPU or on the
    caches' device, or a memoryview of a slot's payload. An id may come twice.

    Raises:
        ValueError: a length, dtype or id does not fit; then nothing was written.
    """
    check_ids(layout, block_ids, len(outs))
    slots = [as_bytes(out, encoded_bytes(layout, encoding)) for out in outs]
    views = block_views(caches, layout)
    for block, slot in zip(block_ids, slots, strict=True):
        if encoding == "exact":
            for view, part in zip(views, _pages(slot, layout), strict=True):
                part.copy_(_to_bytes(view[block].contiguous()))
        else:
            _encode_block([view[block] for view in views], layout, slot, encoding)


def scatter(
    caches: Mapping[str, torch.Tensor],
    layout: PagedLayout,
    block_ids: Sequence[int],
    slots: Sequence[Slot],
    encoding: str = "exact",
) -> None:
    """Decode ``slots[i]`` into block ``block_ids[i]`` of the paged KV; the inverse of `gather`.

    Raises:
        ValueError: as `gather`; an id comes twice (which bytes would win is undefined); a
            payload's header is not the expected one. Nothing was written then.
    """
    check_ids(layout, block_ids, len(slots))
    check_distinct(block_ids)
    sources = [as_bytes(slot, encoded_bytes(layout, encoding)) for slot in slots]
    views = block_views(caches, layout)
    if encoding == "exact":
        for block, slot in zip(block_ids, sources, strict=True):
            for view, part in zip(views, _pages(slot, layout), strict=True):
                view[block].copy_(_from_bytes(part, view.dtype).view(view[block].shape))
        return
    check_headers(sources, header(layout, encoding_of(encoding)))
    for block, slot in zip(block_ids, sources, strict=True):
        for plane in _parts([view[block] for view in views], layout, encoding):
            plane.elements[plane.where] = _decode(slot, plane)


def encode_plane(
    x: torch.Tensor, codec: Codec, *, column_scales: bool
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(elements, float32 scales, poisoned groups) of ``x[groups, rows, run]``."""
    x = x.to(torch.float32)
    largest = x.abs().amax(dim=(1,) if column_scales else (1, 2), keepdim=True)
    finite = largest < LIMIT  # false for a NaN too
    scale = (largest * torch.tensor(1 / LARGEST[codec])).clamp(min=SMALLEST_SCALE)
    scale = torch.where(finite, scale, torch.nan)
    # one reciprocal a group, then products: what every kernel does, so that all round alike
    y = torch.where(finite, x * (1 / scale), 0)
    q = (y.round() if codec is Codec.INT8 else y).to(_FORMAT[codec])
    return q, scale, int((~finite).flatten(1).any(1).sum())


class _Part(NamedTuple):
    """A section and its plane in the paged KV: ``elements[where]`` is [groups, rows, run]."""

    section: Section
    elements: torch.Tensor
    where: torch.Tensor


def _parts(pages: Sequence[torch.Tensor], layout: PagedLayout, encoding: str) -> Iterator[_Part]:
    for section in sections(layout, encoding_of(encoding)):
        page = pages[section.page]
        span = 1 + sum((n - 1) * s for n, s in zip(page.shape, page.stride(), strict=True))
        flat = page.as_strided((span,), (1,), page.storage_offset())
        yield _Part(section, flat, _where(section.plane).to(flat.device))


def _where(plane: Plane) -> torch.Tensor:
    groups, rows = torch.tensor(plane.groups), torch.tensor(plane.rows)
    return groups[:, None, None] + rows[None, :, None] + torch.arange(plane.width)


def _encode_block(
    pages: Sequence[torch.Tensor], layout: PagedLayout, slot: torch.Tensor, encoding: str
) -> None:
    slot.zero_()
    poisoned = 0
    for section, elements, where in _parts(pages, layout, encoding):
        x, codec = elements[where], section.codec
        if codec is Codec.EXACT:
            _put(slot, section.data, x)
            continue
        q, scale, bad = encode_plane(x, codec, column_scales=section.plane.column_scales)
        _put(slot, section.scales, scale)
        _put(slot, section.data, q)
        poisoned += bad
    first = bytearray(poisoned_header(header(layout, encoding_of(encoding)), poisoned))
    slot[: HEADER.size].copy_(torch.frombuffer(first, dtype=torch.uint8))


def _decode(slot: torch.Tensor, part: _Part) -> torch.Tensor:
    section, plane, dtype = part.section, part.section.plane, part.elements.dtype
    stored = _FORMAT.get(section.codec, dtype)
    data = slot[section.data :][: plane.num_elements * stored.itemsize]
    q = _from_bytes(data, stored).view(part.where.shape)
    if section.codec is Codec.EXACT:
        return q
    scales = slot[section.scales :][: 4 * plane.num_scales]
    shape = (len(plane.groups), 1, plane.width if plane.column_scales else 1)
    return (q.to(torch.float32) * _from_bytes(scales, torch.float32).view(shape)).to(dtype)


def _pages(slot: torch.Tensor, layout: PagedLayout) -> Sequence[torch.Tensor]:
    return torch.split(slot, [page.page_bytes for page in layout.pages])


def _put(slot: torch.Tensor, offset: int, x: torch.Tensor) -> None:
    data = _to_bytes(x)
    slot[offset : offset + data.numel()].copy_(data)


def _to_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().flatten().view(torch.uint8)


def _from_bytes(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return data.clone().view(dtype)  # a slot may start at any address, an element must be aligned
