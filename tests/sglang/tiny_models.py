"""Tiny random models that both SGLang and :class:`dasc.models.hybrid.HybridModel` run, in FP32."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from dasc.models.hybrid import random_hybrid, save_hybrid

VOCAB = 512
KIMI_NORM_EPS = 1e-5
FAMILIES = ("qwen3-next", "kimi-linear")

# What SGLang's classes want to be told besides; their defaults are those of the large models.
_MORE = {
    "qwen3-next": {"full_attention_interval": 4, "partial_rotary_factor": 0.5, "rope_theta": 10_000.0},
    "kimi-linear": {"mla_use_nope": True, "first_k_dense_replace": 1, "moe_layer_freq": 1},
}


def write_model(family: str, folder: Path, blocks: int = 4) -> Path:
    """Every fourth block has attention, the others are recurrent. All have experts, but for Kimi-Linear's first.

    Horizons are spread from 2 to 4096 tokens, so that every plan with a cutoff between keeps some units and omits some.
    Qwen3-Next has two value heads a key head and d_k != d_v, which Kimi-Linear cannot have.
    """
    gdn = family == "qwen3-next"
    config, weights = random_hybrid(
        "gdn" if gdn else "kda",
        seed=11,
        vocab_size=VOCAB,
        hidden_size=64,
        num_blocks=blocks,
        num_value_heads=8 if gdn else 4,
        num_key_heads=4,
        head_v_dim=16 if gdn else 32,
        head_k_dim=32,
        num_experts=4,
        horizons_tokens=(2.0, 4096.0),
    )
    if gdn:  # SGLang's Qwen3-Next knows no block without experts
        config = dataclasses.replace(config, expert_blocks=tuple(range(blocks)))
        first, second = "model.layers.0.mlp.", "model.layers.1.mlp."
        weights = {name: weight for name, weight in weights.items() if not name.startswith(first)}
        weights |= {name.replace(second, first): -w for name, w in weights.items() if name.startswith(second)}
    else:  # SGLang's KDA layers have Kimi-Linear-48B's epsilon whatever the configuration says
        config = dataclasses.replace(config, norm_eps=KIMI_NORM_EPS)
    save_hybrid(folder, config, weights)
    path = folder / "config.json"
    values = json.loads(path.read_text())
    values |= _MORE[family] | {"dtype": "float32", "torch_dtype": "float32", "max_position_embeddings": 4096}
    path.write_text(json.dumps(values, indent=2))
    return folder
