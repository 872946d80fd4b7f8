"""Two real vLLM engines on two real node daemons: what is reused never changes an answer."""

import json
import signal
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from engines import plan_for, running_pair, tokens_of_text, wait_until

from prefixfleet.cluster.model import default_cache_dir, demo_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

BLOCK = 32
SOURCE_POOL_BYTES = 64 << 20  # 43 blocks of this model: it evicts
TARGET_POOL_BYTES = 256 << 20


@pytest.fixture(scope="module")
def pair(tmp_path_factory, redis_server):
    """Nodes and engines "a" and "b", for all tests of this module."""
    model = demo_model(default_cache_dir(), lambda _: None)
    folder = tmp_path_factory.mktemp("e")
    sizes = {"a": SOURCE_POOL_BYTES, "b": TARGET_POOL_BYTES}
    with running_pair(folder, model, redis_server.url, sizes) as running:
        yield running


@pytest.fixture
def nodes(pair):
    return pair[0]


@pytest.fixture
def engines(pair):
    return pair[1]


@pytest.fixture(scope="module")
def tokens():
    """Token ids of real text."""
    return tokens_of_text(demo_model(default_cache_dir(), lambda _: None))


@pytest.fixture
def prompt_of(tokens):
    """Prompts that start with something nobody has seen."""

    def make(length):
        head = [int(digit, 16) + 300 for digit in uuid.uuid4().hex]
        return (head + tokens)[:length]

    return make


def start_again(node, engine, prompt_of):
    """The node's next life, once what its engine computes is saved there."""
    node.start()

    def saves():
        engine.ask(prompt_of(BLOCK + 1))
        node.wait_idle(engine)
        return node.resident_blocks > 0

    wait_until(saves)


def plan(nodes, source, prompt):
    return plan_for(nodes[source], len(prompt))


def cold(engine, prompt, **fields):
    """Computed by a tenant of its own, whom nobody shares with."""
    answer = engine.ask(prompt, cache_salt=uuid.uuid4().hex, **fields)
    assert answer.cached_tokens == 0
    return answer


@pytest.mark.parametrize("length", [12 * BLOCK - 1, 12 * BLOCK, 12 * BLOCK + 1, BLOCK - 1])
def test_cold_local_and_pulled_answers_are_the_same(nodes, engines, prompt_of, length):
    prompt = prompt_of(length)
    first = cold(engines["b"], prompt)
    engines["a"].ask(prompt)
    nodes["a"].wait_idle(engines["a"])

    engines["a"].forget()
    local = engines["a"].ask(prompt)
    pulled = engines["b"].ask(prompt, kv_transfer_params=plan(nodes, "a", prompt))

    shared = (length - 1) // BLOCK
    assert first.texts == local.texts == pulled.texts
    assert local.outcome["local_blocks"] == shared
    assert local.cached_tokens == pulled.cached_tokens == shared * BLOCK
    assert pulled.outcome["pulled_blocks"] == shared
    assert pulled.outcome["failure"] == ""


def test_several_answers_to_one_prompt_are_the_same(nodes, engines, prompt_of):
    prompt = prompt_of(10 * BLOCK + 5)
    wanted = cold(engines["b"], prompt)
    engines["a"].ask(prompt)
    nodes["a"].wait_idle(engines["a"])

    pulled = engines["b"].ask(
        prompt,
        n=2,
        temperature=1.0,  # more than one answer must be sampled: from the best token alone
        top_k=1,
        kv_transfer_params=plan(nodes, "a", prompt),
    )

    assert pulled.texts == wanted.texts * 2
    assert pulled.cached_tokens == 10 * BLOCK


def test_a_conversation_goes_on_at_the_other_node(nodes, engines, prompt_of):
    prompt = prompt_of(6 * BLOCK)
    said = engines["a"].ask(prompt, tokens=3 * BLOCK)
    longer = [*prompt, *json.loads(said.texts[0]), 900, 901]
    nodes["a"].wait_idle(engines["a"])

    first = cold(engines["b"], longer)
    pulled = engines["b"].ask(longer, kv_transfer_params=plan(nodes, "a", longer))

    assert pulled.texts == first.texts
    assert pulled.outcome["pulled_blocks"] >= 8  # blocks of the answer among them


def test_answers_are_right_while_the_source_evicts(nodes, engines, prompt_of):
    """The source's pool holds three of these prompts; others push them out meanwhile."""
    prompts = [prompt_of(12 * BLOCK + i) for i in range(4)]
    wanted = [cold(engines["b"], prompt) for prompt in prompts]

    with ThreadPoolExecutor(4) as clients:
        churn = [clients.submit(engines["a"].ask, prompt) for prompt in prompts]
        pulled = [
            engines["b"].ask(prompt, kv_transfer_params=plan(nodes, "a", prompt))
            for prompt in prompts * 2
        ]
        for work in churn:
            work.result()

    assert [answer.texts for answer in pulled] == [answer.texts for answer in wanted] * 2


def test_a_source_that_is_killed_during_a_pull_costs_time_only(nodes, engines, prompt_of):
    prompt = prompt_of(12 * BLOCK + 3)
    wanted = cold(engines["b"], prompt)
    engines["a"].ask(prompt)
    nodes["a"].wait_idle(engines["a"])
    wish = plan(nodes, "a", prompt)
    nodes["a"].signal(signal.SIGSTOP)  # it takes the question and does not answer

    with ThreadPoolExecutor(1) as client:
        asked = client.submit(engines["b"].ask, prompt, kv_transfer_params=wish)
        wait_until(lambda: engines["b"].waiting() > 0 or asked.done())
        nodes["a"].signal(signal.SIGKILL)
        answer = asked.result()

    assert answer.texts == wanted.texts
    assert answer.outcome["pulled_blocks"] == 0
    assert answer.outcome["failure"] != ""
    start_again(nodes["a"], engines["a"], prompt_of)


def test_an_engine_whose_daemon_is_killed_goes_on_and_caches_again_later(nodes, engines, prompt_of):
    prompt, other = prompt_of(8 * BLOCK + 1), prompt_of(8 * BLOCK + 1)
    before = engines["a"].ask(prompt)
    nodes["a"].signal(signal.SIGKILL)

    engines["a"].forget()
    alone = engines["a"].ask(prompt)
    start_again(nodes["a"], engines["a"], prompt_of)
    engines["a"].ask(other)
    nodes["a"].wait_idle(engines["a"])
    engines["a"].forget()
    again = engines["a"].ask(other)

    assert alone.texts == before.texts
    assert alone.outcome["failure"] == "daemon_lost"
    assert again.outcome["local_blocks"] == 8


@pytest.mark.parametrize("seconds", [0.05, 0.5, 2.0])
def test_a_client_that_leaves_leaves_nothing_pinned(nodes, engines, prompt_of, seconds):
    with pytest.raises(TimeoutError):
        engines["b"].ask(prompt_of(40 * BLOCK), tokens=500, patience_s=seconds)

    wait_until(lambda: engines["b"].running() == 0)
    nodes["b"].wait_idle(engines["b"])
    assert engines["b"].ask(prompt_of(BLOCK)).texts
