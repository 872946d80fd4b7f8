"""The order of loads and saves with the engine's compute on a GPU, layer by layer.

A load writes layer i+1 while the engine computes with layer i; a save reads blocks after the
forward that filled them, beside the next one. Nothing here waits on the host: streams wait for
events. Must not know connectors; one engine worker's thread owns everything.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

from prefixfleet.kernels.slots import Slot


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether everything before it is done."""


class Stream(Protocol):
    """Work in order; `torch.cuda.Stream` is one."""

    def wait_event(self, event: Event) -> None:
        """Later work of this stream starts after ``event``."""

    def record_event(self) -> Event:
        """The point after the work enqueued so far."""


class Device(Protocol):
    """Where streams come from."""

    def compute(self) -> Stream:
        """The engine's stream, on which its forward runs."""

    def new_stream(self) -> Stream:
        """A stream beside it."""

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Work that is enqueued inside goes to ``stream``."""


class LayeredMover(Protocol):
    """What `TritonMover` offers beyond a `BlockMover`."""

    def gather(self, block_ids: Sequence[int], outs: Sequence[Slot]) -> None:
        """Enqueue a gather."""

    def load(self, block_ids: Sequence[int], slots: Sequence[Slot]) -> Any:  # noqa: ANN401
        """Check a scatter; the result is for `scatter_pages`."""

    def scatter_pages(self, batch: Any, first: int, last: int) -> None:  # noqa: ANN401
        """Enqueue a part of it."""


class CudaDevice:
    """The current CUDA device."""

    def compute(self) -> torch.cuda.Stream:
        """The stream that is current where the engine calls."""
        return torch.cuda.current_stream()

    def new_stream(self) -> torch.cuda.Stream:
        """A stream of the same priority."""
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        """`torch.cuda.stream`."""
        return torch.cuda.stream(stream)


class _Transfer(NamedTuple):
    key: str
    done: Event
    holds: object  # keeps device tables alive until the kernels that read them are done


class LayerLoads:
    """Scatters of slots into blocks, a page at a time, ahead of the engine's layers."""

    def __init__(self, device: Device, mover: LayeredMover, num_pages: int) -> None:
        self._device, self._mover, self._num_pages = device, mover, num_pages
        self._stream = device.new_stream()
        self._pending: list[_Transfer] = []
        self._ready: list[Event] = []  # of the newest load, a page each; covers older ones

    def start(self, key: str, block_ids: Sequence[int], slots: Sequence[Slot]) -> None:
        """Enqueue a load. The slots stay pinned, and the blocks taken, until it has finished.

        Raises:
            ValueError: an id or a payload is wrong; nothing was enqueued.
        """
        # a block may have had another owner, whose last forward still reads it
        self._stream.wait_event(self._device.compute().record_event())
        with self._device.on(self._stream):
            batch = self._mover.load(block_ids, slots)
            self._ready = []
            for page in range(self._num_pages):
                self._mover.scatter_pages(batch, page, page + 1)
                self._ready.append(self._stream.record_event())
        self._pending.append(_Transfer(key, self._ready[-1], batch))

    def wait_for(self, page: int) -> None:
        """Compute enqueued from now on finds page ``page`` of every load started before."""
        if self._ready:
            self._device.compute().wait_event(self._ready[page])

    def finished(self) -> list[str]:
        """Keys of loads that are done since the last call; their slots may be released."""
        done, self._pending = _split(self._pending)
        return done


class Saves:
    """Gathers of blocks into slots, behind the forward that filled the blocks."""

    def __init__(self, device: Device, mover: LayeredMover) -> None:
        self._device, self._mover = device, mover
        self._stream = device.new_stream()
        self._pending: list[_Transfer] = []

    def start(self, key: str, block_ids: Sequence[int], outs: Sequence[Slot]) -> None:
        """Enqueue a save of what the forward enqueued before leaves in the blocks.

        The blocks keep their owner, or `hold` is called before a new one writes them; the slots
        are complete, and may be sealed, once the save has finished.

        Raises:
            ValueError: an id or a slot is wrong; nothing was enqueued.
        """
        self._stream.wait_event(self._device.compute().record_event())
        with self._device.on(self._stream):
            self._mover.gather(block_ids, outs)
            self._pending.append(_Transfer(key, self._stream.record_event(), outs))

    def hold(self) -> None:
        """Compute enqueued from now on starts after all saves: blocks may change owner."""
        if self._pending:
            self._device.compute().wait_event(self._pending[-1].done)

    def finished(self) -> list[str]:
        """Keys of saves that are done since the last call, in order."""
        done, self._pending = _split(self._pending)
        return done


def _split(pending: Sequence[_Transfer]) -> tuple[list[str], list[_Transfer]]:
    """(keys of those that are done, the others): one stream, so they end in order."""
    count = next((i for i, t in enumerate(pending) if not t.done.query()), len(pending))
    return [t.key for t in pending[:count]], list(pending[count:])
