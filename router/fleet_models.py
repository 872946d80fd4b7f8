"""Models of what a simulation cannot run: engines and links, as numbers with their sources.

Prefill of n tokens with p cached on a decoder of l layers and hidden size d, in floating point
operations: l (a (n^2 - p^2) d + b (n - p) d^2) (Mooncake, FAST'25, eq. 1, in its marginal form);
a and b are the model's constants of attention and of the matrix products.
"""

import math
from dataclasses import dataclass

from prefixfleet.router.estimate import KILO, PrefillModel
from prefixfleet.store.errors import ConfigError

GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder as the formula sees it."""

    layers: int
    hidden: int
    attention: float = 4.0
    products: float = 22.0
    kv_bytes_per_token: int

    def __post_init__(self) -> None:
        if min(self.layers, self.hidden, self.kv_bytes_per_token) < 1:
            raise ConfigError(f"model shape: got {self}, expected numbers of at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One node: arithmetic it reaches, the link to its peers, and what a step costs besides."""

    flops: float  # peak of the whole node, dense, 16 bit
    utilisation: float  # the part of the peak that a prefill reaches
    link_bytes_per_s: float
    link_setup_s: float = 0.005
    hit_bytes_per_s: float = math.inf  # from where a node holds a block into its engine
    step_s: float = 0.02
    disk_bytes_per_s: float = math.inf  # of reads


LLAMA_70B = ModelShape(layers=80, hidden=8192, kv_bytes_per_token=327_680)
"""LLaMA3-70B, 16 bit, 8 query heads a KV head: 320 KiB a token (Mooncake, FAST'25, table 1)."""

PRESETS: dict[str, tuple[Hardware, str]] = {
    "8xA800": (
        Hardware(flops=8 * 312e12, utilisation=0.5, link_bytes_per_s=100 * GB),
        "Mooncake, FAST'25, table 1: 8 x 312 TFLOPS, 800 Gb/s",
    ),
    "8xH100": (
        Hardware(flops=8 * 989e12, utilisation=0.5, link_bytes_per_s=400 * GB),
        "NVIDIA H100 SXM data sheet: 989 TFLOPS dense bf16; 8 x 400 Gb/s InfiniBand",
    ),
    "8xH200": (
        Hardware(flops=8 * 989e12, utilisation=0.5, link_bytes_per_s=400 * GB),
        "NVIDIA H200 SXM data sheet: 989 TFLOPS dense bf16; 8 x 400 Gb/s InfiniBand",
    ),
    "8xA100": (
        Hardware(flops=8 * 312e12, utilisation=0.5, link_bytes_per_s=200 * GB),
        "NVIDIA A100 SXM data sheet: 312 TFLOPS dense bf16; 8 x 200 Gb/s InfiniBand",
    ),
    "1xL40S": (
        Hardware(flops=362e12, utilisation=0.4, link_bytes_per_s=12.5 * GB),
        "NVIDIA L40S data sheet: 362 TFLOPS dense bf16; 100 Gb/s Ethernet",
    ),
}
"""Hardware with the source of its peak figures; the utilisation is an assumption throughout."""


def prefill_flops(shape: ModelShape, tokens: int, cached: int) -> float:
    """Operations to prefill ``tokens`` when the first ``cached`` have their KV."""
    n, p, d = float(tokens), float(cached), float(shape.hidden)
    return shape.layers * (shape.attention * (n * n - p * p) * d + shape.products * (n - p) * d * d)


def prefill_seconds(shape: ModelShape, hardware: Hardware, tokens: int, cached: int) -> float:
    """Time of that prefill on ``hardware``."""
    reached = hardware.flops * hardware.utilisation
    return hardware.step_s + prefill_flops(shape, tokens, cached) / reached


def calibrated(shape: ModelShape, hardware: Hardware) -> PrefillModel:
    """The router's model of such a worker, as if it had been learned from many observations."""
    reached = hardware.flops * hardware.utilisation
    linear = shape.layers * shape.products * shape.hidden**2 / reached
    square = shape.layers * shape.attention * shape.hidden / reached
    coefficients = (hardware.step_s, linear * KILO, square * KILO * KILO)
    return PrefillModel(coefficients)


def break_even_bytes_per_s(shape: ModelShape, hardware: Hardware, cached: int, more: int) -> float:
    """Bandwidth above which pulling ``more`` tokens behind ``cached`` beats computing them.

    Marginal form of FAST'25, eq. 2.
    """
    operations = prefill_flops(shape, cached + more, 0) - prefill_flops(shape, cached, 0)
    seconds = operations / (hardware.flops * hardware.utilisation)
    return more * shape.kv_bytes_per_token / seconds
