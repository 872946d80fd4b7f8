"""Prefix chains: equal hash means equal everything before."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixfleet.store.chain import SEGMENT_BLOCKS, extend_chain, segment_heads

ROOT, KEY = b"r" * 16, b"k" * 32
token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=100)


def test_only_full_blocks_have_a_hash():
    assert [len(extend_chain(ROOT, range(n), 4, KEY)) for n in (0, 3, 4, 5, 8)] == [0, 0, 1, 1, 2]


@given(token_lists, st.integers(1, 9), st.integers(0, 12))
def test_a_chain_can_be_extended_piece_by_piece(tokens, block_tokens, blocks):
    """The engine hashes decode blocks as they fill; the router hashes the prompt at once."""
    whole = extend_chain(ROOT, tokens, block_tokens, KEY)
    cut = min(blocks, len(whole))

    head = extend_chain(ROOT, tokens[: cut * block_tokens], block_tokens, KEY)
    rest = extend_chain(head[-1] if head else ROOT, tokens[cut * block_tokens :], block_tokens, KEY)

    assert head + rest == whole


@given(token_lists, token_lists, st.integers(1, 9))
def test_two_chains_agree_exactly_as_far_as_their_tokens_do(left, right, block_tokens):
    a, b = extend_chain(ROOT, left, block_tokens, KEY), extend_chain(ROOT, right, block_tokens, KEY)
    common = next((i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), None)
    common = min(len(left), len(right)) if common is None else common

    shared = common // block_tokens

    assert a[:shared] == b[:shared]
    assert not set(a[shared:]) & set(b[shared:])


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_id_that_does_not_fit_is_an_error(token):
    with pytest.raises(OverflowError):
        extend_chain(ROOT, [token], 1, KEY)


def test_every_block_of_a_segment_is_named_by_its_first():
    chain = extend_chain(ROOT, range(2 * SEGMENT_BLOCKS + 3), 1, KEY)

    heads = segment_heads(chain)

    assert set(heads) == {chain[0], chain[SEGMENT_BLOCKS], chain[2 * SEGMENT_BLOCKS]}
    assert heads[SEGMENT_BLOCKS - 1] == chain[0]
    assert heads[-1] == chain[2 * SEGMENT_BLOCKS]
