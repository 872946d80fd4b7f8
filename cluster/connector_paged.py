"""The paged KV of one engine rank, and whole blocks copied out of it and into it.

Must not know slots, hashes or the daemon.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from prefixfleet.kernels.encoding import is_storable
from prefixfleet.kernels.mover import mover_for
from prefixfleet.kernels.paged import PagedLayout


class PagedKv:
    """Owned by the engine, which computes into it; the copier's thread reads and writes blocks
    that the engine has promised not to touch, at most ``batch`` by one call.

    On a GPU the copies run on a stream of their own, through a buffer on the device: `mark`
    orders a later `read` after what the engine has launched so far. Both copies are complete
    when they return.

    Raises:
        ValueError: no mover can copy blocks of these tensors.
    """

    def __init__(
        self,
        caches: Mapping[str, torch.Tensor],
        layout: PagedLayout,
        encoding: str = "exact",
        *,
        batch: int,
    ) -> None:
        self._mover = mover_for(caches, layout, encoding)
        self._encoding = encoding
        self.payload_bytes = self._mover.payload_bytes
        self._device = next(iter(caches.values())).device
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._on_device = self._rows(batch, device=self._device)
        self.staging = self._rows(batch, pin_memory=self._stream is not None)
        """Private host buffers, one block each, that `write` copies from fast."""

    def mark(self) -> torch.cuda.Event | None:
        """Call in the engine's thread after the forward that filled the blocks."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def read(
        self,
        block_ids: Sequence[int],
        targets: Sequence[memoryview],
        after: torch.cuda.Event | None,
    ) -> None:
        """Copy blocks out. Raises `ValueError` for an id or a size that does not fit."""
        if self._stream is None:
            self._mover.gather(block_ids, targets)
            return
        with self._own_stream(self._stream, after):
            rows = self._on_device[: len(block_ids)]
            self._mover.gather(block_ids, rows)
            for row, target in zip(rows, targets, strict=True):
                torch.frombuffer(target, dtype=torch.uint8).copy_(row)

    def is_storable(self, payload: memoryview) -> bool:
        """Whether what `read` copied is the block; 8 bits cannot hold one that is not finite."""
        return is_storable(payload, self._encoding)

    def write(self, block_ids: Sequence[int], sources: Sequence[torch.Tensor]) -> None:
        """Copy blocks in. Raises `ValueError` for an id, a size or a payload that does not fit;
        nothing is written then.
        """
        if self._stream is None:
            self._mover.scatter(block_ids, sources)
            return
        with self._own_stream(self._stream, None):
            rows = self._on_device[: len(block_ids)]
            for row, source in zip(rows, sources, strict=True):
                row.copy_(source, non_blocking=True)
            self._mover.scatter(block_ids, rows)

    @contextmanager
    def _own_stream(
        self, stream: torch.cuda.Stream, after: torch.cuda.Event | None
    ) -> Iterator[None]:
        with torch.cuda.stream(stream):
            if after is not None:
                stream.wait_event(after)
            yield
            stream.synchronize()

    def _rows(self, count: int, **where: object) -> list[torch.Tensor]:
        return [
            torch.empty(self.payload_bytes, dtype=torch.uint8, **where)  # type: ignore[call-overload]
            for _ in range(count)
        ]
