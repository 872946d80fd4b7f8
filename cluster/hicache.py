"""SGLang's HiCache pages as blocks of the node's cache. Must not import SGLang; the class that it
loads is in `sglang_backend`.

A page's key is SGLang's own hash of its chain, which is not keyed: it becomes a block of ours by
the cluster's key and the namespace, so that nobody who knows a text can name its blocks. SGLang
gives no tenant's salt to a storage: engines whose tenants must not see each other need a fleet
each. Tensor-parallel ranks keep a shard each; models with one latent cache are written by rank 0.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from prefixfleet.cluster.cache_api import PrefixCache, Write
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.namespace import DIGEST_BYTES
from prefixfleet.store.records import PullPlan

PULL_S = 5.0
DISK_S = 0.25
"""For what the node reads from its disk; what has come by then is used. Of what lies in memory it
answers in a millisecond."""

Plans = Callable[[Sequence[BlockHash]], PullPlan | None]
"""Whom to pull a chain from, if anybody has more of it than this node."""


class HostPool(Protocol):
    """What is used of SGLang's ``HostKVCache``."""

    page_size: int

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        """The page that begins at a token's index."""
        ...

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """Memory of a page."""
        ...

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        """Write a page."""
        ...


class HiCachePages:
    """The storage's v1 interface. Owned by SGLang's controller, called from its threads.

    ``cache`` is of this rank; ``key`` and ``namespace`` name blocks, see the module.
    """

    def __init__(
        self, cache: PrefixCache, *, key: bytes, namespace: bytes, plans: Plans, is_writer: bool
    ) -> None:
        self._cache = cache
        self._keyed = hashlib.blake2b(
            namespace, digest_size=DIGEST_BYTES, key=key, person=b"pf-sglang-page"
        )
        self._plans = plans
        self._is_writer = is_writer
        self._requests = itertools.count(1)

    def block(self, key: str) -> BlockHash:
        """Our name of a page."""
        state = self._keyed.copy()
        state.update(key.encode())
        return state.digest()

    def count_leading(self, keys: Sequence[str], before: Sequence[str] = ()) -> int:
        """Leading pages, behind those of ``before``, that are here after those that a peer or
        this node's disk has were brought."""
        chain = [self.block(key) for key in (*before, *keys)]
        here = self._cache.match(chain)
        if here < len(chain):
            plan = self._plans(chain)
            budget_s = PULL_S if plan else DISK_S
            with self._cache.pin(self._request(), chain, plan, budget_s) as pinned:
                here = max(here, len(pinned.blocks))
        return max(0, here - len(before))

    def get(self, keys: Sequence[str], indices: torch.Tensor, pool: HostPool) -> list[bool]:
        """Read pages into the host pool; True for the leading ones that came whole."""
        chain = [self.block(key) for key in keys]
        came = 0
        with self._cache.pin(self._request(), chain, None, DISK_S) as pinned:
            for position, index in enumerate(_pages(indices, pool.page_size, len(pinned.blocks))):
                page = pool.get_dummy_flat_data_page()
                if not self._cache.load(pinned, position, _bytes_of(page)):
                    break
                pool.set_from_flat_data_page(index, page)
                came += 1
        return [position < came for position in range(len(keys))]

    def set(
        self, keys: Sequence[str], indices: torch.Tensor, pool: HostPool, before: Sequence[str]
    ) -> list[bool]:
        """Keep pages that follow those of ``before``. True for a page that is kept, or was."""
        if not self._is_writer:
            return [True] * len(keys)
        chain = [self.block(key) for key in keys]
        parent = self.block(before[-1]) if before else b""
        starts = _pages(indices, pool.page_size, len(keys))
        writes = [(block, _writer(pool, index)) for block, index in zip(chain, starts, strict=True)]
        kept = self._cache.save(parent, writes)
        return [
            new or self._cache.match([block]) == 1 for new, block in zip(kept, chain, strict=True)
        ]

    def _request(self) -> str:
        return f"hicache-{next(self._requests)}"


def page_bytes(pool: HostPool) -> int:
    """Size of one rank's part of a page: the payload of a slot's shard."""
    return _bytes_of(pool.get_dummy_flat_data_page()).nbytes


def layout_of(pool: HostPool) -> str:
    """What makes a page's bytes differ, besides the model: kind, order and shape of the pool."""
    page = pool.get_dummy_flat_data_page()
    order: Any = getattr(pool, "layout", "unknown")
    return f"{type(pool).__name__}/{order}/{page.dtype}[{page.numel()}]"


def _pages(indices: torch.Tensor, page_size: int, count: int) -> Iterator[int]:
    """Index of the first token of each of ``count`` pages."""
    for page in range(count):
        yield int(indices[page * page_size])


def _writer(pool: HostPool, index: int) -> Write:
    def write(payload: memoryview) -> None:
        payload[:] = _bytes_of(pool.get_data_page(index, flat=True))

    return write


def _bytes_of(page: torch.Tensor) -> memoryview:
    """The page's memory; a view, so that a load writes into the tensor."""
    flat = page.contiguous().view(torch.uint8).flatten()
    view: Any = flat.numpy()  # an array is a buffer, though its type does not say so
    return memoryview(view)
