"""What vLLM's own CPU kernel writes into a block is what "keys transposed" says."""

import warnings

import pytest
import torch

from prefixfleet.kernels.paged import Content, PagedLayout
from prefixfleet.kernels.planes import split

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm import _custom_ops as ops

HEADS, TOKENS = 3, 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kernel", "channels"), [("vec", 64), ("vec16", 80)])
def test_planes_are_the_keys_and_values_of_vllms_cpu_kernel(dtype, kernel, channels):
    keys, values = torch.randn(2, TOKENS, HEADS, channels).to(dtype)
    cache = torch.zeros(2, HEADS, TOKENS, 2 * channels, dtype=dtype)
    halves = cache.view(2, HEADS, 2 * TOKENS, channels).chunk(2, dim=2)

    slots = torch.arange(TOKENS, 2 * TOKENS)  # the tokens of block 1
    ops.cpu_attn_reshape_and_cache(keys, values, *halves, slots, kernel)

    layout = PagedLayout.from_tensors({"a": cache}, content=Content.KEYS_TRANSPOSED)
    k, v = split(layout.pages[0], layout.content, channel_keys=False)
    page = cache[1].flatten()
    for plane, expected in ((k, keys.permute(1, 2, 0)), (v, values.permute(1, 0, 2))):
        where = torch.tensor(plane.groups)[:, None, None] + torch.tensor(plane.rows)[:, None]
        assert torch.equal(page[where + torch.arange(plane.width)], expected)
