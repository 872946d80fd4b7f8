"""The paged KV of one engine rank, and whole blocks copied out of it and into it.

Must not know slots, hashes or the daemon.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from prefixfleet.kernels.mover import mover_for
from prefixfleet.kernels.paged import PagedLayout


class PagedKv:
    """Owned by the engine, which computes into it; the copier's thread reads and writes blocks
    that the engine has promised not to touch.

    On a GPU the copies run on a stream of their own: `mark` orders a later `read` after what the
    engine has launched so far. Both copies are complete when they return.

    Raises:
        ValueError: no mover can copy blocks of these tensors.
    """

    def __init__(self, caches: Mapping[str, torch.Tensor], layout: PagedLayout) -> None:
        self._mover = mover_for(caches, layout)
        self.payload_bytes = self._mover.payload_bytes
        self._device = next(iter(caches.values())).device
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event | None:
        """Call in the engine's thread after the forward that filled the blocks."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def staging(self, blocks: int) -> torch.Tensor:
        """A private buffer of ``blocks`` rows, one block each, that `write` copies from fast."""
        return torch.empty(
            (blocks, self.payload_bytes),
            dtype=torch.uint8,
            pin_memory=self._stream is not None,
        )

    def read(
        self,
        block_ids: Sequence[int],
        targets: Sequence[memoryview],
        after: torch.cuda.Event | None,
    ) -> None:
        """Copy blocks out. Raises `ValueError` for an id or a size that does not fit."""
        with self._own_stream(after):
            self._mover.gather(block_ids, targets)

    def write(self, block_ids: Sequence[int], sources: Sequence[torch.Tensor]) -> None:
        """Copy blocks in. Raises `ValueError` for an id or a size that does not fit."""
        with self._own_stream(None):
            self._mover.scatter(block_ids, sources)

    @contextmanager
    def _own_stream(self, after: torch.cuda.Event | None) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            yield
            self._stream.synchronize()
