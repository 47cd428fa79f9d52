"""Small model folders written by the safetensors library, for tests of the reader."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dasc.geometry import StateGeometry

L, H, K = 3, 4, 8
KDA = StateGeometry(
    family="kimi_linear",
    kind="kda",
    num_blocks=5,
    recurrent_layers=(0, 1, 3),
    num_value_heads=H,
    num_key_heads=H,
    head_v_dim=K,
    head_k_dim=K,
)


def values() -> tuple[Tensor, Tensor]:
    """``A_log`` ``[L, H]`` and ``dt_bias`` ``[L, H, K]``, every value different."""
    return torch.arange(L * H).view(L, H) / 64.0, -torch.arange(L * H * K).view(L, H, K) / 64.0


def tensors(prefix: str = "model.") -> dict[str, Tensor]:
    """A Kimi-Linear checkpoint's decay tensors, as published, beside some other weights."""
    a_log, dt_bias = values()
    named = {f"{prefix}embed_tokens.weight": torch.zeros(8, 8, dtype=torch.bfloat16)}
    for layer, block in enumerate(KDA.recurrent_layers):
        named[f"{prefix}layers.{block}.self_attn.A_log"] = a_log[layer].view(1, 1, H, 1).clone()
        named[f"{prefix}layers.{block}.self_attn.dt_bias"] = dt_bias[layer].flatten().clone()
        named[f"{prefix}layers.{block}.self_attn.q_proj.weight"] = torch.zeros(8, 8)
    return named


def config() -> dict[str, object]:
    linear = {
        "kda_layers": [1, 2, 4],
        "full_attn_layers": [3, 5],
        "num_heads": H,
        "head_dim": K,
        "short_conv_kernel_size": 4,
    }
    return {"model_type": "kimi_linear", "num_hidden_layers": 5, "linear_attn_config": linear}


def write(
    folder: Path, named: dict[str, Tensor] | None = None, shards: int = 1, index: bool | None = None, **more: object
) -> Path:
    """A folder with these tensors dealt to ``shards`` files in turn, and an index when there are several."""
    named = tensors() if named is None else named
    (folder / "config.json").write_text(json.dumps({**config(), **more}))
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    names = ["model.safetensors"] if shards == 1 else names
    weight_map = {name: names[i % shards] for i, name in enumerate(named)}
    for file in names:
        save_file({name: named[name] for name in named if weight_map[name] == file}, folder / file)
    if index or (index is None and shards > 1):
        write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
