"""Compiled CPU loops that encode, decode or copy one plane of many blocks, between addresses.

They see memory as integers: the caller has checked every id, size and payload, and keeps the
memory alive. A group is read from memory once, then from the cache. They release the GIL.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN202 - numba infers the types of what it compiles

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types

from prefixfleet.kernels.cpu_elements import FORMATS, QUANTISE, RESTORE, convert
from prefixfleet.kernels.encoding import LARGEST, LIMIT, SMALLEST_SCALE, Codec

_compiled = njit(nogil=True)
_f32 = np.float32


def _pointer(element: Any, bits: int) -> Any:  # noqa: ANN401 - numba's types
    llvm = ir.FloatType() if element is types.float32 else ir.IntType(bits)
    target = llvm.as_pointer()
    return convert(types.CPointer(element), types.int64, lambda b, x: b.inttoptr(x, target))


_bytes_at = _pointer(types.uint8, 8)
_floats_at = _pointer(types.float32, 32)
_elements_at = {t: _pointer(t, t.bitwidth) for t in (types.uint16, types.uint32)}


@_compiled
def _zero(start, end):
    gap = carray(_bytes_at(start), (end - start,))
    gap[:] = 0


@cache
def encoder(dtype: torch.dtype, codec: Codec, *, column_scales: bool) -> Any:  # noqa: ANN401
    """Compiled loop over ``(page, block_bytes, ids, slots, scales, data, end, groups, rows,
    width, poisoned)``: encodes one section of each slot.

    ``page`` and ``slots`` are addresses; the others are bytes, but ``width`` counts elements;
    ``poisoned[i]`` grows by the groups of block ``i`` that 8 bits cannot hold.
    """
    return _column_encoder(dtype, codec) if column_scales else _group_encoder(dtype, codec)


def _group_encoder(dtype: torch.dtype, codec: Codec) -> Any:  # noqa: ANN401
    kv, quantise = FORMATS[dtype], QUANTISE[codec]
    at, raw, load, magnitude = _elements_at[kv.raw], kv.raw, kv.load, kv.magnitude
    ratio, limit, least = _f32(1 / LARGEST[codec]), _f32(LIMIT), _f32(SMALLEST_SCALE)

    def encode(page, block_bytes, ids, slots, scales, data, end, groups, rows, width, poisoned):
        for n in range(ids.size):
            block, to = page + ids[n] * block_bytes, slots[n] + data
            scale = carray(_floats_at(slots[n] + scales), (groups.size,))
            _zero(slots[n] + scales + 4 * groups.size, to)
            for g in range(groups.size):
                top = raw(0)
                for r in range(rows.size):
                    x = carray(at(block + groups[g] + rows[r]), (width,))
                    for i in range(width):
                        top = max(top, raw(x[i] & raw(magnitude)))
                largest = load(top)
                finite = largest < limit
                poisoned[n] += not finite
                scale[g] = max(largest * ratio, least) if finite else _f32(np.nan)
                inverse = _f32(1) / scale[g]
                for r in range(rows.size):
                    x = carray(at(block + groups[g] + rows[r]), (width,))
                    q = carray(_bytes_at(to), (width,))
                    for i in range(width):
                        q[i] = quantise(load(x[i]) * inverse)
                    to += width
            _zero(to, slots[n] + end)

    return _compiled(encode)


def _column_encoder(dtype: torch.dtype, codec: Codec) -> Any:  # noqa: ANN401
    kv, quantise = FORMATS[dtype], QUANTISE[codec]
    at, raw, load, magnitude = _elements_at[kv.raw], kv.raw, kv.load, kv.magnitude
    ratio, limit, least = _f32(1 / LARGEST[codec]), _f32(LIMIT), _f32(SMALLEST_SCALE)

    def encode(page, block_bytes, ids, slots, scales, data, end, groups, rows, width, poisoned):
        top, inverse = np.empty(width, raw), np.empty(width, np.float32)
        for n in range(ids.size):
            block, to = page + ids[n] * block_bytes, slots[n] + data
            _zero(slots[n] + scales + 4 * groups.size * width, to)
            for g in range(groups.size):
                scale = carray(_floats_at(slots[n] + scales + 4 * g * width), (width,))
                top[:] = 0
                for r in range(rows.size):
                    x = carray(at(block + groups[g] + rows[r]), (width,))
                    for i in range(width):
                        top[i] = max(top[i], raw(x[i] & raw(magnitude)))
                finite = True
                for i in range(width):
                    largest = load(top[i])
                    good = largest < limit
                    finite &= good
                    scale[i] = max(largest * ratio, least) if good else _f32(np.nan)
                    inverse[i] = _f32(1) / scale[i]
                poisoned[n] += not finite
                for r in range(rows.size):
                    x = carray(at(block + groups[g] + rows[r]), (width,))
                    q = carray(_bytes_at(to), (width,))
                    for i in range(width):
                        q[i] = quantise(load(x[i]) * inverse[i])
                    to += width
            _zero(to, slots[n] + end)

    return _compiled(encode)


@cache
def decoder(dtype: torch.dtype, codec: Codec, *, column_scales: bool) -> Any:  # noqa: ANN401
    """Compiled loop over ``(page, block_bytes, ids, slots, scales, data, groups, rows, width)``:
    decodes one section of each slot into its block.
    """
    kv, restore = FORMATS[dtype], RESTORE[codec]
    at, store = _elements_at[kv.raw], kv.store

    def decode(page, block_bytes, ids, slots, scales, data, groups, rows, width):
        step = width if column_scales else 1
        for n in range(ids.size):
            block, source = page + ids[n] * block_bytes, slots[n] + data
            for g in range(groups.size):
                scale = carray(_floats_at(slots[n] + scales + 4 * g * step), (step,))
                for r in range(rows.size):
                    x = carray(at(block + groups[g] + rows[r]), (width,))
                    q = carray(_bytes_at(source), (width,))
                    for i in range(width):
                        x[i] = store(restore(q[i]) * scale[i if column_scales else 0])
                    source += width

    return _compiled(decode)


class Kind(NamedTuple):
    """What a section's loops are compiled for."""

    dtype: torch.dtype
    codec: Codec
    column_scales: bool


@cache
def sections_encoder(kinds: tuple[Kind, Kind]) -> Any:  # noqa: ANN401
    """Compiled loop over ``(ids, slots, table, offsets, poisoned)``: encodes every section.

    A row of ``table`` is one section: which of ``kinds``, page, block_bytes, scales, data, end,
    width as in `encoder`, then from where to where its groups and its rows are in ``offsets``.
    """
    one, other = (encoder(k.dtype, k.codec, column_scales=k.column_scales) for k in kinds)

    def encode(ids, slots, table, offsets, poisoned):
        for t in table:
            kind, page, size, scales, data, end = t[0], t[1], t[2], t[3], t[4], t[5]
            width, groups, rows = t[6], offsets[t[7] : t[8]], offsets[t[9] : t[10]]
            if kind == 0:
                one(page, size, ids, slots, scales, data, end, groups, rows, width, poisoned)
            else:
                other(page, size, ids, slots, scales, data, end, groups, rows, width, poisoned)

    return _compiled(encode)


@cache
def sections_decoder(kinds: tuple[Kind, Kind]) -> Any:  # noqa: ANN401
    """As `sections_encoder`, over ``(ids, slots, table, offsets)``: decodes every section."""
    one, other = (decoder(k.dtype, k.codec, column_scales=k.column_scales) for k in kinds)

    def decode(ids, slots, table, offsets):
        for t in table:
            kind, page, size, scales, data = t[0], t[1], t[2], t[3], t[4]
            width, groups, rows = t[6], offsets[t[7] : t[8]], offsets[t[9] : t[10]]
            if kind == 0:
                one(page, size, ids, slots, scales, data, groups, rows, width)
            else:
                other(page, size, ids, slots, scales, data, groups, rows, width)

    return _compiled(decode)


@cache
def copier(*, to_slot: bool) -> Any:  # noqa: ANN401
    """Compiled loop over ``(ids, slots, runs, block_bytes, parts, lengths, gaps, gap_ends)``:
    copies exact bytes of each block, in the order of the slot.

    Run ``r`` of block ``b`` is ``lengths[r]`` bytes at ``runs[r] + b * block_bytes[r]``, and
    lies at ``parts[r]`` in its slot; to a slot, bytes from ``gaps`` to ``gap_ends`` become zero.
    """

    def copy(ids, slots, runs, block_bytes, parts, lengths, gaps, gap_ends):
        for n in range(ids.size):
            for r in range(runs.size):
                x = carray(_bytes_at(runs[r] + ids[n] * block_bytes[r]), (lengths[r],))
                y = carray(_bytes_at(slots[n] + parts[r]), (lengths[r],))
                source, target = (x, y) if to_slot else (y, x)
                for i in range(lengths[r]):  # becomes vectors; assigning a slice does not
                    target[i] = source[i]
            for g in range(gaps.size if to_slot else 0):
                _zero(slots[n] + gaps[g], slots[n] + gap_ends[g])

    return _compiled(copy)
