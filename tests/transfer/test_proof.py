"""Blocks are proved as their bytes arrive, however they are cut, and never pass by it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pulls import LAYOUT, NAMESPACE, chain, payload

from prefixfleet.store.slot import seal
from prefixfleet.transfer import proof
from prefixfleet.transfer.proof import Proof

BLOCKS = chain(4)
SLOTS = [2, 0, 3, 1]
WHOLE = len(BLOCKS) * LAYOUT.slot_bytes


def filled():
    """Blocks in slots, and the proof of them in the order in which they arrive."""
    segment = memoryview(bytearray(WHOLE))
    for block, slot in zip(BLOCKS, SLOTS, strict=True):
        memory = segment[slot * LAYOUT.slot_bytes : (slot + 1) * LAYOUT.slot_bytes]
        for shard in range(LAYOUT.shards):
            part = LAYOUT.payload(memory, shard)
            part[:] = payload(block, shard, part.nbytes)
            seal(memory, LAYOUT, NAMESPACE, block, shard)
    return segment, Proof(segment, LAYOUT, NAMESPACE, dict(zip(SLOTS, BLOCKS, strict=True)))


cuts = st.lists(st.integers(0, WHOLE), max_size=12).map(sorted)


@given(cuts)
async def test_blocks_that_are_right_are_good_however_they_arrive(arrivals):
    _, proved = filled()
    for count in arrivals:
        proved.arrived(count)

    assert await proved.good(BLOCKS) == len(BLOCKS)


@given(cuts, st.integers(0, 3), st.integers(0, LAYOUT.shards - 1), st.integers(0, 8063))
async def test_a_wrong_byte_is_found_however_it_arrives(arrivals, which, shard, offset):
    if 60 <= offset < 64:
        return  # padding, nobody reads it
    segment, proved = filled()
    segment[SLOTS[which] * LAYOUT.slot_bytes + shard * LAYOUT.shard_bytes + offset] ^= 1
    for count in arrivals:
        proved.arrived(count)

    assert await proved.good(BLOCKS) == which


@given(st.integers(0, WHOLE))
async def test_what_was_not_there_yet_is_not_proved_before_it_is(count):
    """Bytes that change after a count was told of, but lie behind it, are seen as they end up."""
    segment, proved = filled()
    order = [slot * LAYOUT.slot_bytes for slot in SLOTS]
    right = bytes(segment)
    for i, start in enumerate(order):
        begin = max(0, min(LAYOUT.slot_bytes, count - i * LAYOUT.slot_bytes))
        segment[start + begin : start + LAYOUT.slot_bytes] = bytes(LAYOUT.slot_bytes - begin)
    proved.arrived(count)
    segment[:] = right

    assert await proved.good(BLOCKS) == len(BLOCKS)


@pytest.mark.parametrize("limit", [0, 1 << 30], ids=["in a thread", "on the loop"])
async def test_what_nobody_told_of_is_proved_at_the_end(monkeypatch, limit):
    monkeypatch.setattr(proof, "IN_THREAD_BYTES", limit)
    segment, proved = filled()
    segment[SLOTS[3] * LAYOUT.slot_bytes + 100] ^= 1

    assert await proved.good(BLOCKS) == 3
