"""What 8 bits promise: bounds, odd values, payloads that describe themselves."""

import pytest
import torch
from paged_caches import Sizes, fill, make_paged, slots_for

from prefixfleet.kernels.encoding import (
    ENCODINGS,
    Codec,
    encoded_bytes,
    is_storable,
)
from prefixfleet.kernels.mover import mover_for
from prefixfleet.kernels.paged import PagedLayout

LOSSY = [name for name in ENCODINGS if name != "exact"]
SIZES = Sizes(layers=2, blocks=4, heads=2, tokens=16, channels=16)


def through(caches, layout, encoding, kind="vllm-LBHNC"):
    """Block 1 encoded, then decoded into fresh caches."""
    mover = mover_for(caches, layout, encoding)
    (slot,) = slots_for(mover.payload_bytes, 1)
    mover.gather([1], [slot])
    fresh, _ = make_paged(kind, SIZES, next(iter(caches.values())).dtype)
    mover_for(fresh, layout, encoding).scatter([1], [slot])
    return {name: cache[1] for name, cache in fresh.items()}


def keys_and_values(block):
    return block[..., : block.shape[-1] // 2].float(), block[..., block.shape[-1] // 2 :].float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("encoding", LOSSY)
def test_an_error_is_at_most_half_a_step_of_its_own_group(encoding, dtype):
    caches, layout = make_paged("vllm-LBHNC", SIZES, dtype)
    fill(caches)

    decoded = through(caches, layout, encoding)

    rounding = torch.finfo(dtype).eps
    for name, cache in caches.items():
        pairs = zip(keys_and_values(cache[1]), keys_and_values(decoded[name]), strict=True)
        for part, (x, y) in enumerate(pairs):
            chosen = ENCODINGS[encoding]
            codec = chosen.values if part else chosen.keys
            by_channel = chosen.channel_keys and not part
            largest = x.abs().amax((1,) if by_channel else (1, 2), keepdim=True)
            if codec is Codec.EXACT:
                assert torch.equal(x, y)
            elif codec is Codec.INT8:
                assert ((x - y).abs() <= largest / 127 * 0.501 + x.abs() * rounding).all()
            else:  # 3 bits of mantissa, down to steps of 2**-9 of 448
                step = torch.maximum(x.abs() / 16, largest / 448 / 1024)
                assert ((x - y).abs() <= step * 1.001 + x.abs() * rounding).all()


@pytest.mark.parametrize("encoding", LOSSY)
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-40, -1e-38])
def test_zeros_and_denormals_come_back_as_what_they_nearly_are(encoding, value):
    caches, layout = make_paged("vllm-LBHNC", SIZES, torch.float32)
    for cache in caches.values():
        cache.fill_(value)

    decoded = through(caches, layout, encoding)

    for cache in decoded.values():
        assert (cache - value).abs().max() <= 2.0**-126


@pytest.mark.parametrize("encoding", LOSSY)
def test_an_outlier_costs_no_other_head_anything(encoding):
    caches, layout = make_paged("vllm-LBHNC", SIZES)
    fill(caches)
    before = through(caches, layout, encoding)

    caches["layers.0"][1, 0, 3, 11] = 1e6
    after = through(caches, layout, encoding)

    assert not torch.equal(before["layers.0"][0], after["layers.0"][0])
    assert torch.equal(before["layers.0"][1], after["layers.0"][1])
    assert torch.equal(before["layers.1"], after["layers.1"])


def test_an_outlier_in_a_channel_of_k_costs_no_other_channel_anything_in_int8():
    caches, layout = make_paged("vllm-LBHNC", SIZES)
    fill(caches)
    before = through(caches, layout, "int8")["layers.0"]

    caches["layers.0"][1, 0, 3, 2] = 1e6
    after = through(caches, layout, "int8")["layers.0"]

    same = (before == after).all(dim=1)
    assert not same[0, 2]
    assert same.sum() == same.numel() - 1


@pytest.mark.parametrize("encoding", LOSSY)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 2.0**127])
@pytest.mark.parametrize("at", [3, 11], ids=["k", "v"])
def test_what_8_bits_cannot_hold_poisons_the_block_and_no_other(encoding, value, at):
    caches, layout = make_paged("vllm-LBHNC", SIZES, torch.float32)
    fill(caches)
    caches["layers.1"][2, 1, 5, at if at < 8 else 16 + at] = value
    mover = mover_for(caches, layout, encoding)
    slots = slots_for(mover.payload_bytes, 3)

    mover.gather([1, 2, 3], slots)

    kept_exact = encoding == "fp8-values" and at < 8
    storable = [is_storable(slot.numpy().tobytes(), encoding) for slot in slots]
    assert storable == [True, kept_exact, True]
    if not kept_exact:
        with pytest.raises(ValueError, match="got header"):
            mover.scatter([2], [slots[1]])


@pytest.mark.parametrize("encoding", LOSSY)
def test_the_largest_half_survives(encoding):
    caches, layout = make_paged("vllm-LBHNC", SIZES, torch.float16)
    for cache in caches.values():
        cache.fill_(65504)

    decoded = through(caches, layout, encoding)

    assert all((cache == 65504).all() for cache in decoded.values())


def test_exact_keeps_every_bit_of_everything():
    caches, layout = make_paged("vllm-LBHNC", SIZES, torch.bfloat16)
    for cache in caches.values():
        cache.view(torch.int16).random_(-(2**15), 2**15)  # NaNs with payloads, infinities, -0.0

    decoded = through(caches, layout, "exact")

    for name, cache in caches.items():
        assert torch.equal(decoded[name].view(torch.int16), cache[1].view(torch.int16))


@pytest.mark.parametrize("encoding", LOSSY)
def test_a_payload_of_another_layout_or_encoding_is_refused_before_anything_is_written(encoding):
    caches, layout = make_paged("vllm-LBHNC", SIZES)
    fill(caches)
    before = {name: cache.clone() for name, cache in caches.items()}
    mover = mover_for(caches, layout, encoding)
    good, other, torn = slots_for(mover.payload_bytes, 3)
    renamed = {f"draft.{name}": cache for name, cache in caches.items()}
    other_layout = PagedLayout.from_tensors(renamed, content=layout.content)
    mover.gather([1, 2], [good, torn])
    mover_for(renamed, other_layout, encoding).gather([1], [other])
    torn[9] += 1  # inside the encoding's name

    for bad in (other, torn):
        with pytest.raises(ValueError, match="got header"):
            mover.scatter([0, 3], [good, bad])

    assert all(torch.equal(caches[name], before[name]) for name in caches)


def test_encoded_slots_must_be_aligned():
    caches, layout = make_paged("vllm-LBHNC", SIZES)
    mover = mover_for(caches, layout, "fp8")
    (longer,) = slots_for(mover.payload_bytes + 1, 1)

    with pytest.raises(ValueError, match="multiple of 16"):
        mover.gather([0], [longer[1:]])


def test_exact_slots_may_start_anywhere():
    caches, layout = make_paged("vllm-LBHNC", SIZES)
    fill(caches)
    mover = mover_for(caches, layout)
    (expected,), (longer,) = (
        slots_for(mover.payload_bytes, 1),
        slots_for(mover.payload_bytes + 1, 1),
    )

    mover.gather([2], [expected])
    mover.gather([2], [longer[1:]])

    assert torch.equal(longer[1:], expected)


@pytest.mark.parametrize(
    ("kind", "dtype", "encoding", "message"),
    [
        ("vllm-LBHNC", torch.bfloat16, "int4", "expected one of exact, fp8"),
        ("vllm-LBHNC", torch.float8_e4m3fn, "fp8", "set 'exact'"),
        ("mla", torch.bfloat16, "fp8-values", "K and V in one"),
    ],
)
def test_an_encoding_that_does_not_fit_is_refused_at_the_start(kind, dtype, encoding, message):
    caches, layout = make_paged(kind, SIZES, dtype)

    with pytest.raises(ValueError, match=message):
        mover_for(caches, layout, encoding)


def test_8_bits_need_to_know_what_the_bytes_mean():
    caches, _ = make_paged("vllm-LBHNC", SIZES)
    opaque = PagedLayout.from_tensors(caches)

    with pytest.raises(ValueError, match="opaque"):
        mover_for(caches, opaque, "fp8")


@pytest.mark.parametrize(("encoding", "share"), [("fp8", 0.504), ("int8", 0.57)])
def test_8_bits_hold_about_twice_the_tokens(encoding, share):
    llama = Sizes(layers=2, blocks=2, heads=8, tokens=32, channels=128)
    _, layout = make_paged("vllm-LBNHC", llama)

    assert encoded_bytes(layout, encoding) <= share * layout.block_bytes
