"""How the pieces of a broadcast travel: between the hosts' memory by Gloo, or between their GPUs by
NCCL, which has lanes that Gloo has not (NVLink, InfiniBand).

Pieces lie in the segment, in host memory, whichever it is: a GPU holds each for as long as it
takes to pass it on.
"""

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed

Untyped: TypeAlias = Any
dist: Untyped = torch.distributed  # most of what is used here has no types

GLOO, NCCL = "gloo", "nccl"
PIECE_BYTES = {GLOO: 256 * 1024, NCCL: 4 * 1024 * 1024}
"""A slot travels in pieces of so many bytes; the last rank gets the first after as many pieces as
there are ranks before it. A GPU's piece is a launch, which must be worth it."""
WINDOW = 16
"""Pieces of one rank under way, each way."""
RING = 2 * WINDOW + 2
"""Pieces that a GPU holds: those that come, those that leave, and the one between."""
NCCL_STALL_S = 20.0
"""Ranks of NCCL that move nothing for so long end; making their connections takes seconds."""


def offer(device: str) -> str:
    """What a rank says that it can: "nccl" and its GPU, or "gloo".

    Raises:
        RuntimeError: ``device`` is named but cannot be used here.
    """
    if not device:
        return GLOO
    if not dist.is_nccl_available():
        raise RuntimeError(f"this torch ({torch.__version__}) has no NCCL")
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU")
    return f"{NCCL} {torch.cuda.get_device_properties(device).uuid}"


def agreed(offers: Sequence[str]) -> str:
    """The lane of a group, from what each of its ranks offers: NCCL where each has a GPU, and no
    two the same one."""
    every_one = all(told.startswith(NCCL) for told in offers)
    return NCCL if every_one and len(set(offers)) == len(offers) else GLOO


class Lane(Protocol):
    """Moves piece ``i`` of a broadcast; owned by one `pass_on`."""

    pieces: int

    def receive(self, i: int, rank: int) -> Untyped:
        """Begin to get it; the work to wait for."""

    def send(self, i: int, rank: int) -> Untyped:
        """Begin to give it; the work to wait for."""

    def take(self, i: int) -> None:
        """Ready it for sending, at the rank that has it from the start."""

    def keep(self, i: int) -> None:
        """What was received is in the segment after this."""

    def close(self) -> None:
        """Everything that was begun is done, and the group is gone."""


class HostLane:
    """Straight from and into the segment."""

    def __init__(self, group: Untyped, pieces: Sequence[torch.Tensor]) -> None:
        self._group = group
        self._pieces = pieces
        self.pieces = len(pieces)

    def receive(self, i: int, rank: int) -> Untyped:
        return self._group.recv([self._pieces[i]], rank, i)

    def send(self, i: int, rank: int) -> Untyped:
        return self._group.send([self._pieces[i]], rank, i)

    def take(self, i: int) -> None:
        """It lies where it is sent from."""

    def keep(self, i: int) -> None:
        """It came to where it belongs."""

    def close(self) -> None:
        self._group = None  # nothing of it writes into the segment any more


class DeviceLane:
    """Through a ring of buffers on ``device``. Works that NCCL gives are waited for by the
    device's stream alone; the copy to the host is what the host waits for."""

    def __init__(self, group: Untyped, pieces: Sequence[torch.Tensor], device: str) -> None:
        self._group = group
        self._pieces = pieces
        self.pieces = len(pieces)
        largest = max((len(piece) for piece in pieces), default=0)
        self._ring = torch.empty((min(RING, len(pieces)), largest), dtype=torch.uint8).to(device)

    def receive(self, i: int, rank: int) -> Untyped:
        return self._group.recv([self._buffer(i)], rank, 0)

    def send(self, i: int, rank: int) -> Untyped:
        return self._group.send([self._buffer(i)], rank, 0)

    def take(self, i: int) -> None:
        self._buffer(i).copy_(self._pieces[i])

    def keep(self, i: int) -> None:
        self._pieces[i].copy_(self._buffer(i))

    def close(self) -> None:
        if self._ring.is_cuda:
            torch.cuda.synchronize(self._ring.device)
            self._group.shutdown()
        self._group = None

    def _buffer(self, i: int) -> torch.Tensor:
        return self._ring[i % len(self._ring)][: len(self._pieces[i])]


def pass_on(lane: Lane, rank: int, size: int) -> None:
    """Get every piece from the rank before, if there is one, and give it to the one behind.

    Raises `RuntimeError` when a neighbour is gone or moves nothing for the group's time limit.
    """
    receiving: deque[Untyped] = deque()
    sending: deque[Untyped] = deque()
    posted = 0
    for i in range(lane.pieces):
        while rank > 0 and posted < min(lane.pieces, i + WINDOW):
            receiving.append(lane.receive(posted, rank - 1))
            posted += 1
        if rank > 0:
            receiving.popleft().wait()
        else:
            lane.take(i)
        if rank + 1 < size:
            sending.append(lane.send(i, rank + 1))
        if rank > 0:
            lane.keep(i)
        if len(sending) > WINDOW:
            sending.popleft().wait()
    for work in sending:
        work.wait()


def gloo_group(store: Untyped, rank: int, size: int, host: str, stall_s: float) -> Untyped:
    """Ranks that talk over ``host``'s interface. Raises `RuntimeError`."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=stall_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return dist.ProcessGroupGloo(store, rank, size, options)


def nccl_group(store: Untyped, rank: int, size: int, device: str) -> Untyped:
    """Ranks with a GPU each. Raises `RuntimeError`; one that hangs ends its process in the end."""
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=NCCL_STALL_S)
    return dist.ProcessGroupNCCL(store, rank, size, options)
