"""Which TensorRT-LLM engines' blocks can be kept, and what besides its files makes their KV.

Names and meanings of the arguments as in ``llmapi/llm_args.py`` (1.1 to 1.3); one that a version
does not have is at its default there. Must not import TensorRT-LLM.
"""

import hashlib
import json
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefixfleet.store.errors import ConfigError

if TYPE_CHECKING:
    from tensorrt_llm.llmapi.llm_args import TorchLlmArgs

QUANTISED_BY = ("hf_quant_config.json", "quant_cfg.json")
"""Files beside the weights that say how they are read; `weights_digest` leaves them out."""
SAID = ("dtype", "max_seq_len", "model_kwargs", "quant_config", "force_dynamic_quantization",
        "checkpoint_format")  # fmt: skip
"""Arguments that change the KV of the same files; the longest sequence, by some kinds of RoPE."""


def check_supported(llm_args: "TorchLlmArgs") -> None:
    """A block's id must be its row in the pool, and its tokens must name all that it holds.

    Raises:
        ConfigError: that is not so; says which argument to set, and to what.
    """
    sizes = {name: getattr(llm_args, f"{name}_parallel_size", 1) or 1
             for name in ("tensor", "pipeline", "context")}  # fmt: skip
    if any(size != 1 for size in sizes.values()):
        raise ConfigError(f"prefixfleet keeps blocks of one rank, got {sizes}")
    caches = llm_args.kv_cache_config
    in_the_way = {  # what to set, and whether it must be
        # blocks that go to host memory swap rows: from then on ids and rows differ
        "kv_cache_config.host_cache_size to 0": getattr(caches, "host_cache_size", None),
        "kv_cache_config.use_kv_cache_manager_v2 to false": (
            getattr(caches, "use_kv_cache_manager_v2", None) is True
        ),
        "kv_cache_config.max_attention_window to null": getattr(
            caches, "max_attention_window", None
        ),
        "max_beam_width to 1": (getattr(llm_args, "max_beam_width", None) or 1) != 1,
        "speculative_config to null": getattr(llm_args, "speculative_config", None) is not None,
        "sparse_attention_config to null": (
            getattr(llm_args, "sparse_attention_config", None) is not None
        ),
        "load_format to auto": _load_format(llm_args) != "auto",
        "checkpoint_loader to null": getattr(llm_args, "checkpoint_loader", None) is not None,
    }
    if found := [remedy for remedy, stands in in_the_way.items() if stands]:
        raise ConfigError(
            "prefixfleet cannot tell which row of the pool holds which block of this engine, or "
            f"what its KV is made of: set {', '.join(found)}"
        )
    _refuse_images(Path(llm_args.model))


def model_digest(llm_args: "TorchLlmArgs") -> str:
    """Of what the engine makes of the model's files, which have a digest of their own.

    Raises:
        ConfigError: a file or an argument cannot be read.
    """
    said = {name: _plain(name, getattr(llm_args, name, None)) for name in SAID}
    files = {name: _content(Path(llm_args.model) / name) for name in QUANTISED_BY}
    text = json.dumps([said, files], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _load_format(llm_args: "TorchLlmArgs") -> str:
    told = getattr(llm_args, "load_format", None) or "auto"
    return str(getattr(told, "name", told)).lower()  # an enumeration's member, or text


def _plain(name: str, value: Any) -> Any:  # noqa: ANN401 - the engine's
    """The value as JSON has it, the same in each process."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if value is None or isinstance(value, str | bool | int | float | list | dict):
        return value
    raise ConfigError(f"{name}: got {type(value).__name__}, whose content is not known here")


def _content(path: Path) -> str:
    try:
        return path.read_bytes().hex()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise ConfigError(f"model: {error}") from error


def _refuse_images(model: Path) -> None:
    """Not every request of such a model says that there is an image in it."""
    try:
        config = json.loads((model / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: {error}; prefixfleet needs the folder of the model") from error
    if not isinstance(config, dict) or {"vision_config", "audio_config"} & set(config):
        raise ConfigError(f"model: {model} takes images or sound, whose blocks are not named here")
