"""The Triton kernels equal the reference, bit for bit; run by `test_triton`, interpreted.

On a GPU: `pytest tests/kernels/triton_cases.py`.
"""

import random

import pytest
import torch
from paged_caches import KINDS, Sizes, fill, make_paged, slots_for

from prefixfleet.kernels import reference
from prefixfleet.kernels.encoding import ENCODINGS, encoded_bytes, is_storable
from prefixfleet.kernels.triton_mover import TritonMover

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [
    (kind, encoding)
    for kind in KINDS
    for encoding in ENCODINGS
    if not (kind.startswith("mla") and encoding == "fp8-values")
]
TILED = Sizes(layers=1, blocks=2, heads=1, tokens=64, channels=64)  # several tiles a program
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def on_device(caches):
    """A copy with the same strides: `Tensor.to` would pack a strided view."""
    moved = {}
    for name, cache in caches.items():
        whole = torch.tensor([], dtype=torch.uint8).set_(cache.untyped_storage())
        flat = whole.to(DEVICE, copy=True).view(cache.dtype)
        moved[name] = flat.as_strided(cache.shape, cache.stride(), cache.storage_offset())
    return moved


def check(kind, encoding, sizes, dtype, ids, targets):
    caches, layout = make_paged(kind, sizes, dtype)
    fill(caches)
    device_caches = on_device(caches)
    mover = TritonMover(device_caches, layout, encoding)
    expected = slots_for(encoded_bytes(layout, encoding), len(ids))
    got = [slot.to(DEVICE) for slot in slots_for(mover.payload_bytes, len(ids))]

    reference.gather(caches, layout, ids, expected, encoding)
    mover.gather(ids, got)
    reference.scatter(caches, layout, targets, expected[: len(targets)], encoding)
    mover.check([slot.cpu() for slot in got])
    mover.scatter(targets, got[: len(targets)])

    for one, other in zip(expected, got, strict=True):
        assert torch.equal(one, other.cpu())
        assert is_storable(other.cpu().numpy().tobytes(), encoding)
    for name, cache in caches.items():
        assert torch.equal(cache, device_caches[name].cpu())


@pytest.mark.parametrize(("kind", "encoding"), CASES)
def test_the_kernels_equal_the_reference(kind, encoding):
    draw = random.Random(f"{kind} {encoding}")  # one draw a case: the interpreter is slow
    sizes = Sizes(
        layers=draw.choice([1, 2]),
        blocks=3,
        heads=draw.choice([1, 2]),
        tokens=draw.choice([2, 3, 8]),
        channels=draw.choice([2, 5, 8]),
    )
    ids = draw.choices(range(sizes.blocks), k=draw.choice([1, 2]))
    targets = draw.sample(range(sizes.blocks), len(set(ids)))

    check(kind, encoding, sizes, draw.choice(DTYPES), ids, targets)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_no_blocks_are_nothing_to_do(encoding):
    check("vllm-LBNHC", encoding, Sizes(), torch.bfloat16, [], [])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_planes_of_several_tiles_equal_the_reference(encoding):
    check("vllm-LBNHC", encoding, TILED, torch.bfloat16, [1], [0])


@pytest.mark.parametrize("encoding", ["fp8", "int8"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 2.0**127])
def test_what_8_bits_cannot_hold_poisons_its_block_and_no_other(encoding, value):
    caches, layout = make_paged("vllm-LBHNC", Sizes(layers=1, blocks=2), torch.float32)
    fill(caches)
    caches["layers.0"][1, 1, 3, 5] = value
    caches["layers.0"][1, 0, 3, 5] = value
    mover = TritonMover(on_device(caches), layout, encoding)
    slots = [slot.to(DEVICE) for slot in slots_for(mover.payload_bytes, 2)]

    mover.gather([0, 1], slots)

    clean, poisoned = (slot.cpu().numpy().tobytes() for slot in slots)
    assert is_storable(clean, encoding)
    assert not is_storable(poisoned, encoding)
    with pytest.raises(ValueError, match="got header"):
        mover.check([slot.cpu() for slot in slots])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU: on a CPU all memory is the same")
def test_a_slot_in_host_memory_is_refused():
    caches, layout = make_paged("vllm-LBHNC")
    mover = TritonMover(on_device(caches), layout)

    with pytest.raises(ValueError, match="got memory on cpu, expected cuda"):
        mover.gather([0], slots_for(mover.payload_bytes, 1))
