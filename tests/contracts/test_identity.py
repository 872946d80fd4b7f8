"""Key completeness: change one thing that changes KV bytes, and nothing matches anywhere.

The commonest fatal fault of every system of this kind is an incomplete key. Each field in turn is
changed, and the block is looked for where it could be found: the index, the router, the engine's
node.
"""

import dataclasses

import pytest

from prefixfleet.router.prompt import Prompt, prefix_chain
from prefixfleet.router.rendered import Rendered
from prefixfleet.router.view import View
from prefixfleet.store.chain import extend_chain, segment_heads
from prefixfleet.store.eviction import LruOrder
from prefixfleet.store.index import IndexEvent
from prefixfleet.store.memory_index import MemoryIndex
from prefixfleet.store.namespace import Namespace, Scope, chain_root, hash_key
from prefixfleet.store.pool import SlotPool
from prefixfleet.store.records import NodeRecord

SECRET = b"the secret of this test's fleet"
KEY = hash_key(SECRET)
TOKENS = list(range(96))
BASE = Namespace(
    model="LlamaForCausalLM/L30",
    weights="w1",
    dtype="float32",
    block_tokens=32,
    layout="LBHNC",
    engine="vllm",
    isa="avx512",
    tensor_parallel=1,
)


def chain_of(namespace=BASE, scope=None, extras=None, secret=SECRET):
    key = hash_key(secret)
    root = chain_root(namespace.digest(secret), scope or Scope(), key)
    return extend_chain(root, TOKENS, 32, key, extras)


CHANGED = {
    "model": chain_of(dataclasses.replace(BASE, model="LlamaForCausalLM/L32")),
    "weights": chain_of(dataclasses.replace(BASE, weights="w2")),
    "dtype": chain_of(dataclasses.replace(BASE, dtype="bfloat16")),
    "block size": chain_of(dataclasses.replace(BASE, block_tokens=64)),
    "layout": chain_of(dataclasses.replace(BASE, layout="LBNHC")),
    "engine": chain_of(dataclasses.replace(BASE, engine="sglang")),
    "attention isa": chain_of(dataclasses.replace(BASE, isa="amx")),
    "tensor parallel size": chain_of(dataclasses.replace(BASE, tensor_parallel=2)),
    "encoding": chain_of(dataclasses.replace(BASE, encoding="int8")),
    "lora": chain_of(scope=Scope(lora="digest of an adapter")),
    "salt": chain_of(scope=Scope(salt="tenant")),
    "image": chain_of(extras={0: b"digest of an image"}),
    "cluster secret": chain_of(secret=b"another secret, of another fleet"),
}


def segments(chain):
    groups = {}
    for block, head in zip(chain, segment_heads(chain), strict=True):
        groups.setdefault(head, []).append(block)
    return groups


@pytest.fixture
async def index(clock):
    index = MemoryIndex(lease_s=10.0, clock=clock)
    member = await index.join(NodeRecord(node="a", host="h"))
    await index.publish(member, segments(chain_of()))
    return index


@pytest.fixture
def pool(clock):
    pool = SlotPool(8, LruOrder(), clock)
    with pool.reserve(b"", chain_of()) as reservation:
        for block in chain_of():
            reservation.commit(block)
    return pool


@pytest.fixture
async def view(index, clock):
    view = View(clock)
    list(view.load(await index.snapshot()))
    return view


async def test_the_same_identity_is_found_everywhere(index, pool, view):
    """Without this, a test of misses could pass because nothing is ever found."""
    chain = chain_of()

    assert await index.match(chain) == {"a": 3}
    assert view.leading(chain) == {"a": 3}
    assert pool.match(chain) == 3


@pytest.mark.parametrize("changed", sorted(CHANGED))
async def test_another_identity_misses_at_the_index(index, changed):
    assert await index.match(CHANGED[changed]) == {}


@pytest.mark.parametrize("changed", sorted(CHANGED))
def test_another_identity_misses_at_the_engines_node(pool, changed):
    assert pool.match(CHANGED[changed]) == 0


@pytest.mark.parametrize("changed", sorted(CHANGED))
async def test_another_identity_misses_at_the_router(view, changed):
    assert view.leading(CHANGED[changed]) == {}


@pytest.mark.parametrize("changed", sorted(CHANGED))
async def test_another_identity_is_not_found_after_it_was_only_assumed(view, changed):
    """A prompt that was just routed counts as held: for its own identity only."""
    view.apply(IndexEvent("leave", view.members["a"]))
    view.assume("a", chain_of())

    assert view.expected(CHANGED[changed]) == {}


def test_the_routers_own_chain_is_the_engines():
    """What the router hashes for a prompt and a salt is what the engine's side publishes."""
    prompt = Prompt(rendered=Rendered(TOKENS), tokens=len(TOKENS), salt="tenant")

    ours = prefix_chain(prompt, BASE.digest(SECRET), 32, KEY)

    assert ours == CHANGED["salt"]
