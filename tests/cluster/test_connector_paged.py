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
BLOCKS = 6


@pytest.fixture(params=["cpu", GPU])
def device(request):
    return request.param


def caches_on(device, seed):
    torch.manual_seed(seed)
    return {f"l{i}": torch.randn(BLOCKS, 2, 16, 8).to(device) for i in range(3)}


def paged_on(device, seed):
    caches = caches_on(device, seed)
    return caches, PagedKv(caches, PagedLayout.from_tensors(caches))


def test_blocks_read_from_one_engine_and_written_to_another_are_equal(device):
    source, one = paged_on(device, seed=1)
    target, other = paged_on(device, seed=2)
    before = {name: cache.clone() for name, cache in target.items()}
    slots = [memoryview(bytearray(one.payload_bytes)) for _ in range(3)]

    one.read([4, 0, 2], slots, one.mark())
    after = other.mark()
    for row, slot in enumerate(slots):
        other.rows[row].numpy().data[:] = slot
        other.send(row)
    other.write([1, 5, 3], after)

    for name in source:
        assert torch.equal(target[name][[1, 5, 3]], source[name][[4, 0, 2]])
        assert torch.equal(target[name][[0, 2, 4]], before[name][[0, 2, 4]])


def test_fewer_blocks_than_a_batch_leave_the_other_blocks_alone(device):
    target, one = paged_on(device, seed=1)
    before = {name: cache.clone() for name, cache in target.items()}
    one.rows[0].zero_()

    one.send(0)
    one.write([3], one.mark())

    for name, cache in target.items():
        assert not cache[3].any()
        assert torch.equal(cache[[0, 1, 2, 4, 5]], before[name][[0, 1, 2, 4, 5]])


@pytest.mark.parametrize("device", [GPU], indirect=True)
def test_copies_on_a_gpu_are_ordered_behind_what_the_engine_launched(device):
    caches, paged = paged_on(device, seed=1)
    slot = memoryview(bytearray(paged.payload_bytes))
    for cache in caches.values():
        torch.cuda._sleep(50_000_000)  # cycles that the engine's stream is busy
        cache[4].fill_(7)
    paged.read([4], [slot], paged.mark())
    torch.cuda._sleep(50_000_000)
    for cache in caches.values():
        cache[2].fill_(9)
    after = paged.mark()
    paged.rows[0].numpy().data[:] = slot
    paged.send(0)
    paged.write([2], after)

    for cache in caches.values():
        assert bool((cache[[2, 4]] == 7).all())


@pytest.mark.parametrize("device", [GPU], indirect=True)
def test_rows_for_a_gpu_are_page_locked(device):
    _, paged = paged_on(device, seed=1)

    assert all(row.is_pinned() for row in paged.rows)


@pytest.mark.parametrize("block", [-1, BLOCKS])
def test_a_block_that_is_none_is_refused(device, block):
    _, paged = paged_on(device, seed=1)

    with pytest.raises(ValueError, match="block ids"):
        paged.write([block], paged.mark())
