"""Triton kernels that copy, encode or decode planes between paged KV and slots, by address.

One program serves one group (or run) of one page of one block. Pages and slots are tables of
64-bit addresses, so a launch covers any number of layers, allocations and slots. ``KV`` is the KV
dtype. Names in ``_bytes`` count bytes, all others elements; ``ALIGN``, in elements, divides the
start of every run.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202 - Triton infers the types of what it compiles

import triton
import triton.language as tl


@triton.jit
def _address(pages, block_ids, block_bytes, page, block, KV: tl.constexpr, ALIGN: tl.constexpr):
    """Where one page of one block starts."""
    start = tl.load(pages + page) + tl.load(block_ids + block) * block_bytes
    # says how wide loads may be: the compiler cannot know it of an address that was loaded
    return tl.multiple_of(start.to(tl.pointer_type(KV)), ALIGN * (KV.primitive_bitwidth // 8))


@triton.jit
def _in_slot(slots, block, part_bytes, page, T: tl.constexpr, MULTIPLE: tl.constexpr):
    """Where a page's part of a slot starts, an address that ``MULTIPLE`` divides."""
    start = tl.load(slots + block) + tl.load(part_bytes + page)
    return tl.multiple_of(start.to(tl.pointer_type(T)), MULTIPLE)


@triton.jit
def _zero(start, gap_bytes):
    i = tl.arange(0, 16)
    tl.store(start.to(tl.pointer_type(tl.int8)) + i, tl.zeros([16], tl.int8), mask=i < gap_bytes)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _to_8_bits(y, INT8: tl.constexpr):
    """Bytes of float32 ``y``, in range; to nearest, ties to even. Explained in `cpu_elements`."""
    if INT8:
        return _bits(y + 12582912.0).to(tl.int8)
    else:
        u = _bits(y)
        a = u & 0x7FFFFFFF
        normal = ((a + 0x7FFFF + ((a >> 20) & 1)) >> 20) - 960
        denormal = _bits(a.to(tl.float32, bitcast=True) + 16384.0) - 0x46800000
        return (tl.where(a < 0x3C800000, denormal, normal) | ((u >> 24) & 0x80)).to(tl.int8)


@triton.jit
def _from_8_bits(q, INT8: tl.constexpr):
    if INT8:
        return q.to(tl.float32)
    else:
        b = q.to(tl.int32)
        m = b & 0x7F
        normal = (m << 20) + 0x3C000000
        denormal = _bits(m.to(tl.float32) * 0.001953125)
        u = tl.where(m < 8, denormal, normal) | ((b & 0x80) << 24)
        return u.to(tl.float32, bitcast=True)


@triton.jit
def _to_kv(x, KV: tl.constexpr):
    if tl.bfloat16 == KV:  # by hand: Triton's interpreter cuts off where GPUs round
        u = _bits(x)
        return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(KV)


@triton.jit
def _tile(rows, r, num_rows, width, WIDTH: tl.constexpr, ALIGN: tl.constexpr):
    """Offsets in the page, offsets in the payload, and the mask of rows ``r``."""
    i = tl.arange(0, WIDTH)
    starts = tl.multiple_of(tl.load(rows + r, mask=r < num_rows, other=0), [ALIGN])
    mask = (r < num_rows)[:, None] & (i < width)[None, :]
    return starts[:, None] + i[None, :], r[:, None] * width + i[None, :], mask


@triton.jit
def encode_kernel(
    pages, block_bytes, block_ids, slots, scales_bytes, data_bytes, groups, rows, poisoned,
    num_groups, num_rows, width, scale_gap_bytes, data_gap_bytes,
    KV: tl.constexpr, INT8: tl.constexpr, COLUMNS: tl.constexpr, RATIO: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Grid (groups x blocks, pages). Adds the groups that 8 bits cannot hold to ``poisoned``."""
    group = tl.program_id(0) % num_groups
    block = tl.program_id(0) // num_groups
    page = tl.program_id(1)
    x_at = _address(pages, block_ids, block_bytes, page, block, KV, ALIGN)
    x_at += tl.multiple_of(tl.load(groups + group), ALIGN)
    scales = _in_slot(slots, block, scales_bytes, page, tl.float32, 16)
    data = _in_slot(slots, block, data_bytes, page, tl.int8, 16)

    top = tl.zeros([WIDTH], tl.int32)
    for first in range(0, num_rows, ROWS):
        r = first + tl.arange(0, ROWS)
        at, _, mask = _tile(rows, r, num_rows, width, WIDTH, ALIGN)
        x = tl.load(x_at + at, mask=mask, other=0.0).to(tl.float32)
        top = tl.maximum(top, tl.max(_bits(x) & 0x7FFFFFFF, axis=0))
    if not COLUMNS:
        top = tl.zeros([WIDTH], tl.int32) + tl.max(top, axis=0)
    largest = top.to(tl.float32, bitcast=True)
    finite = largest < 1.7014118346046923e38  # 2**127; false for a NaN too
    scale = tl.where(finite, tl.maximum(largest * RATIO, 1.1754943508222875e-38), float("nan"))
    inverse = tl.div_rn(tl.full([WIDTH], 1.0, tl.float32), scale)

    i = tl.arange(0, WIDTH)
    if COLUMNS:
        tl.store(scales + group * width + i, scale, mask=i < width)
        num_scales = num_groups * width
    else:
        tl.store(scales + group + i, scale, mask=i < 1)
        num_scales = num_groups
    bad = tl.max(tl.where(finite, 0, 1), axis=0)
    tl.atomic_add(poisoned + block, bad, mask=bad > 0)
    for first in range(0, num_rows, ROWS):
        r = first + tl.arange(0, ROWS)
        at, to, mask = _tile(rows, r, num_rows, width, WIDTH, ALIGN)
        x = tl.load(x_at + at, mask=mask, other=0.0).to(tl.float32)
        q = _to_8_bits(x * inverse[None, :], INT8)
        tl.store(data + group * num_rows * width + to, q, mask=mask)
    if group == 0:
        _zero(scales + num_scales, scale_gap_bytes)
        _zero(data + num_groups * num_rows * width, data_gap_bytes)


@triton.jit
def decode_kernel(
    pages, block_bytes, block_ids, slots, scales_bytes, data_bytes, groups, rows,
    num_groups, num_rows, width,
    KV: tl.constexpr, INT8: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Grid (groups x blocks, pages, row tiles)."""
    group = tl.program_id(0) % num_groups
    block = tl.program_id(0) // num_groups
    page = tl.program_id(1)
    x_at = _address(pages, block_ids, block_bytes, page, block, KV, ALIGN)
    x_at += tl.multiple_of(tl.load(groups + group), ALIGN)
    scales = _in_slot(slots, block, scales_bytes, page, tl.float32, 16)
    data = _in_slot(slots, block, data_bytes, page, tl.int8, 16)

    i = tl.arange(0, WIDTH)
    if COLUMNS:
        scale = tl.load(scales + group * width + i, mask=i < width, other=0.0)
    else:
        scale = tl.zeros([WIDTH], tl.float32) + tl.load(scales + group)
    r = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    at, source, mask = _tile(rows, r, num_rows, width, WIDTH, ALIGN)
    q = tl.load(data + group * num_rows * width + source, mask=mask, other=0)
    tl.store(x_at + at, _to_kv(_from_8_bits(q, INT8) * scale[None, :], KV), mask=mask)


@triton.jit
def copy_kernel(
    pages, block_bytes, block_ids, slots, part_bytes, runs, num_runs, length, gap_bytes,
    ITEM: tl.constexpr, TILE: tl.constexpr, ALIGN: tl.constexpr, TO_SLOT: tl.constexpr,
):  # fmt: skip
    """Grid (runs x tiles of a run, pages, blocks): runs of ``length`` items, packed in the slot."""
    run = tl.program_id(0) % num_runs
    tile = tl.program_id(0) // num_runs
    page, block = tl.program_id(1), tl.program_id(2)
    start = _address(pages, block_ids, block_bytes, page, block, ITEM, ALIGN)
    start += tl.multiple_of(tl.load(runs + run), ALIGN)
    multiple: tl.constexpr = ALIGN * (ITEM.primitive_bitwidth // 8)
    part = _in_slot(slots, block, part_bytes, page, ITEM, multiple)
    i = tile * TILE + tl.arange(0, TILE)
    if TO_SLOT:
        tl.store(part + run * length + i, tl.load(start + i, mask=i < length), mask=i < length)
        if tl.program_id(0) == 0:
            _zero(part + num_runs * length, gap_bytes)
    else:
        tl.store(start + i, tl.load(part + run * length + i, mask=i < length), mask=i < length)


@triton.jit
def seal_kernel(slots, template, poisoned, COUNT_AT: tl.constexpr):
    """Grid (blocks): the 16 words of the header, the count of poisoned groups among them."""
    block = tl.program_id(0)
    i = tl.arange(0, 16)
    words = tl.where(i == COUNT_AT, tl.load(poisoned + block), tl.load(template + i))
    tl.store(tl.load(slots + block).to(tl.pointer_type(tl.int32)) + i, words)
