"""What a model's KV takes, and its shape for the prefill formula, from its Hugging Face config.

A token's KV: with heads of keys and values (MHA, GQA, MQA), 2 x layers x KV heads x head size x
bytes of the type; with latent attention (MLA: DeepSeek V2 and later), layers x (rank of the latent
+ size of the rotary part) x bytes, keys and values in one.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefixfleet.router.fleet_models import ModelShape
from prefixfleet.store.errors import ConfigError

DTYPE_BYTES = {
    "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "fp8": 1,
    "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1, "int4": 0.5,
}  # fmt: skip
MOST = 1 << 24
"""Of any count in a config: far more than a decoder has of anything."""
"""Bytes of one number of the cache, by the names that configs and engines use."""


def read_config(path: Path) -> dict[str, Any]:
    """The text model's part of a ``config.json``. Raises `ConfigError`, also for a folder."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--model {file}: {error}; expected a config.json") from error
    if not isinstance(config, dict):
        raise ConfigError(f"--model {file}: got no JSON object, expected a config.json")
    inner = config.get("text_config")
    return config | inner if isinstance(inner, dict) else config


def kv_bytes_per_token(config: Mapping[str, Any], dtype: str | None = None) -> int:
    """Bytes over all layers, rounded up; ``dtype`` replaces the config's. Raises `ConfigError`."""
    size = _dtype_bytes(config, dtype)
    layers = _count(config, "num_hidden_layers")
    if "kv_lora_rank" in config and config["kv_lora_rank"] is not None:
        latent = _count(config, "kv_lora_rank") + _count(config, "qk_rope_head_dim")
        return math.ceil(layers * latent * size)
    return math.ceil(2 * layers * _kv_heads(config) * _head_size(config) * size)


def attention_kind(config: Mapping[str, Any]) -> str:
    """MLA, MHA, MQA or GQA."""
    if config.get("kv_lora_rank") is not None:
        return "MLA"
    heads, kv_heads = _count(config, "num_attention_heads"), _kv_heads(config)
    return "MHA" if heads == kv_heads else "MQA" if kv_heads == 1 else "GQA"


def shape_of(config: Mapping[str, Any], dtype: str | None = None) -> ModelShape:
    """The decoder as the prefill formula sees it; a mixture counts the experts a token visits."""
    hidden, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    experts = _optional(config, "num_experts_per_tok")
    width = _optional(config, "moe_intermediate_size") if experts else None
    width = width or _count(config, "intermediate_size")
    projections = hidden * _head_size(config) * (2 * heads + 2 * _kv_heads(config))
    products = projections + 3 * hidden * width * (experts or 1)
    return ModelShape(
        layers=_count(config, "num_hidden_layers"),
        hidden=hidden,
        attention=4.0 * heads * _head_size(config) / hidden,
        products=2.0 * products / hidden**2,
        kv_bytes_per_token=kv_bytes_per_token(config, dtype),
    )


def _dtype_bytes(config: Mapping[str, Any], dtype: str | None) -> float:
    name = dtype or config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    if not isinstance(name, str) or name not in DTYPE_BYTES:
        raise ConfigError(
            f"type of the KV cache: got {name!r:.80}, expected one of {[*DTYPE_BYTES]}; "
            "--kv-dtype names another one than the config"
        )
    return DTYPE_BYTES[name]


def _kv_heads(config: Mapping[str, Any]) -> int:
    if config.get("num_key_value_heads") is None:
        return _count(config, "num_attention_heads")
    return _count(config, "num_key_value_heads")


def _head_size(config: Mapping[str, Any]) -> int:
    if config.get("head_dim") is not None:
        return _count(config, "head_dim")
    return _count(config, "hidden_size") // _count(config, "num_attention_heads")


def _optional(config: Mapping[str, Any], name: str) -> int | None:
    """A count that a config may lack, or have as null or 0."""
    value = config.get(name)
    return None if value is None or value == 0 else _count(config, name)


def _count(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if type(value) is not int or not 1 <= value <= MOST:
        raise ConfigError(
            f"--model: {name} is {value!r:.80}, expected a whole number from 1 to {MOST:,}; is it "
            "the config of a decoder?"
        )
    return value
