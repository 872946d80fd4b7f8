"""What moves blocks between an engine's paged KV and slots, and the choice of one.

A mover holds views of the caches and nothing else: make it once, after the engine's allocation.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from prefixfleet.kernels.cpu_exact import ExactCpuMover
from prefixfleet.kernels.encoding import encoding_of
from prefixfleet.kernels.paged import PagedLayout
from prefixfleet.kernels.slots import Slot


class BlockMover(Protocol):
    """Gather and scatter for one set of caches and one encoding, as `reference` defines them."""

    payload_bytes: int

    def gather(self, block_ids: Sequence[int], outs: Sequence[Slot]) -> None:
        """Copy blocks into slots, encoded. Raises `ValueError` before anything is written."""

    def check(self, slots: Sequence[Slot]) -> None:
        """Raises `ValueError` unless slots in host memory are what `scatter` decodes."""

    def scatter(self, block_ids: Sequence[int], slots: Sequence[Slot]) -> None:
        """Decode slots into blocks. Raises `ValueError` before anything is written.

        On a GPU slots have passed `check` before they got there: looking into them now would wait
        for the GPU.
        """


def mover_for(
    caches: Mapping[str, torch.Tensor], layout: PagedLayout, encoding: str = "exact"
) -> BlockMover:
    """The fastest mover for where ``caches`` lie; for a GPU, slots are memory of that GPU.

    Raises:
        ValueError: the encoding is unknown or cannot hold this layout, or the device is neither
            a CPU nor a GPU that Triton knows.
    """
    device = next(iter(caches.values())).device.type
    if device == "cpu" and encoding_of(encoding).is_exact:
        return ExactCpuMover(caches, layout)
    if device == "cpu":
        from prefixfleet.kernels.cpu_encoded import EncodedCpuMover  # late: see there

        return EncodedCpuMover(caches, layout, encoding)
    if device == "cuda":
        from prefixfleet.kernels.triton_mover import TritonMover  # only where a GPU is

        return TritonMover(caches, layout, encoding)
    raise ValueError(f"paged KV on {device!r}: expected 'cpu' or 'cuda'")
