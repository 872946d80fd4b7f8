"""Every conversion equals torch's, over all inputs where there are few, else over all exponents."""

import numpy as np
import pytest
import torch
from numba import njit

from prefixfleet.kernels.cpu_elements import FORMATS, QUANTISE, RESTORE
from prefixfleet.kernels.encoding import Codec


def mapped(function, values, result):
    @njit
    def loop(x, y):
        for i in range(x.size):
            y[i] = function(x[i])

    out = np.empty(values.size, result)
    loop(values, out)
    return out


def spread_of_floats(largest):
    """Every sign and exponent, mantissas at and next to ties, and random ones."""
    mantissas = np.r_[0:16, 0x7FFF0:0x80010, 0xFFFF0:0x100010, 0x7FFF00:0x800000]
    exponents = np.arange(0, 255, dtype=np.uint32) << 23
    grid = (exponents[:, None] | mantissas[None, :].astype(np.uint32)).ravel().view(np.float32)
    noise = np.random.default_rng(0).uniform(-1, 1, 100_000) * min(largest, 1e38)
    values = np.r_[grid, -grid, noise].astype(np.float32)
    return np.ascontiguousarray(values[np.abs(values) <= largest])


@pytest.mark.parametrize("dtype", FORMATS)
def test_kv_dtypes_load_and_store_as_torch_converts(dtype):
    kv = FORMATS[dtype]
    raw, view = (np.uint32, torch.int32) if dtype is torch.float32 else (np.uint16, torch.int16)
    floats = spread_of_floats(np.inf)
    expected = torch.from_numpy(floats).to(dtype)

    stored = mapped(kv.store, floats, raw)
    loaded = mapped(kv.load, stored, np.float32)

    assert np.array_equal(stored, expected.view(view).numpy().view(raw))
    assert np.array_equal(loaded, expected.to(torch.float32).numpy())


def test_int8_rounds_to_nearest_even():
    floats = np.r_[spread_of_floats(127), np.arange(-127, 127, 0.5)].astype(np.float32)

    got = mapped(QUANTISE[Codec.INT8], floats, np.uint8).view(np.int8)

    assert np.array_equal(got, np.rint(floats).astype(np.int8))
    assert np.array_equal(mapped(RESTORE[Codec.INT8], got.view(np.uint8), np.float32), got)


def test_fp8_rounds_as_torch_and_returns_every_value():
    floats = spread_of_floats(448)
    expected = torch.from_numpy(floats).to(torch.float8_e4m3fn)
    values = np.array([b for b in range(256) if b & 0x7F != 0x7F], np.uint8)  # all but the NaNs

    got = mapped(QUANTISE[Codec.FP8], floats, np.uint8)
    restored = mapped(RESTORE[Codec.FP8], values, np.float32)

    assert np.array_equal(got, expected.view(torch.uint8).numpy())
    as_torch = torch.from_numpy(values).view(torch.float8_e4m3fn).to(torch.float32).numpy()
    assert np.array_equal(restored, as_torch)
