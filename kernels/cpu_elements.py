"""One element between a KV dtype, float32 and 8 bits, in forms that LLVM turns into vectors.

numba widens each integer operation to 64 bits unless its result is cast back, hence `_u32` at
every step. The formulas equal torch's conversions bit for bit; the tests compare all of them.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN202 - numba infers the types of what it compiles

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from prefixfleet.kernels.encoding import Codec

_u8, _u16, _u32, _f32 = np.uint8, np.uint16, np.uint32, np.float32
_inline = njit(inline="always")


def convert(result: Any, argument: Any, emit: Callable[[Any, Any], Any]) -> Any:  # noqa: ANN401
    """A numba function of one argument from the LLVM instruction that ``emit`` builds."""

    def typer(_context, _x):
        return result(argument), lambda _c, builder, _s, args: emit(builder, args[0])

    return intrinsic(typer)


_INT16, _INT32, _HALF, _FLOAT = ir.IntType(16), ir.IntType(32), ir.HalfType(), ir.FloatType()
_bits = convert(types.uint32, types.float32, lambda b, x: b.bitcast(x, _INT32))
_from_bits = convert(types.float32, types.uint32, lambda b, x: b.bitcast(x, _FLOAT))
_from_half = convert(types.float32, types.uint16, lambda b, x: b.fpext(b.bitcast(x, _HALF), _FLOAT))
_to_half = convert(types.uint16, types.float32, lambda b, x: b.bitcast(b.fptrunc(x, _HALF), _INT16))


@_inline
def _from_bfloat(x):
    return _from_bits(_u32(_u32(x) << _u32(16)))


@_inline
def _to_bfloat(x):
    u = _bits(x)
    odd = _u32(_u32(u >> _u32(16)) & _u32(1))
    return _u16(_u32(_u32(u + _u32(0x7FFF)) + odd) >> _u32(16))  # nearest, ties to even


@_inline
def _to_int8(y):
    return _u8(_bits(y + _f32(1.5 * 2**23)))  # the sum's low bits are round(y), ties to even


@_inline
def _from_int8(q):
    return _f32(np.int8(q))


@_inline
def _to_fp8(y):
    u = _bits(y)
    sign = _u32(_u32(u >> _u32(24)) & _u32(0x80))
    u = _u32(u & _u32(0x7FFFFFFF))
    # steps are an eighth of the power of two, 2**-9 below 2**-6: as many as the last bits of the
    # sum with 2**20 times that power, ties to even
    power = max(_u32(u & _u32(0x7F800000)), _u32(121 << 23))
    large = _u32(power + _u32(20 << 23))
    steps = _u32(_bits(_f32(_from_bits(u) + _from_bits(large))) - large)
    return _u8(_u32(_u32(_u32(steps + _u32(power >> _u32(20))) - _u32(121 << 3)) | sign))


@_inline
def _from_fp8(q):
    m = _u32(_u32(q) & _u32(0x7F))
    sign = _u32(_u32(_u32(q) & _u32(0x80)) << _u32(24))
    normal = _u32(_u32(m << _u32(20)) + _u32(120 << 23))
    denormal = _bits(_f32(_f32(m) * _f32(2**-9)))
    return _from_bits(_u32(_u32(denormal if m < _u32(8) else normal) | sign))


@dataclass(frozen=True, slots=True)
class Format:
    """A KV dtype: its raw integer type, the bits of a magnitude, and both ways to float32."""

    raw: Any
    magnitude: int
    load: Any
    store: Any


FORMATS = {
    torch.float32: Format(types.uint32, 0x7FFFFFFF, _from_bits, _bits),
    torch.bfloat16: Format(types.uint16, 0x7FFF, _from_bfloat, _to_bfloat),
    torch.float16: Format(types.uint16, 0x7FFF, _from_half, _to_half),
}
QUANTISE = {Codec.INT8: _to_int8, Codec.FP8: _to_fp8}
RESTORE = {Codec.INT8: _from_int8, Codec.FP8: _from_fp8}
