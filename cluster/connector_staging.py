"""Blocks copied between paged KV on a device and host memory, in the order that is safe.

All of the order is here and runs on any machine: `Stream` says what it needs of a device, and
`connector_cuda` is that on a GPU. Must not know slots, hashes or the daemon.

A block goes through two rows: a kernel gathers it from its many layers into a row on the device,
the copy engine moves that row to a page-locked row of the host, and one pass of the CPU moves it
to its slot, which its checksum needs anyway; a load is the same backwards.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from prefixfleet.kernels.mover import BlockMover
from prefixfleet.kernels.slots import as_bytes


class Moment(Protocol):
    """A point in a stream's work; it has come when all work before it is done."""

    def synchronize(self) -> None:
        """Return when it has come. Raises what the device says of work that failed."""


class Stream(Protocol):
    """Work that a device does in order, some time after it was enqueued."""

    def enqueue(self, work: Callable[[], None]) -> None:
        """Let the device do what ``work`` starts."""

    def wait_event(self, moment: Moment) -> None:
        """What is enqueued from now on begins when ``moment`` has come, on whatever stream."""

    def mark(self) -> Moment:
        """When all that is enqueued until now is done."""

    def mark_engine(self) -> Moment:
        """When all is done that the engine has launched until now, in the calling thread."""


class StagedCopies:
    """Owned by the copier's thread, except `mark_engine`. No work is left in flight when `read`
    and `write` return, so the engine may have the blocks back and the rows serve the next call.

    ``host_rows`` and ``device_rows`` are as many, each the payload of one block.
    """

    def __init__(
        self,
        mover: BlockMover,
        stream: Stream,
        host_rows: Sequence[torch.Tensor],
        device_rows: Sequence[torch.Tensor],
    ) -> None:
        self._mover = mover
        self._stream = stream
        self.host_rows = host_rows
        self._device_rows = device_rows

    def mark_engine(self) -> Moment:
        """Call in the engine's thread; orders a later `read` or `write` behind its work so far."""
        return self._stream.mark_engine()

    def read(self, block_ids: Sequence[int], targets: Sequence[memoryview], after: Moment) -> None:
        """Copy blocks out, as they are when ``after`` has come.

        Raises `ValueError` for an id or a size that does not fit.
        """
        rows = self._device_rows[: len(block_ids)]
        out = [as_bytes(target, self._mover.payload_bytes) for target in targets]
        try:
            self._stream.wait_event(after)
            self._stream.enqueue(lambda: self._mover.gather(block_ids, rows))
            arrivals = [self._fetch(row) for row in range(len(rows))]
            for row, (arrival, target) in enumerate(zip(arrivals, out, strict=True)):
                arrival.synchronize()  # the rows behind it are copied by the device meanwhile
                target.copy_(self.host_rows[row])
        finally:  # a copy into a row must not outlive the call: a load's block may be next in it
            self._stream.mark().synchronize()

    def send(self, row: int) -> None:
        """The host's ``row`` holds a block; begin to copy it to the device."""
        device, host = self._device_rows[row], self.host_rows[row]
        self._stream.enqueue(lambda: _copy(device, host))

    def write(self, block_ids: Sequence[int], after: Moment) -> None:
        """Copy the first rows that were sent into blocks, which nobody touches after ``after``.

        Raises `ValueError` for an id or a payload that does not fit; nothing is written then.
        """
        rows = self._device_rows[: len(block_ids)]
        try:
            self._mover.check(self.host_rows[: len(block_ids)])
            self._stream.wait_event(after)
            self._stream.enqueue(lambda: self._mover.scatter(block_ids, rows))
        finally:
            self._stream.mark().synchronize()

    def rehearse(self) -> None:
        """Copy block 0 out and back, before the engine serves: no request then waits for the
        compiler, and kernels that this device cannot run stop the start.
        """
        payload = memoryview(bytearray(self._mover.payload_bytes))
        start = self.mark_engine()
        self.read([0], [payload], start)
        self.send(0)
        self.write([0], start)

    def _fetch(self, row: int) -> Moment:
        device, host = self._device_rows[row], self.host_rows[row]
        self._stream.enqueue(lambda: _copy(host, device))
        return self._stream.mark()


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
