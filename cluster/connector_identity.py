"""What a vLLM engine's KV blocks are, read from what it loaded: the `Namespace` of one engine.

Anything that cannot be identified, or whose blocks are not whole prefixes, stops the engine's
start here with the reason. Must not know the daemon.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from prefixfleet.cluster.weights import weights_digest
from prefixfleet.kernels.paged import Content, PagedLayout
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.namespace import Namespace

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

ENGINE = "vllm"
COMMIT = re.compile(r"[0-9a-f]{40}")
WHOLE_PREFIX_SPECS = (FullAttentionSpec, MLAAttentionSpec)
"""Blocks of these hold all there is to know of their tokens; subclasses may not."""
DRAFTS_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix")
ROPE_BY_POSITION = ("default", "linear", "yarn", "llama3")
"""Others choose their factors by the longest context that the engine was started for."""

LORA_WAYS = (
    "target_modules",
    "enable_tower_connector_lora",
    "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
)

CONTENT_OF_KERNEL = {
    "vec": Content.KEYS_TRANSPOSED,  # the CPU's; its kernels for AMX and NEON pack otherwise
    "vec16": Content.KEYS_TRANSPOSED,
    "FLASH_ATTN": Content.PLAIN,
    "FLASHINFER": Content.PLAIN,
    "TRITON_ATTN": Content.PLAIN,
    "FLASHMLA": Content.LATENT,
    "TRITON_MLA": Content.LATENT,
}


def check_supported(config: "VllmConfig", kv_config: "KVCacheConfig") -> None:
    """Raises `ConfigError` if the engine's blocks cannot be shared as whole prefixes."""
    parallel = config.parallel_config
    groups = [_specs(group.kv_cache_spec) for group in kv_config.kv_cache_groups]
    drafts = config.speculative_config
    reasons = {
        f"{len(groups)} KV cache groups (hybrid attention)": len(groups) != 1,
        f"attention {sorted({s.__name__ for group in groups for s in group})}": any(
            spec not in WHOLE_PREFIX_SPECS for group in groups for spec in group
        ),
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1,
        "a draft model with KV of its own": drafts is not None
        and drafts.method not in DRAFTS_WITHOUT_KV,
        "--load-format dummy": config.load_config.load_format == "dummy",
        "--enable-sleep-mode": config.model_config.enable_sleep_mode,
        "weights that are updated in place": config.weight_transfer_config is not None,
        "kv_load_failure_policy other than 'recompute'": (
            config.kv_transfer_config.kv_load_failure_policy != "recompute"
        ),
    }
    if found := [reason for reason, applies in reasons.items() if applies]:
        raise ConfigError(
            f"prefixfleet cannot share this engine's KV: {'; '.join(found)}. Expected one group of "
            "full attention, tensor parallelism at most, weights loaded from files for good, and "
            '"kv_load_failure_policy": "recompute"'
        )


def read_namespace(
    config: "VllmConfig",
    kv_config: "KVCacheConfig",
    caches: Mapping[str, torch.Tensor],
    layout: PagedLayout,
    cache_dir: Path,
) -> Namespace:
    """The namespace of the engine that owns ``caches``. Raises `ConfigError`."""
    if layout.num_blocks != kv_config.num_blocks:
        raise ConfigError(
            f"prefixfleet: the attention kernel splits each of {kv_config.num_blocks} blocks into "
            f"{layout.num_blocks // max(1, kv_config.num_blocks)}; set --block-size to the "
            "kernel's own block size"
        )
    model = config.model_config
    return Namespace(
        model=_describe_model(config),
        weights=_identify_weights(
            model.model_weights or model.model, str(model.revision), cache_dir
        ),
        dtype=_describe_dtype(config, caches),
        block_tokens=kv_config.kv_cache_groups[0].kv_cache_spec.block_size,
        layout=layout.describe(),
        engine=ENGINE,
        isa=_attention_kernel(config, caches),
        tensor_parallel=config.parallel_config.tensor_parallel_size,
    )


def block_content(
    config: "VllmConfig", caches: Mapping[str, torch.Tensor], encoding: str
) -> Content:
    """What an encoding must know of the elements: nothing for exact bytes, else K from V.

    Raises:
        ConfigError: the engine's attention kernel packs them in a way that is not known here.
    """
    if encoding == "exact":
        return Content.OPAQUE
    kernel = _attention_kernel(config, caches)
    if kernel not in CONTENT_OF_KERNEL:
        raise ConfigError(
            f"encoding {encoding!r}: got attention kernel {kernel!r}, expected one of "
            f"{', '.join(CONTENT_OF_KERNEL)}, whose order of K and V is known; set the encoding "
            "to 'exact' (PREFIXFLEET_WORKER_ENCODING)"
        )
    return CONTENT_OF_KERNEL[kernel]


def own_events(config: "VllmConfig") -> dict[str, str]:
    """Where the engine tells of its own cache, as this host reaches it; nothing if it does not."""
    events = config.kv_events_config
    if events is None or not events.enable_kv_cache_events or events.publisher != "zmq":
        return {}
    found = {"events": events.endpoint, "replay": events.replay_endpoint or ""}
    return {name: where.replace("://*:", "://127.0.0.1:") for name, where in found.items()}


def _specs(spec: Any) -> list[type]:  # noqa: ANN401 - vLLM's
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return [type(inner) for inner in spec.kv_cache_specs.values()]
    return [type(spec)]


def _describe_model(config: "VllmConfig") -> str:
    model = config.model_config
    effective = {
        "config": _without_volatile(model.hf_config.to_dict()),
        "quantization": model.quantization,
        "longest": model.max_model_len if _rope_depends_on_length(model.hf_text_config) else 0,
    }
    if ways := _lora_ways(config):
        effective["lora"] = ways
    text = json.dumps(effective, sort_keys=True, default=str)
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    shape = (
        f"L{model.get_num_layers(config.parallel_config)}."
        f"KV{model.get_total_num_kv_heads()}.D{model.get_head_size()}.V{model.get_vocab_size()}"
    )
    return f"{model.architecture}/{shape}/{digest}"


def _lora_ways(config: "VllmConfig") -> dict[str, str]:
    """How the engine applies adapters, where that is not as engines do by default: the same files
    make other KV then."""
    lora = config.lora_config
    if lora is None:
        return {}
    set_to = {name: getattr(lora, name, None) for name in LORA_WAYS}
    # an empty list of modules is set too: it applies none
    ways = {name: str(value) for name, value in set_to.items() if value not in (None, False)}
    if lora.lora_dtype not in (None, "auto", config.model_config.dtype):
        ways["lora_dtype"] = str(lora.lora_dtype)
    return ways


def _without_volatile(values: Any) -> Any:  # noqa: ANN401 - JSON
    """The configuration without paths and versions of the software that wrote it."""
    if isinstance(values, dict):
        return {
            key: _without_volatile(value)
            for key, value in values.items()
            if not str(key).startswith("_") and key != "transformers_version"
        }
    return [_without_volatile(value) for value in values] if isinstance(values, list) else values


def _rope_depends_on_length(config: Any) -> bool:  # noqa: ANN401 - transformers'
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return rope.get("rope_type", "default") not in ROPE_BY_POSITION


def _identify_weights(source: str, revision: str, cache_dir: Path) -> str:
    if Path(source).exists():
        return f"files:{weights_digest(Path(source), cache_dir)}"
    if COMMIT.fullmatch(revision):
        return f"hub:{source}@{revision}"
    raise ConfigError(
        f"weights: {source!r} is no file or folder here and has no pinned commit (got revision "
        f"{revision!r}); serve a local folder, or set --revision to a commit of 40 hex digits"
    )


def _describe_dtype(config: "VllmConfig", caches: Mapping[str, torch.Tensor]) -> str:
    stored = str(next(iter(caches.values())).dtype).removeprefix("torch.")
    if config.cache_config.cache_dtype != "auto":
        stored = config.cache_config.cache_dtype
    computed = str(config.model_config.dtype).removeprefix("torch.")
    return stored if stored == computed else f"{stored}({computed})"


def _attention_kernel(config: "VllmConfig", caches: Mapping[str, torch.Tensor]) -> str:
    """What packed K into ``caches``: the CPU kernel's instruction set, else the backend's name."""
    layers = config.compilation_config.static_forward_context
    found = {_kernel_of(layers[name]) for name in caches if name in layers}
    if not found or None in found:
        raise ConfigError(
            f"prefixfleet: cannot tell which attention kernel packs the KV of {list(caches)[:3]}..."
        )
    return "+".join(sorted(filter(None, found)))


def _kernel_of(layer: Any) -> str | None:  # noqa: ANN401 - vLLM's
    if current_platform.is_cpu():
        isa: str | None = getattr(layer, "isa", None)
        return isa
    backend = getattr(layer, "attn_backend", None)
    return None if backend is None else str(backend.get_name())
