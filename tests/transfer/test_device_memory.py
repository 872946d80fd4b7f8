"""Reads by UCX from and into memory that a tensor owns: of the host, and of a GPU where one is."""

import pytest
import torch
from links import SECRET, Echo, soon

from prefixfleet.transfer import ucx_binding
from prefixfleet.transfer.link import Range
from prefixfleet.transfer.ucx import UcxLink
from prefixfleet.transfer.ucx_get import memory_at

pytestmark = pytest.mark.skipif(
    "ucxx" not in ucx_binding.available(), reason="the Python binding ucxx is not installed"
)
GPU = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
)
DEVICES = ["cpu", GPU]
BLOCK = 65_536
BLOCKS = 8


def view(tensor):
    return memory_at(tensor.data_ptr(), tensor.nbytes)


@pytest.mark.parametrize("source", DEVICES)
@pytest.mark.parametrize("target", DEVICES)
async def test_blocks_go_from_tensor_to_tensor(source, target):
    theirs = torch.randint(0, 256, (BLOCKS, BLOCK), dtype=torch.uint8).to(source)
    ours = torch.zeros_like(theirs, device=target)
    wanted, places = [6, 1, 3], [0, 5, 2]
    serving = UcxLink(node="source", secret=SECRET)
    reading = UcxLink(node="target", secret=SECRET)
    listener = await serving.listen("127.0.0.1", view(theirs), Echo())
    peer = await reading.connect(listener.contact, deadline=soon())
    try:
        await peer.read(
            [Range(block * BLOCK, BLOCK) for block in wanted],
            [view(ours[place]) for place in places],
            deadline=soon(),
        )
    finally:
        await peer.close()
        await listener.close()
        await reading.close()
        await serving.close()

    expected = torch.zeros(BLOCKS, BLOCK, dtype=torch.uint8)
    expected[places] = theirs.cpu()[wanted]
    assert torch.equal(ours.cpu(), expected)
