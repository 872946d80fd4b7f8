"""The Triton kernels, compiled for real GPUs; run by `test_triton`."""

import re

import pytest
import triton
from triton import language as tl
from triton.backends.compiler import GPUTarget

from prefixfleet.kernels import triton_kernels

TABLES = {
    "pages", "block_ids", "slots", "scales_bytes", "data_bytes", "part_bytes", "groups", "rows",
    "runs",
}  # fmt: skip


def compiled(kernel, capability, **constants):
    """PTX, from arguments as divisible as a launch finds them on real shapes."""
    names = kernel.arg_names
    kinds = {
        name: "constexpr" if name in constants
        else "*i64" if name in TABLES
        else "*i32" if name in ("poisoned", "template")
        else "i64" if name == "block_bytes"
        else "i32"
        for name in names
    }  # fmt: skip
    divisible = [
        i for i, name in enumerate(names)
        if kinds[name].startswith("*") or name in ("block_bytes", "num_rows", "width", "length")
    ]  # fmt: skip
    source = triton.compiler.ASTSource(
        kernel,
        kinds,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in divisible},
    )
    options = {"num_warps": 4, "enable_fp_fusion": False}
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=options).asm["ptx"]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kernel", ["encode", "decode", "copy"])
def test_kernels_compile_for_gpus_with_16_byte_accesses(kernel, capability):
    plane = {"KV": tl.bfloat16, "COLUMNS": True, "ROWS": 16, "WIDTH": 128, "ALIGN": 8}
    constants = {
        "encode": {**plane, "INT8": False, "RATIO": 1 / 448},
        "decode": {**plane, "INT8": True},
        "copy": {"ITEM": tl.int64, "TILE": 2048, "ALIGN": 2, "TO_SLOT": True},
    }[kernel]

    ptx = compiled(getattr(triton_kernels, f"{kernel}_kernel"), capability, **constants)

    assert re.search(r"ld\.global\.v(4\.b32|2\.b64)", ptx)
    assert re.search(r"st\.global\.v(4\.b32|2\.b64)", ptx)
    assert "fma.rn.f32" not in ptx  # would round other than the reference
