"""The layout is read from tensors; what it does not know, it refuses."""

from collections import defaultdict

import pytest
import torch
from paged_caches import KINDS, SMALL, VLLM_ORDERS, Sizes, fill, make_paged, slots_for

from prefixfleet.kernels.encoding import encoded_bytes
from prefixfleet.kernels.paged import Content, PagedLayout
from prefixfleet.kernels.reference import gather


def vllm_caches(order, sizes=SMALL, dtype=torch.bfloat16):
    return make_paged(f"vllm-{order}", sizes, dtype).caches


@pytest.mark.parametrize("order", VLLM_ORDERS)
def test_every_order_of_vllm_is_read(order):
    layout = PagedLayout.from_tensors(vllm_caches(order), content=Content.PLAIN)

    assert layout.num_blocks == SMALL.blocks
    assert (
        layout.block_bytes == 2 * 3 * 2 * 4 * 2 * 8
    )  # bytes, layers, heads, tokens, K/V, channels


def test_describe_tells_apart_what_changes_a_blocks_bytes():
    variants = [
        vllm_caches("LBHNC"),
        vllm_caches("LBNHC"),  # tokens before heads
        vllm_caches("LBHNC", dtype=torch.float16),
        vllm_caches("LBHNC", sizes=Sizes(layers=2)),
        vllm_caches("LBHNC", sizes=Sizes(heads=4, tokens=2)),
        vllm_caches("LBHNC", sizes=Sizes(channels=16)),
        dict(reversed(vllm_caches("LBHNC").items())),  # the same layers in another order
        {f"other.{name}": cache for name, cache in vllm_caches("LBHNC").items()},
    ]

    texts = {PagedLayout.from_tensors(caches).describe() for caches in variants}
    plain = PagedLayout.from_tensors(variants[0], content=Content.PLAIN).describe()

    assert len(texts | {plain}) == len(variants) + 1


@pytest.mark.parametrize("other", ["BLHNC", "LHBNC", "BHLNC"])
def test_describe_is_the_same_where_only_the_place_of_pages_differs(other):
    a = PagedLayout.from_tensors(vllm_caches("LBHNC"))
    b = PagedLayout.from_tensors(vllm_caches(other, sizes=Sizes(blocks=7)))

    assert a.describe() == b.describe()


@pytest.mark.parametrize("encoding", ["exact", "int8"])
def test_blocks_of_layouts_that_describe_alike_have_the_same_bytes(encoding):
    kinds = [kind for kind in KINDS if make_paged(kind).caches["layers.0"].shape == (5, 2, 4, 16)]
    payloads = defaultdict(set)

    for kind in kinds:
        caches, layout = make_paged(kind)
        fill(caches)
        (slot,) = slots_for(encoded_bytes(layout, encoding), 1)
        gather(caches, layout, [2], [slot], encoding)
        payloads[layout.describe()].add(slot.numpy().tobytes())

    assert 1 < len(payloads) < len(kinds)
    assert all(len(variants) == 1 for variants in payloads.values())


@pytest.mark.parametrize(
    ("shape", "num_blocks"),
    [((2, 6, 4, 3, 8), 6), ((6, 2, 4, 3, 8), 6), ((6, 4, 40), 6)],
)
def test_older_shapes_are_read(shape, num_blocks):
    layout = PagedLayout.from_tensors({"a": torch.zeros(shape)})

    assert layout.num_blocks == num_blocks


@pytest.mark.parametrize(
    ("caches", "stated", "message"),
    [
        ({}, {}, "no tensors"),
        ({"a": torch.zeros(4, 8)}, {}, "unknown layout"),
        ({"a": torch.zeros(2, 2, 4, 3, 8)}, {}, "unknown layout"),
        ({"a": torch.zeros(3, 4, 5, 3, 8)}, {}, "unknown layout"),
        ({"a": torch.zeros(2, 6, 4, 3, 8)}, {"content": Content.PLAIN}, "unknown layout"),
        ({"a": torch.zeros(4, 2, 4, 8)}, {"axes": "BHND", "content": Content.PLAIN}, "content"),
        ({"a": torch.zeros(4, 2, 4, 7)}, {"content": Content.PLAIN}, "content"),
        ({"a": torch.zeros(4, 2, 4, 8, dtype=torch.uint8)}, {"content": Content.PLAIN}, "content"),
        (
            {"a": torch.zeros(4, 4, 2, 8).transpose(1, 2)},
            {"content": Content.KEYS_TRANSPOSED},
            "content",
        ),
        ({"a": torch.zeros(4, 2, 4, 8)}, {"axes": "BHNX"}, "axes"),
        ({"a": torch.zeros(4, 2, 4, 8)}, {"axes": "BHN"}, "unknown layout"),
        ({"a": torch.zeros(4, 2, 4, 8)}, {"axes": "HHNC"}, "axes"),
        ({"a": torch.zeros(0, 2, 4, 8)}, {}, "with memory"),
        ({"a": torch.zeros(4, 2, 4, 8, device="meta")}, {}, "with memory"),
        ({"a": torch.zeros(1, 2, 4, 8).expand(4, 2, 4, 8)}, {}, "overlap"),
        ({"a": torch.zeros(4, 2, 4, 16)[..., ::2]}, {}, "overlap"),
        ({"a": torch.zeros(4, 2, 4, 8), "b": torch.zeros(5, 2, 4, 8)}, {}, "number of blocks"),
    ],
)
def test_a_layout_that_is_not_known_is_refused(caches, stated, message):
    with pytest.raises(ValueError, match=message):
        PagedLayout.from_tensors(caches, **stated)
