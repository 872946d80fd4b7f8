"""What `connector_staging` needs of a GPU: a stream of its own, and page-locked rows."""

from collections.abc import Callable

import torch

from prefixfleet.cluster.connector_staging import Moment, StagedCopies
from prefixfleet.kernels.mover import BlockMover


class CudaStream:
    """A stream beside the engine's. Its moments put a waiting thread to sleep: one that spins
    until a forward is over would take a core from the engine.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def enqueue(self, work: Callable[[], None]) -> None:
        """Let the device do what ``work`` starts."""
        with torch.cuda.stream(self._stream):
            work()

    def wait_event(self, moment: Moment) -> None:
        """What is enqueued from now on begins when ``moment``, a stream's here, has come."""
        assert isinstance(moment, torch.cuda.Event)
        self._stream.wait_event(moment)

    def mark(self) -> torch.cuda.Event:
        """When all that is enqueued until now is done."""
        return _mark(self._stream)

    def mark_engine(self) -> torch.cuda.Event:
        """When all is done that the calling thread has launched on the device until now."""
        return _mark(torch.cuda.current_stream(self._device))


def staged_copies(mover: BlockMover, device: torch.device, batch: int) -> StagedCopies:
    """For the paged KV of ``mover`` on the GPU ``device``, with rows for ``batch`` blocks.

    Raises:
        ValueError: CUDA gives no page-locked memory, or none on the GPU, for them.
    """
    size = mover.payload_bytes
    try:
        host = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(batch)]
    except RuntimeError as error:
        raise ValueError(
            f"page-locked host memory: CUDA refused {batch} rows of {size} bytes ({error}); "
            "raise the memory limit of the engine's container, or free memory of the host"
        ) from error
    try:
        rows = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(batch)]
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"memory of {device}: CUDA refused {batch} rows of {size} bytes ({error}); "
            "lower --gpu-memory-utilization in PREFIXFLEET_WORKER_ENGINE_OPTIONS"
        ) from error
    staged = StagedCopies(mover, CudaStream(device), host, rows)
    staged.rehearse()
    return staged


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
