"""Where one block lies inside an engine's paged KV, as a frozen record read from its tensors.

Must not know engines: an engine is a set of tensors and the meaning of their axes. Axis letters:

    B  blocks (always one)                 N  tokens of a block
    R  kernel blocks of a manager block    H  KV heads
    2  K, then V                           D  channels of a head (or of MLA's latent)
    L  layers, where one tensor holds all  C  K's channels, then V's, in one axis

A **page** is the share of one block in one tensor. A block's bytes, in a slot, are its pages in
the order of the dict, each in physical order (outermost stride first) and without gaps. So two
caches that differ only in where pages lie (layers or blocks outermost) have the same block bytes.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby, pairwise, product
from math import prod
from typing import Self

import torch

AXES = frozenset("BRN2LHDC")
VLLM_AXES = {3: "BND", 4: "BHNC"}
"""Logical order of vLLM's tensors (RFC 42082), and of MLA's before it; others must be stated."""


class Content(StrEnum):
    """What the elements of a page are. Shape cannot tell, so the caller that knows must say."""

    OPAQUE = "opaque"  # bytes: exact copies only
    PLAIN = "plain"  # K and V, along axis "2" or as the halves of axis "C"
    KEYS_TRANSPOSED = "keys-transposed"  # vLLM CPU "vec": a head is K [D, N], then V [N, D]
    LATENT = "latent"  # MLA: one tensor that is K and V at once


@dataclass(frozen=True, slots=True)
class Page:
    """One tensor's axes; sizes and strides in elements. A page is all of it but axis B."""

    axes: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_blocks(self) -> int:
        """Length of axis B."""
        return self.sizes[self.axes.index("B")]

    @property
    def order(self) -> tuple[int, ...]:
        """Indices of the page's axes longer than 1, outermost in memory first."""
        longer = (i for i, size in enumerate(self.sizes) if size > 1 and self.axes[i] != "B")
        return tuple(sorted(longer, key=lambda i: -self.strides[i]))

    @property
    def page_bytes(self) -> int:
        """Bytes of the page in a slot."""
        return prod(self.sizes) // self.num_blocks * self.dtype.itemsize

    def describe(self) -> str:
        """Differs from another page's if their bytes in a slot mean something else."""
        dims = ",".join(f"{self.axes[i]}={self.sizes[i]}" for i in self.order)
        return f"{str(self.dtype).removeprefix('torch.')}[{dims}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedLayout:
    """The paged KV of one engine rank; `from_tensors` reads it, nothing else should make one."""

    pages: tuple[Page, ...]  # one a tensor, in the order of the dict
    content: Content
    names_digest: str  # of the tensors' names in order: the same page number, the same layer

    @classmethod
    def from_tensors(
        cls,
        caches: Mapping[str, torch.Tensor],
        *,
        content: Content = Content.OPAQUE,
        axes: str | None = None,
    ) -> Self:
        """The layout of ``caches`` (a tensor a layer), from shapes, strides and dtypes.

        ``axes`` names the axes of every tensor, see the module; without it 4-D is "BHNC", 3-D
        is "BND", and 5-D ``[2, blocks, ...]`` or ``[blocks, 2, ...]`` is taken as opaque only.

        Raises:
            ValueError: no tensors, unknown shape, strides that overlap or leave single elements
                apart, tensors that disagree on blocks or device, content that axes contradict.
        """
        if not caches:
            raise ValueError("paged KV: got no tensors, expected one a layer")
        pages = tuple(_page(name, tensor, content, axes) for name, tensor in caches.items())
        blocks = {page.num_blocks for page in pages}
        devices = {t.device for t in caches.values()}
        if len(blocks) != 1 or len(devices) != 1:
            raise ValueError(
                f"paged KV: got tensors of {sorted(blocks)} blocks on {sorted(map(str, devices))}, "
                "expected one number of blocks on one device (pass one KV cache group at a time)"
            )
        names = "\n".join(caches).encode()
        digest = hashlib.blake2b(names, digest_size=6).hexdigest()
        return cls(pages=pages, content=content, names_digest=digest)

    @property
    def num_blocks(self) -> int:
        """Blocks in the paged KV; ids run from 0."""
        return self.pages[0].num_blocks

    @property
    def block_bytes(self) -> int:
        """Bytes of one exact block over all layers, on this rank."""
        return sum(page.page_bytes for page in self.pages)

    def describe(self) -> str:
        """Text for `Namespace.layout`: differs whenever a block's bytes or their meaning differ."""
        runs = [(text, len(list(run))) for text, run in groupby(p.describe() for p in self.pages)]
        pages = "+".join(f"{count}*{text}" for text, count in runs)
        return f"{self.content}/{pages}/{self.names_digest}"


def block_views(caches: Mapping[str, torch.Tensor], layout: PagedLayout) -> list[torch.Tensor]:
    """Each tensor as ``[B, *page axes in physical order]``; views, nothing is copied.

    Raises:
        ValueError: ``caches`` are not the tensors that ``layout`` was read from.
    """
    if len(caches) != len(layout.pages):
        raise ValueError(f"paged KV: got {len(caches)} tensors, layout has {len(layout.pages)}")
    return [
        _block_view(name, tensor, page)
        for (name, tensor), page in zip(caches.items(), layout.pages, strict=True)
    ]


def runs_of(view: torch.Tensor) -> tuple[list[int], int]:
    """(offsets, length) in bytes of the contiguous runs that a page of a block view consists of."""
    axes = list(zip(view.shape[1:], view.stride()[1:], strict=True))
    length = 1
    while axes and axes[-1][1] == length:
        length *= axes.pop()[0]
    steps = [range(0, size * stride, stride) for size, stride in axes]
    item = view.element_size()
    return [sum(index) * item for index in product(*steps)], length * item


def _block_view(name: str, tensor: torch.Tensor, page: Page) -> torch.Tensor:
    got = (tuple(tensor.shape), tensor.stride(), tensor.dtype)
    if got != (page.sizes, page.strides, page.dtype):
        raise ValueError(f"paged KV {name!r}: got {got}, the layout was read from {page}")
    order = (page.axes.index("B"), *page.order)
    return tensor.as_strided(
        [page.sizes[i] for i in order], [page.strides[i] for i in order], tensor.storage_offset()
    )


def _page(name: str, tensor: torch.Tensor, content: Content, stated: str | None) -> Page:
    axes = _axes(name, tensor, content, stated)
    page = Page(axes, tuple(tensor.shape), tensor.stride(), tensor.dtype)
    _check_strides(name, page)
    _check_content(name, page, content)
    return page


def _axes(name: str, tensor: torch.Tensor, content: Content, stated: str | None) -> str:
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or 0 in tensor.shape:
        raise ValueError(
            f"paged KV {name!r}: got {tuple(tensor.shape)} {tensor.layout} on {tensor.device}, "
            "expected a dense tensor with memory"
        )
    axes = stated or VLLM_AXES.get(tensor.ndim) or _opaque_axes(tensor.shape, content)
    if axes is None or len(axes) != tensor.ndim:
        raise ValueError(
            f"paged KV {name!r}: unknown layout: got shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()}, axes {axes!r}; expected vLLM's [blocks, heads, tokens, channels], "
            "MLA's [blocks, tokens, channels], or axes stated by the engine's adapter"
        )
    if "B" not in axes or len(set(axes)) != len(axes) or not AXES.issuperset(axes):
        raise ValueError(f"paged KV axes: got {axes!r}, expected distinct letters of BRN2LHDC")
    return axes


def _opaque_axes(shape: Sequence[int], content: Content) -> str | None:
    """Where the blocks are in 5-D [2, B, ...] or [B, 2, ...]; the last three axes may be any."""
    if content is not Content.OPAQUE or len(shape) != 5 or (shape[0] == 2) == (shape[1] == 2):
        return None
    return "2BNHD" if shape[0] == 2 else "B2NHD"


def _check_strides(name: str, page: Page) -> None:
    pairs = zip(page.strides, page.sizes, strict=True)
    longer = sorted((stride, size) for stride, size in pairs if size > 1)
    innermost = page.strides[page.order[-1]] if page.order else 1
    apart = all(low[0] * low[1] <= outer[0] for low, outer in pairwise([(1, 1), *longer]))
    if innermost != 1 or not apart:
        raise ValueError(
            f"paged KV {name!r}: got (stride, size) {longer}, expected axes that do not overlap, "
            "a page's innermost of stride 1"
        )


def _check_content(name: str, page: Page, content: Content) -> None:
    if content is Content.OPAQUE:
        return
    sizes = dict(zip(page.axes, page.sizes, strict=True))
    halves = sizes.get("2") == 2 or ("2" not in sizes and sizes.get("C", 1) % 2 == 0)
    fits = {
        Content.PLAIN: halves and ("C" in sizes) != ("D" in sizes),
        Content.KEYS_TRANSPOSED: halves
        and "C" in sizes
        and [page.axes[i] for i in page.order[-2:]] == ["N", "C"],
        Content.LATENT: "2" not in sizes and ("C" in sizes) != ("D" in sizes),
    }
    if not fits[content] or "N" not in sizes or not page.dtype.is_floating_point:
        raise ValueError(f"paged KV {name!r}: content {content.value!r} does not fit {page}")
