"""The paged KV of one engine rank, and whole blocks copied out of it and into it.

Must not know slots, hashes or the daemon.
"""

from collections.abc import Mapping, Sequence

import torch

from prefixfleet.cluster.connector_staging import Moment, StagedCopies
from prefixfleet.kernels.encoding import is_storable
from prefixfleet.kernels.mover import mover_for
from prefixfleet.kernels.paged import PagedLayout

BATCH_BLOCKS = 8
"""Blocks copied by one call; a load waits for one batch of a save at most."""


class PagedKv:
    """Owned by the engine, which computes into it; the copier's thread reads and writes blocks
    that the engine has promised not to touch, at most `BATCH_BLOCKS` by one call.

    Both copies are complete when they return. On a GPU `mark` orders them behind what the engine
    has launched so far; on a CPU that is done when it is launched.

    Raises:
        ValueError: no mover can copy blocks of these tensors, or CUDA gives no page-locked rows.
    """

    def __init__(
        self,
        caches: Mapping[str, torch.Tensor],
        layout: PagedLayout,
        encoding: str = "exact",
    ) -> None:
        self._mover = mover_for(caches, layout, encoding)
        self._encoding = encoding
        self.payload_bytes = self._mover.payload_bytes
        self._staged: StagedCopies | None = None
        device = next(iter(caches.values())).device
        if device.type == "cuda":
            from prefixfleet.cluster.connector_cuda import staged_copies  # only where a GPU is

            self._staged = staged_copies(self._mover, device, BATCH_BLOCKS)
            self.rows = self._staged.host_rows
        else:
            size = self.payload_bytes
            self.rows = [torch.empty(size, dtype=torch.uint8) for _ in range(BATCH_BLOCKS)]
        """Private host buffers, one block each: filled, told of by `send`, taken by `write`."""

    def mark(self) -> Moment | None:
        """Call in the engine's thread: after the forward that filled the blocks of a `read`,
        before the step in which blocks of a `write` are free for it.
        """
        return self._staged.mark_engine() if self._staged else None

    def read(
        self, block_ids: Sequence[int], targets: Sequence[memoryview], after: Moment | None
    ) -> None:
        """Copy blocks out. Raises `ValueError` for an id or a size that does not fit."""
        if self._staged is None:
            self._mover.gather(block_ids, targets)
        else:
            assert after is not None
            self._staged.read(block_ids, targets, after)

    def is_storable(self, payload: memoryview) -> bool:
        """Whether what `read` copied is the block; 8 bits cannot hold one that is not finite."""
        return is_storable(payload, self._encoding)

    def send(self, row: int) -> None:
        """``row`` holds a block for the next `write`; its way to the device may begin."""
        if self._staged is not None:
            self._staged.send(row)

    def write(self, block_ids: Sequence[int], after: Moment | None) -> None:
        """Copy the first rows, sent, into blocks. Raises `ValueError` for an id or a payload that
        does not fit; nothing is written then.
        """
        if self._staged is None:
            self._mover.scatter(block_ids, self.rows[: len(block_ids)])
        else:
            assert after is not None
            self._staged.write(block_ids, after)
