"""The TensorRT-LLM connector, driven in the published order of calls, on a real node daemon.

The interface is described in tests/support/published_trtllm; the package cannot be installed here.
"""

import importlib
import inspect
import json
import pickle
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from daemons import Daemons
from node_rig import pool_of
from trtllm_engine import ROW, TOKENS, TrtllmEngine, kv_of

from prefixfleet.cluster import trtllm_blocks
from prefixfleet.cluster.trtllm_blocks import Copies, Step
from prefixfleet.store.errors import ConfigError

PUBLISHED = Path(__file__).parents[1] / "support" / "published_trtllm"
INTERFACE = "tensorrt_llm._torch.pyexecutor.kv_cache_connector"
PROMPT = list(range(1, 5 * TOKENS + 4))
"""Five blocks and three tokens."""


@pytest.fixture
def interface(monkeypatch):
    monkeypatch.syspath_prepend(str(PUBLISHED))
    yield importlib.import_module(INTERFACE)
    for name in [n for n in sys.modules if n.split(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


@pytest.fixture
def connector(interface, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    module = importlib.import_module("prefixfleet.cluster.trtllm_connector")
    yield module
    del sys.modules["prefixfleet.cluster.trtllm_connector"]


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 8}')
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def daemons(tmp_path_factory, monkeypatch):
    with Daemons(tmp_path_factory.mktemp("n")) as daemons:
        monkeypatch.setenv("PREFIXFLEET_TRTLLM_SOCKET_PATH", str(daemons.start()))
        yield daemons


@pytest.fixture
def start(interface, connector, model, daemons):
    engines = []

    def start(**arguments):
        engine = TrtllmEngine(interface, connector, str(model), **arguments)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.worker.close()


def ask(engine, tokens, *, chunk=10_000, decode=0, **fields):
    """One request, whose blocks are checked against what any engine would have computed."""
    before = engine.computed
    request, matched = engine.begin(tokens, **fields)
    engine.prefill(request, 0, matched, chunk)
    for i in range(decode):
        engine.decode(request, 1_000 + i)
    scope = (request.cache_salt_id, request.lora_task_id)
    for i, block in enumerate(engine.blocks_of(request)):
        assert torch.equal(block, kv_of(request.tokens[: (i + 1) * TOKENS], scope)), i
    engine.end(request)
    return matched, engine.computed - before


def test_every_abstract_method_is_there_with_the_published_arguments(interface, connector):
    for theirs, ours in (
        (interface.KvCacheConnectorScheduler, connector.PrefixfleetScheduler),
        (interface.KvCacheConnectorWorker, connector.PrefixfleetWorker),
    ):
        assert not ours.__abstractmethods__
        for name in theirs.__abstractmethods__:
            published = inspect.signature(getattr(theirs, name)).parameters
            assert list(inspect.signature(getattr(ours, name)).parameters) == list(published), name


def test_what_one_engine_computed_another_one_loads(start):
    first, second = start(), start()

    assert ask(first, PROMPT) == (0, 5)
    assert ask(second, PROMPT) == (5 * TOKENS, 0)
    assert ask(second, [*PROMPT[: 2 * TOKENS], *range(500, 540)]) == (2 * TOKENS, 2)
    assert first.synchronized == 1, "bytes were read before the pass had ended"


def test_the_last_token_is_computed_by_the_engine(start):
    engine = start()
    ask(engine, PROMPT[: 4 * TOKENS])

    assert ask(engine, PROMPT[: 4 * TOKENS]) == (3 * TOKENS, 1)


@pytest.mark.parametrize("chunk", [TOKENS, 24, 40])
def test_a_prompt_in_chunks_is_kept_and_goes_on_after_what_was_loaded(start, chunk):
    first, second = start(), start()
    ask(first, PROMPT[: 2 * TOKENS + 5], chunk=chunk)

    matched, computed = ask(second, PROMPT, chunk=chunk)

    assert (matched, computed) == (2 * TOKENS, 3)
    assert ask(first, PROMPT, chunk=chunk)[0] == 5 * TOKENS


def test_blocks_filled_by_decoding_are_kept(start):
    first, second = start(), start()
    ask(first, PROMPT, decode=2 * TOKENS)

    answered = [*PROMPT, *(1_000 + i for i in range(2 * TOKENS))]

    assert ask(second, answered)[0] == len(answered) // TOKENS * TOKENS


def test_what_the_engine_has_itself_is_not_loaded_and_is_offered(start):
    """The pool may have dropped what the engine still holds: a chain is kept from its beginning."""
    engine, other = start(), start()
    request, matched = engine.begin(PROMPT)
    assert matched == 0
    own = request.block_ids[:2]
    for i, block in enumerate(own):
        engine.pool[block] = kv_of(PROMPT[: (i + 1) * TOKENS], (None, None))
    again, matched = engine.begin(PROMPT, on_device=own)
    assert matched == 0
    engine.prefill(again, 2, matched)

    assert ask(other, PROMPT) == (5 * TOKENS, 0)


def test_a_partly_reused_block_is_left_to_the_engine(start):
    engine = start()
    ask(engine, PROMPT)
    request, _ = engine.begin(PROMPT)

    assert engine.scheduler.get_num_new_matched_tokens(request, TOKENS + 3) == (0, False)


def test_salts_are_kept_apart_and_adapters_and_images_are_not_kept(start):
    engine = start()

    assert ask(engine, PROMPT, cache_salt_id=7) == (0, 5)
    assert ask(engine, PROMPT) == (0, 5)
    assert ask(engine, PROMPT, cache_salt_id=7) == (5 * TOKENS, 0)
    for fields in ({"lora_task_id": 3}, {"multimodal_hashes": [[1]]}):
        assert ask(engine, PROMPT, **fields) == (0, 5)
        assert ask(engine, PROMPT, **fields) == (0, 5)


def test_a_damaged_block_is_not_promised(start, daemons):
    engine = start()
    ask(engine, PROMPT)

    def spoil(node):
        host = pool_of(node).host
        for slot in range(host.pool.num_slots):
            host.segment.view[slot * host.kind.layout.slot_bytes + 100] ^= 1

    daemons.ask("a", spoil)

    assert ask(engine, PROMPT) == (0, 5)


def test_a_promise_outlives_the_daemon_that_it_came_from(start, daemons):
    """The interface knows no failed load: what was promised is in this process."""
    engine = start()
    ask(engine, PROMPT)
    request, matched = engine.begin(PROMPT)
    daemons.stop()

    engine.prefill(request, 0, matched)

    assert matched == 5 * TOKENS
    for i, block in enumerate(engine.blocks_of(request)):
        assert torch.equal(block, kv_of(PROMPT[: (i + 1) * TOKENS], (None, None)))
    assert ask(engine, PROMPT) == (0, 5)


def test_a_request_that_ends_before_it_runs_gives_its_promise_back(start, connector):
    engine = start()
    ask(engine, PROMPT)
    promises = connector.rank_of(engine.llm_args).promises

    request, _ = engine.begin(PROMPT)
    assert promises.staged_bytes == 5 * LAYERS_BYTES
    engine.end(request)

    assert promises.staged_bytes == 0


LAYERS_BYTES = 2 * 2 * ROW * 2


def test_promises_are_bounded(start, connector, monkeypatch):
    monkeypatch.setattr(trtllm_blocks, "STAGED_BYTES", 7 * LAYERS_BYTES)
    engine = start()
    ask(engine, PROMPT)

    begun = [engine.begin(PROMPT) for _ in range(3)]
    assert [matched // TOKENS for _, matched in begun] == [5, 2, 0]

    for request, matched in begun:
        engine.prefill(request, 0, matched)
        for i, block in enumerate(engine.blocks_of(request)):
            assert torch.equal(block, kv_of(PROMPT[: (i + 1) * TOKENS], (None, None)))


def test_of_too_many_requests_those_with_a_promise_are_never_forgotten(start, monkeypatch):
    monkeypatch.setattr(trtllm_blocks, "MAX_REQUESTS", 2)
    engine = start()
    ask(engine, PROMPT)

    first, matched = engine.begin(PROMPT)
    others = [engine.begin(list(range(900, 940)))[0] for _ in range(3)]
    second, also = engine.begin(PROMPT)

    assert (matched, also) == (5 * TOKENS, 5 * TOKENS)
    assert engine.begin(PROMPT)[1] == 0  # both places are taken by promises
    for request in (first, second):
        engine.prefill(request, 0, matched)
        for i, block in enumerate(engine.blocks_of(request)):
            assert torch.equal(block, kv_of(PROMPT[: (i + 1) * TOKENS], (None, None)))
    for request in others:
        engine.prefill(request, 0, 0)


def test_an_engine_that_allots_less_than_it_was_promised_must_not_go_on(start):
    engine = start()
    ask(engine, PROMPT)
    request, matched = engine.begin(PROMPT)
    request.block_ids = request.block_ids[:3]

    with pytest.raises(RuntimeError, match="5 blocks were promised"):
        engine.prefill(request, 0, matched)


def test_a_step_travels_to_the_worker(start):
    engine = start()
    ask(engine, PROMPT)
    step = engine.worker.get_connector_meta()

    assert pickle.loads(pickle.dumps(step)) == step


class LoadFormat(Enum):
    """As published: numbers, not text."""

    AUTO = 0
    DUMMY = 1


def changed(arguments, change):
    """Other arguments; a dotted name is one of ``kv_cache_config``."""
    own = {name: value for name, value in change.items() if "." not in name}
    inner = {name.split(".")[1]: value for name, value in change.items() if "." in name}
    caches = SimpleNamespace(**vars(arguments.kv_cache_config) | inner)
    return SimpleNamespace(**vars(arguments) | {"kv_cache_config": caches} | own)


@pytest.mark.parametrize("half", ["PrefixfleetScheduler", "PrefixfleetWorker"])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tensor_parallel_size": 2}, "one rank"),
        ({"model": "org/a-name-and-no-folder"}, "folder of the model"),
        ({"kv_cache_config.host_cache_size": 1}, "set kv_cache_config.host_cache_size to 0$"),
        ({"kv_cache_config.max_attention_window": [512]}, "set .*max_attention_window to null$"),
        ({"kv_cache_config.use_kv_cache_manager_v2": True}, "set .*manager_v2 to false$"),
        ({"max_beam_width": 2}, "set max_beam_width to 1$"),
        ({"speculative_config": object()}, "set speculative_config to null$"),
        ({"sparse_attention_config": object()}, "set sparse_attention_config to null$"),
        ({"load_format": "dummy"}, "set load_format to auto$"),
        ({"load_format": LoadFormat.DUMMY}, "set load_format to auto$"),
        ({"checkpoint_loader": object()}, "set checkpoint_loader to null$"),
        ({"quant_config": object()}, "quant_config: got object"),
    ],
)
def test_what_cannot_be_kept_stops_the_start(start, connector, change, named, half):
    arguments = start().llm_args

    with pytest.raises(ConfigError, match=named):
        getattr(connector, half)(changed(arguments, change))


def test_defaults_that_are_said_are_those_that_are_not(start, connector):
    arguments = start().llm_args
    said = {
        "kv_cache_config.host_cache_size": 0,
        "kv_cache_config.max_attention_window": None,
        "kv_cache_config.use_kv_cache_manager_v2": False,
        "max_beam_width": 1,
        "speculative_config": None,
        "sparse_attention_config": None,
        "load_format": LoadFormat.AUTO,
        "checkpoint_loader": None,
    }

    others = connector.rank_of(changed(arguments, said))

    assert others.identity == connector.rank_of(arguments).identity


@dataclass
class Quantised:
    kv_cache_quant_algo: str = "FP8"


@pytest.mark.parametrize(
    "change",
    [
        {"model_kwargs": {"rope_theta": 1e6}},
        {"quant_config": Quantised()},
        {"dtype": "float16"},
        {"max_seq_len": 4_096},
        {"force_dynamic_quantization": True},
        {"checkpoint_format": "mistral"},
    ],
)
def test_what_changes_the_kv_of_the_same_files_is_another_model(start, connector, change):
    arguments = start().llm_args

    others = connector.rank_of(changed(arguments, change))

    assert others.identity != connector.rank_of(arguments).identity
    again = connector.rank_of(changed(arguments, change))
    assert again.identity == others.identity


def test_an_engine_of_the_same_files_started_otherwise_is_refused_by_the_node(start):
    start(dtype="bfloat16")
    with pytest.raises(ConfigError, match="namespace"):
        start(dtype="float16")


def test_a_file_that_says_how_weights_are_quantised_is_part_of_the_model(start, connector, model):
    arguments = start().llm_args
    before = connector.rank_of(arguments).identity

    (model / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')

    assert connector.rank_of(changed(arguments, {})).identity != before


@pytest.mark.parametrize("outside", [-1, 4, 2**31])
def test_ids_that_are_no_rows_are_refused_before_anything_is_copied(outside):
    pool = torch.ones((4, 8), dtype=torch.bfloat16)
    copies = Copies(pool)
    data, saved = bytearray(copies.block_bytes), []
    cache = SimpleNamespace(save=lambda parent, writes: saved.append(writes))

    with pytest.raises(RuntimeError, match="4 rows"):
        copies.load(Step(loads=((0, data), (outside, data))))
    with pytest.raises(RuntimeError, match="4 rows"):
        copies.save(Step(saves=((b"", ((b"a", 0),)), (b"", ((b"b", outside),)))), cache)

    assert torch.equal(pool, torch.ones_like(pool))
    assert not saved
    copies.load(Step(loads=((3, data),)))
    assert not pool[3].any()


def test_a_model_with_images_stops_the_start(start, connector, model):
    (model / "config.json").write_text(json.dumps({"vision_config": {}}))

    with pytest.raises(ConfigError, match="images"):
        start()


def test_without_its_setting_or_with_a_wrong_one_the_start_stops(start, monkeypatch):
    monkeypatch.delenv("PREFIXFLEET_TRTLLM_SOCKET_PATH")
    with pytest.raises(ConfigError, match="PREFIXFLEET_TRTLLM_SOCKET_PATH"):
        start()
    monkeypatch.setenv("PREFIXFLEET_TRTLLM_SOCKET", "/x")
    with pytest.raises(ConfigError, match="unknown setting"):
        start()


def test_an_engine_of_other_weights_shares_the_node_and_finds_nothing_of_them(start, model):
    first = start()
    assert ask(first, PROMPT) == (0, 5)
    (model / "model.safetensors").write_bytes(b"other weights")

    assert ask(start(), PROMPT) == (0, 5)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros((4, 8), dtype=torch.uint8),
        torch.zeros((8, 4), dtype=torch.bfloat16).t(),
        torch.zeros(8, dtype=torch.bfloat16),
    ],
)
def test_a_pool_that_is_no_rows_of_kv_is_refused(tensor):
    with pytest.raises(ConfigError, match="pool"):
        Copies(tensor)
