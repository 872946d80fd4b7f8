"""The order of copies beside an engine that computes later than it launches."""

import random

import pytest
import torch
from lazy_stream import LazyStream

from prefixfleet.cluster.connector_cuda import staged_copies
from prefixfleet.cluster.connector_staging import StagedCopies
from prefixfleet.kernels.mover import mover_for
from prefixfleet.kernels.paged import Content, PagedLayout

BLOCKS, ROWS = 6, 3


class Rig:
    """Paged KV of two layers, an engine's stream, and copies on a stream of their own."""

    def __init__(self, encoding="exact"):
        self.caches = {f"l{i}": torch.zeros(BLOCKS, 2, 16, 8) for i in range(2)}
        layout = PagedLayout.from_tensors(self.caches, content=Content.PLAIN)
        mover = mover_for(self.caches, layout, encoding)
        self.payload_bytes = mover.payload_bytes
        self.engine = LazyStream()
        self.stream = LazyStream(self.engine)
        rows, on_device = (
            [torch.zeros(self.payload_bytes, dtype=torch.uint8) for _ in range(ROWS)]
            for _ in range(2)
        )
        self.copies = StagedCopies(mover, self.stream, rows, on_device)

    def compute(self, block, value):
        """The engine launches a step that fills a block."""
        for cache in self.caches.values():
            self.engine.enqueue(lambda cache=cache: cache[block].fill_(value))

    def payload(self, value):
        """A block that is ``value`` throughout, exact."""
        return torch.full((self.payload_bytes // 4,), float(value)).view(torch.uint8)

    def read(self, blocks, after=None):
        """What a save copies; a value a block."""
        targets = [bytearray(self.payload_bytes) for _ in blocks]
        self.copies.read(blocks, [memoryview(t) for t in targets], after or self.mark())
        return [value_of(torch.frombuffer(t, dtype=torch.float32)) for t in targets]

    def load(self, values, blocks):
        after = self.mark()
        for row, value in enumerate(values):
            self.copies.host_rows[row].copy_(self.payload(value))
            self.copies.send(row)
        self.copies.write(blocks, after)

    def mark(self):
        return self.copies.mark_engine()

    def blocks(self):
        """A value a block, when all is done that was launched."""
        self.engine.mark().synchronize()
        return [value_of(torch.stack([c[i] for c in self.caches.values()])) for i in range(BLOCKS)]


def value_of(block):
    """The one value of a whole block; None if it is a mixture."""
    return block.flatten()[0].item() if bool((block == block.flatten()[0]).all()) else None


@pytest.fixture
def rig():
    return Rig()


def test_a_save_reads_what_the_forward_before_it_computed(rig):
    rig.compute(4, value=7)

    assert rig.read([4]) == [7]


def test_a_save_does_not_wait_for_what_the_engine_launched_later(rig):
    rig.compute(4, value=7)
    after = rig.mark()
    rig.compute(5, value=8)

    assert rig.read([4], after) == [7]
    assert rig.engine.undone == 2  # layers of the later step


def test_a_load_is_not_overwritten_by_the_step_of_the_blocks_last_owner(rig):
    rig.compute(4, value=7)

    rig.load([3], [4])

    assert rig.blocks()[4] == 3


def test_what_the_engine_computes_after_a_load_sees_it(rig):
    rig.load([3], [4])
    rig.engine.enqueue(lambda: [c[5].copy_(c[4]) for c in rig.caches.values()])

    assert rig.blocks()[5] == 3


def test_rows_cross_to_the_host_while_those_before_are_handed_over(rig):
    for block in range(ROWS):
        rig.compute(block, value=block + 1)

    assert rig.read([0, 1, 2]) == [1, 2, 3]
    # a wait for the forward and a gather, then one copy a row: each is waited for by itself
    assert rig.stream.waits == [3, 4, 5, 5]


def test_a_row_that_was_sent_is_on_its_way_before_the_next_is_filled(rig):
    rig.copies.send(0)

    assert rig.stream.undone == 1


def test_a_save_that_fails_leaves_no_copy_in_flight_into_a_row(rig):
    rig.compute(0, value=9)
    targets = [memoryview(bytearray(rig.payload_bytes)) for _ in range(ROWS)]

    with pytest.raises(ValueError, match="zip"):  # of a slot too few
        rig.copies.read([0, 0, 0], targets[1:], rig.mark())

    assert rig.stream.undone == 0
    rig.load([1, 2, 3], [3, 4, 5])
    assert rig.blocks()[3:] == [1, 2, 3]


def test_a_slot_of_another_size_is_refused(rig):
    with pytest.raises(ValueError, match="contiguous bytes"):
        rig.copies.read([0], [memoryview(bytearray(rig.payload_bytes + 1))], rig.mark())


@pytest.mark.parametrize("block", [-1, BLOCKS])
def test_a_block_that_is_none_is_refused_and_the_next_copies_are_right(rig, block):
    with pytest.raises(ValueError, match="block ids"):
        rig.load([1], [block])
    with pytest.raises(ValueError, match="block ids"):
        rig.read([block])

    rig.load([2], [1])
    assert rig.read([1]) == [2]


def test_more_blocks_than_rows_are_refused(rig):
    with pytest.raises(ValueError, match="4 ids for 3 slots"):
        rig.read([0, 1, 2, 3])


def test_a_payload_that_is_no_encoded_block_is_refused_before_anything_is_written():
    rig = Rig("fp8")
    rig.compute(2, value=5)
    rig.copies.send(0)

    with pytest.raises(ValueError, match="encoded block"):
        rig.copies.write([2], rig.mark())

    assert rig.engine.undone == 2  # refused without a wait for the device
    assert rig.blocks()[2] == 5


@pytest.mark.parametrize(
    ("refused", "told"),
    [("pin_memory", "page-locked host memory"), ("device", "memory of cuda:1.*utilization")],
)
def test_memory_that_cuda_refuses_is_told_with_what_to_set(monkeypatch, rig, refused, told):
    """As PyTorch refuses it; there is no GPU here."""
    empty = torch.empty

    def refuse(size, *, dtype, **where):
        if refused in where:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", refuse)

    with pytest.raises(ValueError, match=told):
        staged_copies(rig.copies._mover, torch.device("cuda:1"), ROWS)


@pytest.mark.parametrize("encoding", ["exact", "fp8", "int8-fp8"])
def test_a_rehearsal_leaves_the_paged_kv_as_it_was(encoding):
    rig = Rig(encoding)
    rig.compute(0, value=0)

    rig.copies.rehearse()

    assert rig.blocks() == [0] * BLOCKS
    assert rig.stream.undone == 0


@pytest.mark.parametrize("seed", range(20))
def test_any_mixture_of_steps_saves_and_loads_ends_as_if_done_in_turn(seed):
    draw, rig, expected = random.Random(seed), Rig(), [0.0] * BLOCKS
    for value in range(1, 40):
        blocks = draw.sample(range(BLOCKS), draw.randint(1, ROWS))
        match draw.choice(["step", "save", "load"]):
            case "step":
                rig.compute(blocks[0], value)
                expected[blocks[0]] = value
            case "save":
                assert rig.read(blocks) == [expected[block] for block in blocks]
            case "load":
                rig.load([value + i / 10 for i in range(len(blocks))], blocks)
                for i, block in enumerate(blocks):
                    expected[block] = float(torch.tensor(value + i / 10))
        if draw.random() < 0.3:
            rig.engine.run_to(rig.engine.mark().done - draw.randint(0, rig.engine.undone))
    assert rig.blocks() == expected
