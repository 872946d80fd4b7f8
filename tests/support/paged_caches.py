"""Paged KV as each engine allocates it, with what the engine's adapter would state."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from prefixfleet.kernels.paged import Content, PagedLayout

Tensors = Sequence[torch.Tensor] | torch.Tensor
Made = tuple[Tensors, Content, str | None]  # a tensor a layer, and what the adapter states
Make = Callable[["Sizes", torch.dtype], Made]

VLLM_ORDERS = {  # physical order of [L, B, H, N, C], vLLM's v1/kv_cache_layout.py
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


class Sizes(NamedTuple):
    """Layers, blocks, KV heads, tokens of a block, channels of a head."""

    layers: int = 3
    blocks: int = 5
    heads: int = 2
    tokens: int = 4
    channels: int = 8


class Paged(NamedTuple):
    """The caches of one engine and their layout."""

    caches: dict[str, torch.Tensor]
    layout: PagedLayout


SMALL = Sizes()


def make_paged(kind: str, sizes: Sizes = SMALL, dtype: torch.dtype = torch.bfloat16) -> Paged:
    """Zeroed caches of one of `KINDS`."""
    tensors, content, axes = _KINDS[kind](sizes, dtype)
    caches = {f"layers.{i}": tensor for i, tensor in enumerate(tensors)}
    return Paged(caches, PagedLayout.from_tensors(caches, content=content, axes=axes))


def fill(caches: dict[str, torch.Tensor], seed: int = 0) -> None:
    """Normal noise, a few channels 30 times as large: K looks like that."""
    generator = torch.Generator().manual_seed(seed)
    for cache in caches.values():
        noise = torch.randn(cache.shape, generator=generator)
        noise[..., ::5] *= 30
        cache.copy_(noise)


def slots_for(payload_bytes: int, count: int) -> list[torch.Tensor]:
    """Slots full of old bytes."""
    return [torch.full((payload_bytes,), 0xA5, dtype=torch.uint8) for _ in range(count)]


def _vllm(order: str) -> Make:
    def make(sizes: Sizes, dtype: torch.dtype) -> Made:
        permutation = VLLM_ORDERS[order]
        logical_sizes = (*sizes[:4], 2 * sizes[4])
        memory = torch.zeros([logical_sizes[axis] for axis in permutation], dtype=dtype)
        logical = memory.permute([permutation.index(axis) for axis in range(5)])
        return logical, Content.PLAIN, None

    return make


def _vllm_cpu(sizes: Sizes, dtype: torch.dtype) -> Made:
    logical, _, _ = _vllm("LBHNC")(sizes, dtype)
    return logical, Content.KEYS_TRANSPOSED, None


def _stacked(axes: str, order: str = "") -> Make:
    """One tensor a layer, axes in logical order, memory in ``order``."""

    def make(sizes: Sizes, dtype: torch.dtype) -> Made:
        lengths = {"B": sizes.blocks, "N": sizes.tokens, "H": sizes.heads, "D": sizes.channels}
        lengths |= {"2": 2, "R": 2, "C": 2 * sizes.channels}
        physical = order or axes
        tensors = [
            torch.zeros([lengths[a] for a in physical], dtype=dtype).permute(
                [physical.index(a) for a in axes]
            )
            for _ in range(sizes.layers)
        ]
        return tensors, Content.PLAIN, axes

    return make


def _padded(sizes: Sizes, dtype: torch.dtype) -> Made:
    """vLLM's page_size_padded: a hole after each page."""
    page = sizes.heads * sizes.tokens * 2 * sizes.channels
    memory = torch.zeros(sizes.layers, sizes.blocks, page + 24, dtype=dtype)
    shape = (sizes.blocks, sizes.heads, sizes.tokens, 2 * sizes.channels)
    strides = torch.zeros(shape[1:]).stride()
    views = [m.as_strided(shape, (page + 24, *strides), m.storage_offset()) for m in memory]
    return views, Content.PLAIN, None


def _mla(sizes: Sizes, dtype: torch.dtype) -> Made:
    memory = torch.zeros(sizes.layers, sizes.blocks, sizes.tokens, sizes.channels, dtype=dtype)
    return list(memory), Content.LATENT, None


def _mla_vllm(sizes: Sizes, dtype: torch.dtype) -> Made:
    memory = torch.zeros(sizes.layers, sizes.blocks, 1, sizes.tokens, sizes.channels, dtype=dtype)
    return list(memory), Content.LATENT, None


def _sglang_page_first(sizes: Sizes, dtype: torch.dtype) -> Made:
    """SGLang's host pool, [2, tokens, layers, heads, channels], seen in pages."""
    pages = (2, sizes.blocks, sizes.tokens, sizes.layers, sizes.heads, sizes.channels)
    return [torch.zeros(pages, dtype=dtype)], Content.PLAIN, "2BNLHD"


_KINDS = {
    **{f"vllm-{order}": _vllm(order) for order in VLLM_ORDERS},
    "vllm-cpu": _vllm_cpu,
    "vllm-padded": _padded,
    "vllm-kernel-blocks": _stacked("BRHNC", "BRNHC"),
    "older-flash": _stacked("2BNHD"),
    "older-cpu": _stacked("2BHND"),
    "older-flashinfer": _stacked("B2NHD"),
    "older-flashinfer-hnd": _stacked("B2NHD", "B2HND"),
    "transposed-by-strides": _stacked("2BNHD", "2BHDN"),
    "mla": _mla,
    "mla-vllm": _mla_vllm,
    "sglang-page-first": _sglang_page_first,
}
KINDS = tuple(_KINDS)
