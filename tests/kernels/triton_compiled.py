"""The Triton kernels, compiled for real GPUs; run by `test_triton`."""

import re
import sys
from pathlib import Path

import pytest
import torch
import triton
from triton import language as tl
from triton.backends.compiler import GPUTarget

from prefixfleet.kernels import triton_kernels, triton_launch, triton_mover
from prefixfleet.kernels.paged import PagedLayout

sys.path.append(str(Path(__file__).parents[2]))

from tests.bench.kernels import SHAPES, names_for

TABLES = {
    "pages", "block_ids", "slots", "scales_bytes", "data_bytes", "part_bytes", "groups", "rows",
    "runs",
}  # fmt: skip


KERNELS = ("copy_kernel", "encode_kernel", "decode_kernel", "seal_kernel")


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


class Launches:
    """Stands for a kernel; compiles for a GPU what is launched, as Triton would there."""

    def __init__(self, kernel):
        self._kernel = kernel
        self.seen = set()

    def __getitem__(self, grid):
        x, y, z = (*grid, 1, 1)[:3]
        assert 0 < x < 1 << 31
        assert 0 < y < 1 << 16
        assert 0 < z < 1 << 16
        return self._launch

    def _launch(self, *values, **named):
        options = {"num_warps": 4, "enable_fp_fusion": named.pop("enable_fp_fusion", True)}
        names = self._kernel.arg_names
        given = dict(zip(names, values, strict=False)) | named
        constants = {
            n: v for n, v in given.items() if self._is_constant(n) or (type(v) is int and v == 1)
        }
        kinds = {n: "constexpr" if n in constants else kind_of(given[n]) for n in names}
        divisible = tuple(i for i, n in enumerate(names) if kinds[n][0] in "*i" and by_16(given[n]))
        key = (*kinds.items(), *((n, str(v)) for n, v in constants.items()), divisible)
        if key in self.seen:
            return
        self.seen.add(key)
        source = triton.compiler.ASTSource(
            self._kernel,
            kinds,
            constexprs={(names.index(n),): v for n, v in constants.items()},
            attrs={(i,): [["tt.divisibility", 16]] for i in divisible},
        )
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert made.metadata.shared <= 227 << 10  # bytes of an H100 that one program may have

    def _is_constant(self, name):
        return self._kernel.params[self._kernel.arg_names.index(name)].is_constexpr


def kind_of(value):
    if isinstance(value, torch.Tensor):
        return {torch.int64: "*i64", torch.int32: "*i32"}[value.dtype]
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"


def by_16(value):
    return (value.data_ptr() if isinstance(value, torch.Tensor) else value) % 16 == 0


@pytest.mark.parametrize("shape", ["llama-3-70b tp8 16", "deepseek-v3 mla 64"])
def test_launches_for_real_models_compile_as_a_gpu_would_compile_them(monkeypatch, shape):
    kernels = {name: Launches(getattr(triton_kernels, name)) for name in KERNELS}
    for name in ("copy_kernel", "encode_kernel", "decode_kernel"):
        monkeypatch.setattr(triton_launch, name, kernels[name])
    monkeypatch.setattr(triton_mover, "seal_kernel", kernels["seal_kernel"])
    make, _ = SHAPES[shape]
    tensors, content = make(3, "cpu")
    caches = {f"layers.{i}": tensor for i, tensor in enumerate(tensors)}
    layout = PagedLayout.from_tensors(caches, content=content)

    for encoding in names_for(layout):
        mover = triton_mover.TritonMover(caches, layout, encoding)
        slots = [torch.empty(mover.payload_bytes, dtype=torch.uint8) for _ in range(2)]
        mover.gather([2, 0], slots)
        mover.scatter([1, 2], slots)

    assert all(kernel.seen for kernel in kernels.values())
