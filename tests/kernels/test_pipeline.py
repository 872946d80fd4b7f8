"""Loads and saves never race with compute, whatever the speed of the streams."""

import pytest
import torch
from paged_caches import Sizes, fill, make_paged, slots_for
from simulated_streams import SimulatedDevice

from prefixfleet.kernels.encoding import segments
from prefixfleet.kernels.paged import block_views
from prefixfleet.kernels.pipeline import LayerLoads, Saves
from prefixfleet.kernels.reference import gather

LAYERS, BLOCKS = 3, 6
SEEDS = range(60)


class LateMover:
    """Moves exact blocks like a GPU: page by page, when the stream comes to it."""

    def __init__(self, device, caches, layout):
        self.device, self.caches, self.layout = device, caches, layout

    def load(self, block_ids, slots):
        return list(zip(block_ids, slots, strict=True))

    def scatter_pages(self, batch, first, last):
        views, parts = block_views(self.caches, self.layout), segments(self.layout, "exact")
        for page in range(first, last):
            for block, slot in batch:
                source = slot[slice(*parts[page])].view(views[page].dtype)
                target = views[page][block]
                self.device.current.enqueue(
                    lambda t=target, s=source: t.copy_(s.view(t.shape)),
                )

    def gather(self, block_ids, outs):
        for block, out in zip(block_ids, outs, strict=True):
            self.device.current.enqueue(
                lambda b=block, o=out: gather(self.caches, self.layout, [b], [o])
            )


class Engine:
    """Computes by hand: each layer checks a block and then overwrites another."""

    def __init__(self, seed):
        self.device = SimulatedDevice(seed)
        self.caches, self.layout = make_paged("vllm-LBHNC", Sizes(LAYERS, BLOCKS))
        mover = LateMover(self.device, self.caches, self.layout)
        self.loads = LayerLoads(self.device, mover, LAYERS)
        self.saves = Saves(self.device, mover)
        self.seen: list[float] = []

    def compute(self, work):
        self.device.compute().enqueue(work)
        self.device.advance(2)

    def write(self, layer, block, value):
        self.compute(lambda: self.caches[f"layers.{layer}"][block].fill_(value))

    def read(self, layer, block):
        self.compute(
            lambda: self.seen.extend(self.caches[f"layers.{layer}"][block].unique().tolist())
        )

    def slot_of(self, value):
        slot = slots_for(self.layout.block_bytes, 1)[0]
        slot.view(torch.bfloat16).fill_(value)
        return slot


@pytest.mark.parametrize("seed", SEEDS)
def test_a_layer_computes_with_what_was_loaded_for_it(seed):
    engine = Engine(seed)

    engine.loads.start("a", [1, 2], [engine.slot_of(10), engine.slot_of(20)])
    engine.loads.start("b", [3], [engine.slot_of(30)])
    for layer in range(LAYERS):
        engine.loads.wait_for(layer)
        for block in (1, 2, 3):
            engine.read(layer, block)
    engine.device.drain()

    assert engine.seen == [10, 20, 30] * LAYERS
    assert engine.loads.finished() == ["a", "b"]
    assert engine.loads.finished() == []


@pytest.mark.parametrize("seed", SEEDS)
def test_a_load_waits_for_the_last_reader_of_the_blocks_it_takes(seed):
    engine = Engine(seed)
    for layer in range(LAYERS):
        engine.write(layer, 1, 5)
        engine.read(layer, 1)

    engine.loads.start("a", [1], [engine.slot_of(10)])
    engine.device.drain()

    assert engine.seen == [5] * LAYERS


@pytest.mark.parametrize("seed", SEEDS)
def test_a_save_reads_what_the_forward_left_and_not_what_comes_after(seed):
    engine = Engine(seed)
    out = engine.slot_of(0)

    for layer in range(LAYERS):
        engine.write(layer, 4, 7)
    engine.saves.start("a", [4], [out])
    for layer in range(LAYERS):
        engine.write(layer, 5, 1)  # the next forward need not wait
    engine.saves.hold()
    for layer in range(LAYERS):
        engine.write(layer, 4, 8)  # block 4 has another owner now
    engine.device.drain()

    assert out.view(torch.bfloat16).unique().tolist() == [7]
    assert engine.saves.finished() == ["a"]


def test_saves_do_not_hold_up_compute():
    engine = Engine(0)
    compute = engine.device.compute()

    engine.saves.start("a", [4], [engine.slot_of(0)])
    compute.enqueue(lambda: engine.seen.append(1))
    while compute.step():
        pass

    assert engine.seen == [1]
    assert engine.saves.finished() == []


def test_a_transfer_has_not_finished_before_the_stream_came_to_its_end():
    engine = Engine(0)

    engine.loads.start("a", [1], [engine.slot_of(1)])
    engine.saves.start("b", [1], [engine.slot_of(1)])

    assert engine.loads.finished() == []
    assert engine.saves.finished() == []
    engine.device.drain()
    assert engine.loads.finished() == ["a"]
    assert engine.saves.finished() == ["b"]


def test_waiting_for_a_page_before_any_load_is_no_wait():
    engine = Engine(0)
    fill(engine.caches)

    engine.loads.wait_for(0)

    assert not engine.device.compute().queue
