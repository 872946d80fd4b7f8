"""Blocks stored in 8 bits: used where they hold, refused by rule elsewhere, never taken for exact.

The rig's KV has values that 8 bits hold, so that every loaded block can still be proved.
"""

import pytest
from engine_rig import BLOCK, answer, caches_of, engine_config, expected_answer, prompt_of
from node_rig import pool_of

from prefixfleet.cluster.connector_identity import CONTENT_OF_KERNEL, block_content
from prefixfleet.kernels.encoding import ENCODINGS
from prefixfleet.kernels.paged import Content
from prefixfleet.store.errors import ConfigError

LOSSY = [name for name in ENCODINGS if name != "exact"]


@pytest.mark.parametrize("encoding", LOSSY)
def test_another_engine_loads_what_the_first_one_stored_in_8_bits(start, daemons, encoding):
    prompt = prompt_of(9 * BLOCK + 3)
    answer(start(encoding=encoding), "a", prompt)

    second = start(encoding=encoding)
    told = answer(second, "b", prompt)

    assert told == expected_answer(prompt, 4)
    assert second.reports["b"]["local_blocks"] == 9
    daemons.wait_unused()


def test_every_rank_keeps_its_own_encoded_shard(start):
    prompt = prompt_of(7 * BLOCK + 1)
    answer(start(ranks=2, encoding="int8-fp8"), "a", prompt)

    second = start(ranks=2, encoding="int8-fp8")
    told = answer(second, "b", prompt)

    assert told == expected_answer(prompt, 4)
    assert second.reports["b"]["local_blocks"] == 7


def test_slots_are_as_small_as_the_encoding_makes_them(start, daemons):
    layouts = {}
    for encoding in ("exact", "int8"):
        start(encoding=encoding, at=daemons.start(encoding))
        layouts[encoding] = daemons.ask(encoding, lambda node: pool_of(node).host.kind.layout)

    assert layouts["int8"].payload_bytes < layouts["exact"].payload_bytes / 2


@pytest.mark.parametrize(
    ("first", "other"), [("exact", "int8"), ("int8", "exact"), ("int8", "fp8")]
)
def test_a_node_refuses_an_engine_of_another_encoding(start, first, other):
    start(encoding=first)

    why = f"stored as '{other}', an engine here stores them as '{first}'"
    with pytest.raises(ConfigError, match=why):
        start(encoding=other)


def test_nodes_of_different_encodings_have_no_block_in_common(start, daemons):
    prompt = prompt_of(5 * BLOCK + 1)
    held = {}
    for encoding in ("exact", "int8-fp8", "int8", "fp8"):
        answer(start(encoding=encoding, at=daemons.start(encoding)), "a", prompt)
        held[encoding] = daemons.ask(
            encoding, lambda node: {block for block, _ in pool_of(node).host.pool.resident()}
        )

    assert {len(blocks) for blocks in held.values()} == {5}
    assert len(set.union(*held.values())) == 4 * 5


def test_a_block_that_8_bits_cannot_hold_is_not_stored_nor_is_what_follows_it(start, daemons):
    prompt = prompt_of(12 * BLOCK + 1)
    rig = start(step_tokens=1024, encoding="int8-fp8")
    rig.ranks[0].huge.add(10 * BLOCK + 3)
    answer(rig, "a", prompt)

    second = start(encoding="int8-fp8")
    told = answer(second, "b", prompt)

    assert told == expected_answer(prompt, 4)
    assert second.reports["b"]["local_blocks"] == 10
    assert rig.counts["dropped_blocks"] == 2
    daemons.wait_unused()


def test_a_payload_that_is_not_what_the_engine_decodes_is_computed(start, daemons):
    """Sealed again after it was changed, so that only its own header tells."""
    prompt = prompt_of(6 * BLOCK + 1)
    answer(start(encoding="int8"), "a", prompt)
    daemons.ask("a", reseal_with_another_header)
    rig = start(encoding="int8")

    told = answer(rig, "b", prompt)

    assert told == expected_answer(prompt, 4)
    assert rig.reports["b"]["local_blocks"] == 0
    assert rig.counts["failed_loads"] == 1
    daemons.wait_unused()


def reseal_with_another_header(node):
    from prefixfleet.store.slot import seal

    host = pool_of(node).host
    layout = host.kind.layout
    blocks = [block for block, _ in host.pool.resident()]
    with host.pool.pin([blocks[-1]]) as pin:
        for slot in pin.slots:
            memory = host.segment.view[slot * layout.slot_bytes : (slot + 1) * layout.slot_bytes]
            layout.payload(memory)[20] ^= 1  # in the digest of the layout
            seal(memory, layout, host.kind.digest, blocks[-1])


def test_8_bits_are_refused_where_the_order_of_k_and_v_is_not_known(tmp_path, start):
    with pytest.raises(ConfigError, match="got attention kernel 'amx', expected one of vec"):
        start(encoding="int8", isa="amx")


@pytest.mark.parametrize("kernel", CONTENT_OF_KERNEL)
def test_exact_blocks_need_no_order(kernel, tmp_path, start):
    config = engine_config(tmp_path / "model", tmp_path / "s", isa=kernel)

    assert block_content(config, caches_of(4), "exact") is Content.OPAQUE
    assert block_content(config, caches_of(4), "int8") is CONTENT_OF_KERNEL[kernel]


def test_an_unknown_encoding_stops_the_start(start):
    with pytest.raises(ConfigError, match="got 'int4', expected one of exact, fp8-values"):
        start(encoding="int4")
