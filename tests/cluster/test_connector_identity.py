"""Blocks of another identity are a miss at the engine; what cannot be identified is not shared."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
from engine_rig import (
    BLOCK,
    LAYERS,
    answer,
    caches_of,
    engine_config,
    expected_answer,
    kv_config,
    model_folder,
    new_request,
    prompt_of,
)

from prefixfleet.store.errors import ConfigError

PROMPT = prompt_of(5 * BLOCK + 1)


def adapter(folder, weights=b"w", number=1, name="adapter", **fields):
    from vllm.lora.request import LoRARequest

    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return LoRARequest(name, number, str(folder), **fields)


def loaded(start, name="x", **fields):
    """Blocks that a fresh engine takes from the pool; its answer is right in any case."""
    rig = start()
    assert answer(rig, name, PROMPT, **fields) == expected_answer(PROMPT, 4)
    return rig.reports.get(name, {"local_blocks": 0})["local_blocks"]


def test_a_salt_keeps_tenants_apart(start):
    answer(start(), "a", PROMPT, cache_salt="one")

    assert loaded(start, cache_salt="two") == 0
    assert loaded(start) == 0
    assert loaded(start, cache_salt="one") == 5


def test_an_adapter_is_known_by_its_content(start, tmp_path):
    answer(start(), "a", PROMPT, lora_request=adapter(tmp_path / "one"))

    assert loaded(start) == 0
    assert loaded(start, lora_request=adapter(tmp_path / "two", weights=b"other")) == 0
    # the same bytes under another name, number and path are the same adapter
    same = adapter(tmp_path / "copy", number=7, name="renamed")
    assert loaded(start, lora_request=same) == 5


def test_an_adapter_called_like_a_salt_stays_different(start, tmp_path):
    lora = adapter(tmp_path / "one")
    answer(start(), "a", PROMPT, lora_request=lora)

    assert loaded(start, cache_salt="adapter") == 0


def test_an_adapter_whose_weights_cannot_be_told_is_not_cached(start, tmp_path):
    in_place = adapter(tmp_path / "one", load_inplace=True)
    in_3d = adapter(tmp_path / "two", number=2, is_3d_lora_weight=True)
    nowhere = adapter(tmp_path / "gone")
    nowhere.lora_path = "somebody/on-a-hub"

    for lora in (in_place, in_3d, nowhere):
        answer(start(), "a", PROMPT, lora_request=lora)
        assert loaded(start, lora_request=lora) == 0


def test_an_adapters_number_that_is_used_for_other_files_is_not_cached(start, tmp_path):
    rig = start()
    answer(rig, "a", PROMPT, lora_request=adapter(tmp_path / "one", number=3))

    answer(rig, "b", PROMPT, lora_request=adapter(tmp_path / "two", weights=b"2", number=3))

    assert "b" not in rig.reports


def test_an_adapter_whose_files_change_under_an_engine_is_not_cached_any_more(start, tmp_path):
    """It may read them again, when it makes room for others and takes them back."""
    rig, lora = start(), adapter(tmp_path / "one")
    answer(rig, "a", PROMPT, lora_request=lora)

    adapter(tmp_path / "one", weights=b"other")
    answer(rig, "b", PROMPT, lora_request=lora)

    assert "a" in rig.reports
    assert "b" not in rig.reports


def test_an_adapter_whose_files_change_while_a_request_waits_is_not_cached(start, tmp_path):
    """The engine may read them only when it computes."""
    rig, lora = start(), adapter(tmp_path / "one")
    rig.add("a", PROMPT, lora_request=lora)

    adapter(tmp_path / "one", weights=b"other")
    rig.run()

    assert loaded(start, lora_request=adapter(tmp_path / "as before")) == 0
    assert loaded(start, "y", lora_request=adapter(tmp_path / "as now", b"other")) == 0


def test_what_was_found_for_an_adapter_is_not_loaded_for_other_files(start, tmp_path):
    answer(start(), "a", PROMPT, lora_request=adapter(tmp_path / "one"))
    rig = start()
    rig.add("b", PROMPT, lora_request=adapter(tmp_path / "same"))

    adapter(tmp_path / "same", weights=b"other")
    rig.run()

    assert rig.reports["b"]["local_blocks"] == 0


def test_a_prompt_given_as_embeddings_is_not_cached(start):
    import torch

    from prefixfleet.cluster.connector_prefix import read_prefix

    request = new_request("a", None, prompt_embeds=torch.zeros(40, 8))

    assert read_prefix(request, BLOCK, str) is None


def chain_with(*images):
    """Chain of one prompt of placeholders with these (identifier, offset, length)."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    from prefixfleet.cluster.connector_prefix import read_prefix
    from prefixfleet.cluster.engine_client import Welcome

    features = [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=identifier,
            mm_position=PlaceholderRange(offset=offset, length=length),
        )
        for identifier, offset, length in images
    ]
    prefix = read_prefix(new_request("a", [9] * (4 * BLOCK), mm_features=features), BLOCK, str)
    assert prefix is not None
    prefix.extend(Welcome(1, "n", 1, "", 0, b"k" * 32, b"n" * 16))
    return prefix.chain


def test_images_change_the_blocks_they_lie_in_and_those_after_them():
    plain, cat = chain_with(), chain_with(("cat", BLOCK, BLOCK))
    dog, later = chain_with(("dog", BLOCK, BLOCK)), chain_with(("cat", BLOCK + 1, BLOCK))

    assert [a == b for a, b in zip(plain, cat, strict=True)] == [True, False, False, False]
    assert [a == b for a, b in zip(cat, dog, strict=True)] == [True, False, False, False]
    assert [a == b for a, b in zip(cat, later, strict=True)] == [True, False, False, False]
    assert cat == chain_with(("cat", BLOCK, BLOCK))


def test_an_image_across_blocks_changes_each_of_them():
    assert chain_with(("cat", 0, 3 * BLOCK))[0] != chain_with()[0]
    one, two = ("a", 0, BLOCK), ("b", BLOCK, BLOCK)
    assert chain_with(one, two) != chain_with(("b", 0, BLOCK), ("a", BLOCK, BLOCK))


def test_prompts_whose_log_probabilities_are_wanted_are_computed_and_still_kept(start):
    answer(start(), "a", PROMPT, sampling={"skip_reading_prefix_cache": True})

    assert loaded(start, sampling={"skip_reading_prefix_cache": True}) == 0
    assert loaded(start) == 5


def namespace_of(
    folder, *, weights=b"weights", changes=None, caches=None, kernel="rig", ranks=1, lora=None
):
    from prefixfleet.cluster.connector_identity import read_namespace
    from prefixfleet.kernels.paged import PagedLayout

    model = model_folder(folder / "model", weights)
    if changes:
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    config = engine_config(model, folder / "s", ranks=ranks)
    config.lora_config = lora_config(config, **lora) if lora is not None else None
    caches = caches or caches_of(4)
    config.compilation_config.static_forward_context = dict.fromkeys(
        caches, SimpleNamespace(isa=kernel)
    )
    layout = PagedLayout.from_tensors(caches)
    return read_namespace(config, kv_config(4), caches, layout, folder / "cache")


def lora_config(config, **options):
    from vllm.config.lora import LoRAConfig

    made = LoRAConfig(**options)
    made.verify_with_model_config(config.model_config)
    return made


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": []},
        {"lora_dtype": "bfloat16"},
        {"enable_tower_connector_lora": True},
        {"enable_moe_shared_loras": True},
    ],
)
def test_another_way_to_apply_adapters_is_another_identity(tmp_path, options):
    """The same files of an adapter make other KV then, and their digest would not tell."""
    usual = namespace_of(tmp_path / "a", lora={})

    assert namespace_of(tmp_path / "b", lora=options).model != usual.model
    assert namespace_of(tmp_path / "c", lora={"max_loras": 4, "max_lora_rank": 64}) == usual
    assert namespace_of(tmp_path / "d") == usual


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("weights", {"weights": b"other"}),
        ("model", {"changes": {"rope_theta": 123.0}}),
        ("model", {"changes": {"num_hidden_layers": LAYERS + 1}}),
        ("isa", {"kernel": "amx"}),
        ("tensor_parallel", {"ranks": 2}),
    ],
)
def test_each_part_of_the_identity_is_read_from_what_is_loaded(tmp_path, field, options):
    base = namespace_of(tmp_path / "a")
    other = namespace_of(tmp_path / "b", **options)

    differing = [
        f.name
        for f in dataclasses.fields(base)
        if getattr(base, f.name) != getattr(other, f.name) and f.name != "weights"
    ]
    # the configuration file is one of the weights' files, too
    assert differing == ([field] if field != "weights" else [])
    assert (base.weights != other.weights) == (field in ("weights", "model"))


def test_tensors_of_another_type_or_shape_are_another_identity(tmp_path):
    import torch

    base = namespace_of(tmp_path / "a")
    half = namespace_of(tmp_path / "b", caches=caches_of(4, dtype=torch.bfloat16))
    swapped = namespace_of(tmp_path / "c", caches=dict(reversed(caches_of(4).items())))

    assert half.dtype == "bfloat16(float32)"
    assert half.layout != base.layout != swapped.layout


def test_the_same_files_elsewhere_are_the_same_identity(tmp_path):
    assert namespace_of(tmp_path / "a") == namespace_of(tmp_path / "b")


def test_a_kernel_that_splits_blocks_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--block-size"):
        namespace_of(tmp_path, caches=caches_of(8))


def test_weights_that_are_nowhere_are_refused(tmp_path):
    from prefixfleet.cluster.connector_identity import _identify_weights

    with pytest.raises(ConfigError, match="pinned commit"):
        _identify_weights("somebody/model", "main", tmp_path)
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert _identify_weights("somebody/model", commit, tmp_path) == f"hub:somebody/model@{commit}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "fail"}, "kv_load_failure_policy"),
        ({"extra": {"socket": "/x"}}, "'engine'"),
        ({"extra": {"socket": "/x", "engine": "e", "sokcet": "/y"}}, "nothing else"),
        ({"extra": {"socket": "", "engine": "e"}}, "'socket'"),
        ({"extra": {"socket": 7, "engine": "e"}}, "'socket'"),
    ],
)
def test_a_wrong_setting_stops_the_start(tmp_path, options, message):
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from prefixfleet.cluster.connector import PrefixfleetConnector

    config = engine_config(model_folder(tmp_path / "m"), tmp_path / "s", **options)

    with pytest.raises(ConfigError, match=message):
        PrefixfleetConnector(config, KVConnectorRole.WORKER, kv_config())


def test_attention_whose_blocks_are_no_whole_prefixes_stops_the_start(tmp_path):
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    from prefixfleet.cluster.connector_identity import check_supported

    config = engine_config(model_folder(tmp_path / "m"), tmp_path / "s")
    window = SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=64
    )
    sliding = KVCacheConfig(4, [], [KVCacheGroupSpec(["l"], window)])
    hybrid = KVCacheConfig(4, [], [*kv_config().kv_cache_groups, *sliding.kv_cache_groups])

    with pytest.raises(ConfigError, match="SlidingWindowSpec"):
        check_supported(config, sliding)
    with pytest.raises(ConfigError, match="2 KV cache groups"):
        check_supported(config, hybrid)


@pytest.mark.parametrize(
    ("part", "field", "value", "message"),
    [
        ("parallel_config", "pipeline_parallel_size", 2, "pipeline"),
        ("parallel_config", "decode_context_parallel_size", 2, "context"),
        ("load_config", "load_format", "dummy", "dummy"),
        ("model_config", "enable_sleep_mode", True, "sleep"),
    ],
)
def test_an_engine_whose_blocks_cannot_be_identified_does_not_start(
    tmp_path, part, field, value, message
):
    from prefixfleet.cluster.connector_identity import check_supported

    config = engine_config(model_folder(tmp_path / "m"), tmp_path / "s")
    setattr(getattr(config, part), field, value)

    with pytest.raises(ConfigError, match=message):
        check_supported(config, kv_config())


def test_an_engine_that_never_came_up_is_closed_in_order(tmp_path):
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from prefixfleet.cluster.connector import PrefixfleetConnector

    config = engine_config(model_folder(tmp_path / "m"), tmp_path / "s")

    for role in KVConnectorRole:
        PrefixfleetConnector(config, role, kv_config()).shutdown()


def test_an_engine_of_another_model_shares_the_daemon_and_finds_nothing_of_it(start, tmp_path):
    answer(start(), "a", PROMPT)

    other = start(model=model_folder(tmp_path / "other", b"other weights"))

    assert answer(other, "b", PROMPT) == expected_answer(PROMPT, 4)
    assert other.reports["b"]["local_blocks"] == 0
    assert loaded(start) == 5


def test_after_a_reset_nothing_that_was_kept_before_is_used(start):
    rig = start()
    answer(rig, "a", PROMPT)

    assert rig.scheduler.reset_prefix_cache(reset_connector=True)
    told = answer(rig, "b", PROMPT)

    assert told == expected_answer(PROMPT, 4)
    assert rig.reports["b"]["local_blocks"] == rig.reports["b"]["engine_blocks"] == 0


def test_a_reset_is_refused_while_blocks_are_on_their_way(start):
    answer(start(), "a", PROMPT)
    rig = start()
    rig.add("b", PROMPT, 4)
    output = rig.schedule_load()

    refused = not rig.connector.reset_cache()
    rig.work(output)
    rig.update()
    rig.run()

    assert refused
    assert rig.answers["b"] == expected_answer(PROMPT, 4)
