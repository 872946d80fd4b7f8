"""A host pool of an engine's second cache level, as SGLang shows it to a storage, and its keys."""

import hashlib

import torch

PAGE_TOKENS, LAYERS, HEADS, CHANNELS = 16, 2, 2, 8


class PageFirstPool:
    """Pages one after the other, each with K and V of all layers; rows are tokens."""

    layout = "page_first"
    page_size = PAGE_TOKENS

    def __init__(self, pages: int = 32) -> None:
        shape = (pages, PAGE_TOKENS, 2, LAYERS, HEADS, CHANNELS)
        self.memory = torch.zeros(shape, dtype=torch.bfloat16)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        page = self.memory[index // PAGE_TOKENS]
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros_like(self.memory[0]).flatten()

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        page = self.memory[index // PAGE_TOKENS]
        page[:] = data_page.reshape(page.shape)

    def fill(self, page: int, seed: int) -> torch.Tensor:
        """Compute, so to say, a page; a copy of it."""
        shape = self.memory[page].shape
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        self.memory[page] = values.to(torch.bfloat16)
        return self.memory[page].clone()


def indices_of(*pages: int) -> torch.Tensor:
    """Token indices of whole pages."""
    return torch.cat([torch.arange(p * PAGE_TOKENS, (p + 1) * PAGE_TOKENS) for p in pages])


def keys_of(text: str, count: int) -> list[str]:
    """Pages' keys as the engine makes them: each a hash over the one before."""
    keys, last = [], text
    for _ in range(count):
        last = hashlib.sha256(last.encode()).hexdigest()
        keys.append(last)
    return keys
