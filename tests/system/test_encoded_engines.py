"""Two real vLLM engines whose nodes keep blocks in 8 bits."""

import math
import uuid

import pytest
from engines import plan_for, running_pair, start_engines, tokens_of_text

from prefixfleet.cluster.model import default_cache_dir, demo_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BLOCK = 32
PROMPT = 12 * BLOCK + 5
EXACT_BLOCK_BYTES = 30 * 2 * 3 * 64 * 4 * BLOCK  # layers, K and V, heads, channels, float32
DIVERGENCE = 0.02
"""Nats, of the 20 likeliest first tokens; a mean of 0.0003 is what tests/bench/quality.py finds."""


@pytest.fixture(scope="module")
def model():
    return demo_model(default_cache_dir(), lambda _: None)


def divergence(exact, other):
    """Of the tokens that both name."""
    assert exact.keys() & other.keys()
    pairs = [(exact[token], other[token]) for token in exact.keys() & other.keys()]
    return sum(math.exp(p) * (p - q) for p, q in pairs)


def test_hits_in_8_bits_answer_as_cold_ones_within_their_bound(
    model, tmp_path_factory, redis_server
):
    """Pulled, loaded at home, another encoding refused: one fleet, since engines start slowly."""
    folder = tmp_path_factory.mktemp("e")  # a short name: it holds sockets
    head = [int(digit, 16) + 300 for digit in uuid.uuid4().hex]
    prompt = (head + tokens_of_text(model))[:PROMPT]
    sizes = {"a": 64 << 20, "b": 64 << 20}
    encodings = dict.fromkeys(sizes, "int8-fp8")
    with running_pair(folder, model, redis_server.url, sizes, encodings) as (nodes, engines):
        cold = engines["b"].ask(prompt, cache_salt=uuid.uuid4().hex, logprobs=20)
        engines["a"].ask(prompt)
        nodes["a"].wait_idle(engines["a"])

        plan = plan_for(nodes["a"], PROMPT)
        pulled = engines["b"].ask(prompt, logprobs=20, kv_transfer_params=plan)
        engines["b"].forget()
        local = engines["b"].ask(prompt, logprobs=20)
        with pytest.raises(AssertionError, match="engine ended"):
            start_engines(folder, model, {"a": nodes["a"]}, {"a": "exact"})

    refusal = "stored as 'exact', an engine here stores them as 'int8-fp8'"
    assert refusal in (folder / "engine-a.log").read_text()
    assert (cold.cached_tokens, pulled.cached_tokens, local.cached_tokens) == (0, 384, 384)
    assert pulled.outcome["pulled_blocks"] == local.outcome["local_blocks"] == 12
    assert pulled.outcome["pulled_bytes"] < 12 * EXACT_BLOCK_BYTES / 3.5
    assert pulled.texts == local.texts  # the same bytes
    assert abs(divergence(cold.likely, pulled.likely)) < DIVERGENCE
    assert max(cold.likely, key=cold.likely.get) == max(pulled.likely, key=pulled.likely.get)
