"""Two real vLLM engines of two ranks each: every rank keeps, pulls and loads its own shard."""

import uuid

import pytest
from engines import plan_for, running_pair, tokens_of_text
from tiny_model import write_tiny_model

from prefixfleet.cluster.model import default_cache_dir, demo_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BLOCK, BLOCKS = 32, 12
PROMPT = BLOCKS * BLOCK + 5
NOISE = 0.01
"""Nats, between likelihoods of the same tokens: ranks add up in another order in another batch."""


def head():
    return [int(digit, 16) + 300 for digit in uuid.uuid4().hex]


def farthest(one, other):
    assert one.keys() & other.keys()
    return max(abs(one[token] - other[token]) for token in one.keys() & other.keys())


def test_hits_of_two_ranks_answer_as_cold_ones(tmp_path_factory, redis_server):
    folder = tmp_path_factory.mktemp("t")  # a short name: it holds sockets
    model = write_tiny_model(folder / "m", demo_model(default_cache_dir(), lambda _: None))
    text = tokens_of_text(model)
    prompt, another = [(head() + text)[:PROMPT] for _ in range(2)]
    sizes = {"a": 64 << 20, "b": 64 << 20}
    with running_pair(folder, model, redis_server.url, sizes, ranks=2) as (nodes, engines):
        cold = engines["b"].ask(prompt, cache_salt=uuid.uuid4().hex, logprobs=20)
        other = engines["b"].ask(another, logprobs=20)
        engines["a"].ask(prompt)
        nodes["a"].wait_idle(engines["a"])

        plan = plan_for(nodes["a"], PROMPT)
        pulled = engines["b"].ask(prompt, logprobs=20, kv_transfer_params=plan)
        engines["b"].forget()
        local = engines["b"].ask(prompt, logprobs=20)
        (kind,) = nodes["a"].status()["stats"]["kinds"].values()
        shards = kind["namespace"]["tensor_parallel"]

    assert shards == 2
    assert (cold.cached_tokens, pulled.cached_tokens, local.cached_tokens) == (0, 384, 384)
    assert pulled.outcome["pulled_blocks"] == local.outcome["local_blocks"] == BLOCKS
    assert farthest(cold.likely, pulled.likely) < NOISE
    assert farthest(cold.likely, local.likely) < NOISE
    differ = cold.likely.keys() ^ other.likely.keys()
    assert differ or farthest(cold.likely, other.likely) > 10 * NOISE  # the start of a prompt tells
