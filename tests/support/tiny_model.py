"""A small model with random weights that engines load in a second; it says nothing sensible."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD, INNER = 4, 256, 4, 2, 64, 512
SPREAD = 0.15
"""Of the weights: wide enough that what lies far back in a prompt decides on what comes next."""


def write_tiny_model(folder: Path, tokenizer_of: Path, layers: int = LAYERS) -> Path:
    """A Llama with two heads of keys and values, so that two ranks can share it."""
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_of / name, folder / name)
    vocabulary = json.loads((tokenizer_of / "config.json").read_text())["vocab_size"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(vocabulary, layers), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weights(vocabulary: int, layers: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(7)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) * SPREAD

    weights = {
        "model.embed_tokens.weight": matrix(vocabulary, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}."
        weights |= {
            f"{at}self_attn.q_proj.weight": matrix(HEADS * HEAD, HIDDEN),
            f"{at}self_attn.k_proj.weight": matrix(KV_HEADS * HEAD, HIDDEN),
            f"{at}self_attn.v_proj.weight": matrix(KV_HEADS * HEAD, HIDDEN),
            f"{at}self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD),
            f"{at}mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            f"{at}mlp.up_proj.weight": matrix(INNER, HIDDEN),
            f"{at}mlp.down_proj.weight": matrix(HIDDEN, INNER),
            f"{at}input_layernorm.weight": torch.ones(HIDDEN),
            f"{at}post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    return weights
