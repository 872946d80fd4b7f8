"""How pieces travel: the chain over real Gloo groups, straight and through a ring of buffers as
over NCCL; which lane a group takes; a device that cannot be used is told."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from collective_rig import Nodes
from eventually import until

from prefixfleet.transfer.collective_lanes import (
    RING,
    DeviceLane,
    HostLane,
    agreed,
    dist,
    gloo_group,
    offer,
    pass_on,
)
from prefixfleet.transfer.collective_worker import CollectiveWorker

RANKS = 3
HAS_NCCL = dist.is_nccl_available() and torch.cuda.is_available()


@pytest.mark.parametrize(
    ("offers", "lane"),
    [
        (["nccl A", "nccl B", "nccl C"], "nccl"),
        (["nccl A", "gloo", "nccl C"], "gloo"),
        (["nccl A", "nccl B", "nccl A"], "gloo"),  # NCCL has no two ranks on one GPU
        (["gloo", "gloo"], "gloo"),
    ],
)
def test_a_group_takes_nccl_where_each_rank_has_a_gpu_of_its_own(offers, lane):
    assert agreed(offers) == lane


def test_without_a_device_a_rank_offers_gloo():
    assert offer("") == "gloo"


def through_host(group, pieces):
    return HostLane(group, pieces)


def through_buffers(group, pieces):
    return DeviceLane(group, pieces, "cpu")


@pytest.mark.parametrize("count", [0, 1, 3 * RING + 1])
@pytest.mark.parametrize("lane_of", [through_host, through_buffers])
def test_every_piece_comes_to_every_rank(lane_of, count):
    sent = [torch.randint(256, (1000 + i % 7,), dtype=torch.uint8) for i in range(count)]
    got = [[torch.zeros_like(piece) for piece in sent] for _ in range(RANKS - 1)]
    store = dist.HashStore()

    def take_part(rank):
        group = gloo_group(dist.PrefixStore("g", store), rank, RANKS, "127.0.0.1", 30.0)
        lane = lane_of(group, sent if rank == 0 else got[rank - 1])
        pass_on(lane, rank, RANKS)
        lane.close()

    with ThreadPoolExecutor(RANKS) as threads:
        for done in [threads.submit(take_part, rank) for rank in range(RANKS)]:
            done.result(100)

    for pieces in got:
        assert all(torch.equal(a, b) for a, b in zip(pieces, sent, strict=True))


@pytest.mark.timeout(300)
async def test_a_device_that_cannot_be_used_is_told_and_gloo_serves(tmp_path):
    file = tmp_path / "segment"
    file.write_bytes(bytes(4096))
    worker = CollectiveWorker(file, "cuda:0")
    try:
        await worker.start()
        assert (worker.fault == "") == HAS_NCCL
        told = await worker.call({"do": "host", "host": "127.0.0.1"}, time.monotonic() + 60)
        assert told["port"] > 0
    finally:
        await worker.kill()


@pytest.mark.gpu
@pytest.mark.skipif(
    not HAS_NCCL or torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} NVIDIA GPUs"
)
@pytest.mark.timeout(400)
async def test_a_broadcast_over_nccl_brings_every_block(tmp_path):
    devices = [f"cuda:{number}" for number in range(RANKS)]
    async with Nodes.of(tmp_path, *["enforce"] * RANKS, devices=devices) as nodes:
        await nodes.source.do("replicate")
        for node in nodes.others:
            state = await nodes.counted(node, "received")
            assert state["blocks"] == 8
            assert state["counters"]["by_nccl"] == 1
        assert (await until(lambda: nodes.source.do("state"), 60))["counters"]["by_nccl"] == 1
