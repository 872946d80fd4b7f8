"""The compact table holds what a dict of bitmaps would."""

import random
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prefixfleet.router import block_table
from prefixfleet.router.block_table import BlockTable

FIELDS = [bytes(8), b"\0" * 7 + b"\1", *(i.to_bytes(7) + b"\1" for i in range(60))]
fields = st.lists(st.sampled_from(FIELDS[1:]), max_size=30)
bits = st.sampled_from([1, 2, 1 << 5, 1 << 70])


class TableMachine(RuleBasedStateMachine):
    """All keys fall into one shard, so that it fills, grows and forgets."""

    def __init__(self) -> None:
        super().__init__()
        self.table = BlockTable()
        self.model: dict[bytes, int] = {}

    @rule(fields=fields, bit=bits)
    def add(self, fields: list[bytes], bit: int) -> None:
        self.table.add(fields, bit)
        for field in fields:
            self.model[field] = self.model.get(field, 0) | bit

    @rule(fields=fields, bit=bits)
    def remove(self, fields: list[bytes], bit: int) -> None:
        self.table.remove(fields, bit)
        for field in fields:
            self.model[field] = self.model.get(field, 0) & ~bit

    @rule(bit=bits)
    def drop(self, bit: int) -> None:
        self.table.drop(bit)
        self.model = {field: held & ~bit for field, held in self.model.items()}

    @invariant()
    def it_is_the_same(self) -> None:
        for field in FIELDS[1:]:
            assert self.table[field] == self.model.get(field, 0)
        assert len(self.table) == sum(held > 0 for held in self.model.values())

    @invariant()
    def sets_are_counted_right(self) -> None:
        counts = [0] * len(self.table._bitmaps)
        for keys, numbers in zip(self.table._keys, self.table._sets, strict=True):
            for key, number in zip(keys, numbers, strict=True):
                counts[number] += bool(key)
        assert counts == self.table._blocks
        live = {number for number, count in enumerate(counts) if count} | {block_table.NOBODY}
        assert live.isdisjoint(self.table._free)
        assert set(self.table._free) | live >= set(range(len(counts)))


TableMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestTable = TableMachine.TestCase


def test_the_field_of_zeros_is_kept_too():
    table = BlockTable()
    table.add([FIELDS[0]], 4)

    assert table[FIELDS[0]] == 4


def test_many_blocks_of_many_nodes():
    rng = random.Random(1)
    table, model = BlockTable(), {}
    for _ in range(100):
        chain = [rng.randbytes(8) for _ in range(300)]
        for node in rng.sample(range(64), 3):
            length = rng.randrange(1, 300)
            table.add(chain[:length], 1 << node)
            for field in chain[:length]:
                model[field] = model.get(field, 0) | 1 << node

    assert {field: table[field] for field in model} == model
    assert len(table) == len(model)


def test_a_table_whose_blocks_come_and_go_does_not_grow():
    rng = random.Random(2)
    table = BlockTable()
    for _ in range(50):
        chain = [rng.randbytes(8) for _ in range(2_000)]
        table.add(chain, 1)
        table.remove(chain, 1)

    assert len(table) == 0
    assert sum(map(len, table._keys)) <= 32 * block_table.SHARDS


@pytest.mark.parametrize("gone", ["dropped", "removed"])
def test_numbers_of_sets_are_used_again(gone):
    rng = random.Random(3)
    table = BlockTable()
    chain = [rng.randbytes(8) for _ in range(500)]
    for node in range(300):
        table.add(chain, 1 << node)
        if gone == "dropped":
            table.drop(1 << node)
        else:
            table.remove(chain, 1 << node)

    assert len(table._bitmaps) < 20


def test_a_block_takes_less_than_forty_bytes():
    rng = random.Random(4)
    table = BlockTable()
    for _ in range(200):
        table.add([rng.randbytes(8) for _ in range(1_000)], 1 << rng.randrange(64))

    size = sum(map(sys.getsizeof, [*table._keys, *table._sets]))
    assert size / len(table) < 40
