"""The specification itself, on vLLM's CPU layout."""

import pytest
import torch

from prefixfleet.kernels.paged import PagedLayout
from prefixfleet.kernels.reference import gather, scatter


def cpu_caches(num_blocks=6, num_layers=3):
    memory = torch.randn(num_layers, num_blocks, 3, 32, 128)
    return {f"model.layers.{i}.self_attn.attn": memory[i] for i in range(num_layers)}


def slots_of(layout, count):
    return [memoryview(bytearray(layout.block_bytes)) for _ in range(count)]


def test_a_slot_holds_the_blocks_bytes_layer_after_layer():
    caches = cpu_caches()
    layout = PagedLayout.from_tensors(caches)
    (slot,) = slots_of(layout, 1)

    gather(caches, layout, [4], [slot])

    assert bytes(slot) == b"".join(c[4].numpy().tobytes() for c in caches.values())


def test_scatter_puts_back_what_gather_took_and_touches_nothing_else():
    caches, target = cpu_caches(), cpu_caches()
    layout = PagedLayout.from_tensors(caches)
    expected = {name: c.clone() for name, c in target.items()}
    slots = slots_of(layout, 2)

    gather(caches, layout, [5, 0], slots)
    scatter(target, layout, [1, 3], slots)

    for name in caches:
        expected[name][1], expected[name][3] = caches[name][5], caches[name][0]
        assert torch.equal(target[name], expected[name])


def test_a_block_may_be_gathered_twice_but_not_scattered_twice():
    caches = cpu_caches()
    layout = PagedLayout.from_tensors(caches)
    slots = slots_of(layout, 2)

    gather(caches, layout, [2, 2], slots)

    assert slots[0] == slots[1]
    with pytest.raises(ValueError, match="more than once"):
        scatter(caches, layout, [2, 2], slots)


@pytest.mark.parametrize("move", [gather, scatter])
@pytest.mark.parametrize(
    ("ids", "make", "message"),
    [
        ([0, 1], lambda n: [bytearray(n)], "ids for"),
        ([6], lambda n: [bytearray(n)], "block ids"),
        ([-1], lambda n: [bytearray(n)], "block ids"),
        ([0], lambda n: [bytearray(n - 1)], "contiguous bytes"),
        ([0], lambda n: [bytes(n)], "read-only"),
        ([0, 1], lambda n: [bytearray(n), bytearray(n + 1)], "contiguous bytes"),
    ],
)
def test_wrong_ids_and_slots_are_refused_before_anything_is_written(move, ids, make, message):
    caches = cpu_caches()
    layout = PagedLayout.from_tensors(caches)
    before = {name: c.clone() for name, c in caches.items()}

    with pytest.raises(ValueError, match=message):
        move(caches, layout, ids, [memoryview(b) for b in make(layout.block_bytes)])

    assert all(torch.equal(caches[name], before[name]) for name in caches)


def test_no_blocks_is_no_work():
    caches = cpu_caches()

    gather(caches, PagedLayout.from_tensors(caches), [], [])
    scatter(caches, PagedLayout.from_tensors(caches), [], [])


def test_other_tensors_than_the_layouts_are_refused():
    layout = PagedLayout.from_tensors(cpu_caches())

    with pytest.raises(ValueError, match="layout was read from"):
        gather(cpu_caches(num_blocks=7), layout, [], [])
    with pytest.raises(ValueError, match="tensors, layout has"):
        gather(cpu_caches(num_layers=2), layout, [], [])
