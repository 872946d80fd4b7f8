"""Host memory that a GPU may reach: the pool's mapping, registered once for its whole life."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

_PORTABLE_MAPPED = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped


@dataclass(frozen=True, slots=True)
class HostMemory:
    """A range of host addresses that the GPU's copy engines and kernels may use."""

    start: int
    end: int

    def holds(self, address: int, num_bytes: int) -> bool:
        """Whether all of ``num_bytes`` from ``address`` lie inside."""
        return self.start <= address and address + num_bytes <= self.end


@contextmanager
def registered(pool: memoryview) -> Iterator[HostMemory]:
    """Page-lock ``pool`` and map it for every GPU, until the block ends.

    No kernel or copy that uses it may be in flight at the end.

    Raises:
        ValueError: the memory is read-only or empty.
        RuntimeError: CUDA refused, e.g. for a limit on locked memory (``ulimit -l``).
    """
    if pool.readonly or not pool.nbytes:
        raise ValueError("host memory: got read-only or empty memory, expected a writable pool")
    start = torch.frombuffer(pool, dtype=torch.uint8).data_ptr()
    cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(cuda.cudaHostRegister(start, pool.nbytes, _PORTABLE_MAPPED))
    try:
        yield HostMemory(start, start + pool.nbytes)
    finally:
        torch.cuda.check_error(cuda.cudaHostUnregister(start))
