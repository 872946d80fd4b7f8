"""A slot proves its own content: a wrong block is never taken for a right one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixfleet.store.errors import ConfigError, CorruptBlock
from prefixfleet.store.slot import ALIGN_BYTES, HEADER_BYTES, SlotLayout, copy_out, seal, verify

NAMESPACE, BLOCK = b"n" * 16, b"b" * 16
LAYOUT = SlotLayout(payload_bytes=100, shards=2)


def sealed_slot():
    slot = memoryview(bytearray(LAYOUT.slot_bytes))
    for shard in range(LAYOUT.shards):
        LAYOUT.payload(slot, shard)[:] = bytes([shard + 1]) * LAYOUT.payload_bytes
        seal(slot, LAYOUT, NAMESPACE, BLOCK, shard)
    return slot


def test_a_sealed_slot_verifies_every_shard():
    slot = sealed_slot()

    for shard in range(LAYOUT.shards):
        verify(slot, LAYOUT, NAMESPACE, BLOCK, shard)


@given(
    st.integers(0, LAYOUT.shards - 1),
    st.integers(0, HEADER_BYTES + LAYOUT.payload_bytes - 1),
    st.integers(1, 255),
)
def test_any_flipped_byte_of_header_or_payload_is_found(shard, offset, flip):
    slot = sealed_slot()

    slot[shard * LAYOUT.shard_bytes + offset] ^= flip

    with pytest.raises(CorruptBlock):
        verify(slot, LAYOUT, NAMESPACE, BLOCK, shard)


@pytest.mark.parametrize(
    ("namespace", "block", "layout"),
    [
        (b"m" * 16, BLOCK, LAYOUT),
        (NAMESPACE, b"c" * 16, LAYOUT),
        (NAMESPACE, BLOCK, SlotLayout(payload_bytes=99, shards=2)),
        (NAMESPACE, BLOCK, SlotLayout(payload_bytes=100, shards=1)),
    ],
)
def test_a_slot_of_another_identity_is_refused(namespace, block, layout):
    with pytest.raises(CorruptBlock):
        verify(sealed_slot(), layout, namespace, block)


@pytest.mark.parametrize(
    ("namespace", "block"),
    [(NAMESPACE + b"x", BLOCK), (NAMESPACE, BLOCK + b"x"), (b"", BLOCK), (NAMESPACE, BLOCK[:-1])],
)
def test_an_identity_of_another_length_is_neither_sealed_nor_proved(namespace, block):
    slot, bare = sealed_slot(), memoryview(bytearray(LAYOUT.slot_bytes))
    LAYOUT.payload(bare)[:] = LAYOUT.payload(slot)
    target = memoryview(bytearray(LAYOUT.payload_bytes))

    with pytest.raises(CorruptBlock):
        verify(slot, LAYOUT, namespace, block)
    with pytest.raises(CorruptBlock):
        copy_out(slot, LAYOUT, namespace, block, 0, target)
    with pytest.raises(CorruptBlock):
        seal(bare, LAYOUT, namespace, block)
    assert bytes(bare[:HEADER_BYTES]) == bytes(HEADER_BYTES)


def test_a_hash_that_ends_in_zeros_is_not_a_shorter_one():
    slot, hashed = sealed_slot(), BLOCK[:-1] + bytes(1)
    seal(slot, LAYOUT, NAMESPACE, hashed)

    verify(slot, LAYOUT, NAMESPACE, hashed)
    with pytest.raises(CorruptBlock):
        verify(slot, LAYOUT, NAMESPACE, hashed[:-1])


def test_a_copy_is_proved_by_itself():
    slot = sealed_slot()
    target = memoryview(bytearray(LAYOUT.payload_bytes))

    copy_out(slot, LAYOUT, NAMESPACE, BLOCK, 1, target)

    assert target == LAYOUT.payload(slot, 1)


def test_a_copy_of_a_damaged_slot_does_not_pass():
    slot = sealed_slot()
    LAYOUT.payload(slot, 1)[7] ^= 1

    with pytest.raises(CorruptBlock):
        copy_out(slot, LAYOUT, NAMESPACE, BLOCK, 1, memoryview(bytearray(LAYOUT.payload_bytes)))


def test_shards_do_not_stand_in_for_each_other():
    slot = sealed_slot()
    half = LAYOUT.shard_bytes
    slot[:half] = bytes(slot[half:])

    with pytest.raises(CorruptBlock):
        verify(slot, LAYOUT, NAMESPACE, BLOCK, 0)


def test_an_empty_slot_is_no_block():
    with pytest.raises(CorruptBlock):
        verify(memoryview(bytearray(LAYOUT.slot_bytes)), LAYOUT, NAMESPACE, BLOCK)


def test_slots_are_aligned_for_direct_disk_io():
    for payload in (1, ALIGN_BYTES - HEADER_BYTES, ALIGN_BYTES - HEADER_BYTES + 1, 737_280):
        layout = SlotLayout(payload_bytes=payload, shards=3)
        assert layout.slot_bytes % ALIGN_BYTES == 0
        assert layout.shard_bytes - payload < HEADER_BYTES + ALIGN_BYTES


@pytest.mark.parametrize(("payload", "shards"), [(0, 1), (1, 0), (1, 1 << 16)])
def test_an_impossible_layout_is_refused(payload, shards):
    with pytest.raises(ConfigError):
        SlotLayout(payload_bytes=payload, shards=shards)
