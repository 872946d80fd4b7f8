"""Whole blocks copied between a rank's paged KV and slots, where the paged KV is."""

import pytest
import torch

from prefixfleet.cluster.connector_paged import PagedKv
from prefixfleet.kernels.paged import PagedLayout

GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    ],
)
BLOCKS, BATCH = 6, 3


@pytest.fixture(params=["cpu", GPU])
def device(request):
    return request.param


def caches_on(device, seed):
    torch.manual_seed(seed)
    return {f"l{i}": torch.randn(BLOCKS, 2, 16, 8).to(device) for i in range(3)}


def paged_on(device, seed):
    caches = caches_on(device, seed)
    return caches, PagedKv(caches, PagedLayout.from_tensors(caches), batch=BATCH)


def test_blocks_read_from_one_engine_and_written_to_another_are_equal(device):
    source, one = paged_on(device, seed=1)
    target, other = paged_on(device, seed=2)
    before = {name: cache.clone() for name, cache in target.items()}
    slots = [memoryview(bytearray(one.payload_bytes)) for _ in range(BATCH)]

    one.read([4, 0, 2], slots, one.mark())
    for row, slot in zip(other.staging, slots, strict=True):
        row.numpy().data[:] = slot
    other.write([1, 5, 3], other.staging)

    for name in source:
        assert torch.equal(target[name][[1, 5, 3]], source[name][[4, 0, 2]])
        assert torch.equal(target[name][[0, 2, 4]], before[name][[0, 2, 4]])


def test_fewer_blocks_than_a_batch_leave_the_other_buffers_alone(device):
    _, one = paged_on(device, seed=1)
    target, _ = paged_on(device, seed=1)

    one.write([3], one.staging[:1])

    assert one.payload_bytes == 3 * target["l0"][0].numel() * 4


@pytest.mark.parametrize("block", [-1, BLOCKS])
def test_a_block_that_is_none_is_refused(device, block):
    _, paged = paged_on(device, seed=1)

    with pytest.raises(ValueError, match="block ids"):
        paged.write([block], paged.staging[:1])
