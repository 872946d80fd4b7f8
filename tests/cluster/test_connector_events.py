"""The gpu tier with vLLM's own scheduler: what it caches is what the fleet is told."""

import pytest
from engine_rig import BLOCK, answer, prompt_of
from eventually import until
from node_rig import SECRET, pool_of

from prefixfleet.store.chain import extend_chain
from prefixfleet.store.namespace import Scope, chain_root, hash_key


def told(daemons, prompt, expected, salt=""):
    """Wait until the index of engines' caches says that of ``prompt``."""

    def chain(node):
        key = hash_key(SECRET)
        root = chain_root(pool_of(node).host.kind.digest, Scope(salt=salt), key)
        return extend_chain(root, prompt, BLOCK, key)

    async def wait(asked):
        await until(lambda: matches(asked))

    async def matches(asked):
        return await daemons.engine_index.match(asked) == expected

    daemons.call(wait(daemons.ask("a", chain)))


def test_what_the_engine_computed_is_told_and_what_it_evicted_is_not(start, daemons, node_socket):
    prompt = prompt_of(9 * BLOCK + 3)
    rig = start(events=node_socket.parent, blocks=24)
    answer(rig, "a", prompt)
    told(daemons, prompt, {"rig": 9})

    for number in range(1, 4):
        answer(rig, f"other {number}", prompt_of(20 * BLOCK, seed=number))

    told(daemons, prompt, {})


def test_what_it_loaded_from_its_node_is_told_too(start, daemons, node_socket):
    prompt = prompt_of(6 * BLOCK + 1)
    answer(start(), "a", prompt)
    told(daemons, prompt, {})

    rig = start(events=node_socket.parent)
    answer(rig, "b", prompt)

    assert rig.reports["b"]["local_blocks"] == 6
    told(daemons, prompt, {"rig": 6})


@pytest.mark.parametrize("salt", ["", "tenant"])
def test_a_salt_parts_the_chains(start, daemons, node_socket, salt):
    prompt = prompt_of(4 * BLOCK)
    answer(start(events=node_socket.parent), "a", prompt, cache_salt=salt or None)

    told(daemons, prompt, {"rig": 4}, salt)
    told(daemons, prompt, {}, "nobody")
