"""Identity of KV bytes: a field missing from it is the commonest fatal bug of every peer."""

import dataclasses

import pytest

from prefixfleet.store.chain import extend_chain
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.namespace import (
    DIGEST_BYTES,
    Namespace,
    Scope,
    chain_root,
    hash_key,
)

SECRET = b"a cluster secret of some length"
TOKENS = list(range(64))
BASE = Namespace(
    model="LlamaForCausalLM/30x3x64",
    weights="w1",
    dtype="float32",
    block_tokens=32,
    layout="LBHNC",
    engine="vllm",
    isa="avx512",
    tensor_parallel=1,
)
OTHER_VALUES = {
    "model": "LlamaForCausalLM/32x8x128",
    "weights": "w2",
    "dtype": "bfloat16",
    "block_tokens": 64,
    "layout": "LBNHC",
    "engine": "sglang",
    "isa": "amx",
    "tensor_parallel": 2,
    "encoding": "int8",
    "version": 2,
}


def chain_of(namespace=BASE, scope=None, secret=SECRET, extras=None):
    root = chain_root(namespace.digest(secret), scope or Scope(), hash_key(secret))
    return extend_chain(root, TOKENS, 32, hash_key(secret), extras)


def test_the_table_of_other_values_covers_every_field():
    """A new field must be added to the table, or nothing proves that it separates chains."""
    assert set(OTHER_VALUES) == {f.name for f in dataclasses.fields(Namespace)}


@pytest.mark.parametrize("name", sorted(OTHER_VALUES))
def test_a_change_of_any_field_gives_other_blocks(name):
    other = dataclasses.replace(BASE, **{name: OTHER_VALUES[name]})

    assert not set(chain_of()) & set(chain_of(other))


@pytest.mark.parametrize(
    "scope", [Scope(lora="a"), Scope(salt="a"), Scope(lora="a", salt="a"), Scope(salt="lora")]
)
def test_scopes_never_share_blocks(scope):
    assert not set(chain_of()) & set(chain_of(scope=scope))


def test_a_lora_named_like_a_salt_is_not_that_salt():
    """vLLM 44701: untagged keys let an adapter's name collide with another request's salt."""
    assert chain_of(scope=Scope(lora="x")) != chain_of(scope=Scope(salt="x"))


def test_another_secret_gives_other_blocks():
    """Nobody without the secret can guess a hash."""
    assert not set(chain_of()) & set(chain_of(secret=SECRET + b"!"))


def test_an_image_changes_its_block_and_all_after_it_but_none_before():
    plain, with_image = chain_of(), chain_of(extras={1: b"image digest"})

    assert plain[0] == with_image[0]
    assert plain[1] != with_image[1]


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Namespace)])
def test_an_empty_field_is_refused_by_name(name):
    empty = "" if isinstance(getattr(BASE, name), str) else 0

    with pytest.raises(ConfigError, match=name):
        dataclasses.replace(BASE, **{name: empty})


def test_digests_have_the_promised_length_and_do_not_contain_the_secret():
    digest = BASE.digest(SECRET)

    assert len(digest) == DIGEST_BYTES
    assert hash_key(SECRET) != SECRET.ljust(32, b"\0")
