"""A small LoRA adapter with random weights for any Llama, written by hand as PEFT writes it."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 4
SPREAD = 0.2
"""Of the weights: wide enough that answers are not those of the base model."""
OUTPUTS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}


def write_adapter(folder: Path, model: Path, seed: int) -> Path:
    """An adapter of ``model``'s queries and keys; another ``seed`` gives another one."""
    folder.mkdir(parents=True)
    config = json.loads((model / "config.json").read_text())
    hidden = config["hidden_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    random = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) * SPREAD

    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, heads in OUTPUTS.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = matrix(RANK, hidden)
            weights[f"{at}.lora_B.weight"] = matrix(config[heads] * head, RANK)
    save_file(weights, folder / "adapter_model.safetensors")
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": sorted(OUTPUTS),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder
