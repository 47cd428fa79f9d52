"""Which of SGLang's cache fixtures are used, and the recurrent state that they hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from sglang.srt.configs.mamba_utils import KimiLinearStateShape
from sglang.test.kits.unified_radix_cache.config import CONFIGS, CacheConfig

from dasc.geometry import DtypePolicy, Kind, StateGeometry
from dasc.layout import RaggedLayout

Arm = Literal["dense", "int8", "compressed-only"]
ARMS: tuple[Arm, ...] = ("dense", "int8", "compressed-only")
KV_TOKENS = 1 << 14

# Small recurrent states with d_k != d_v, whose sizes agree with each other as a real model's do.
_SMALL = {
    "num_layers": 4,
    "full_attention_layer_ids": (3,),
    "mamba_n_groups": 2,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "mamba_state_size": 16,
    "mamba_intermediate_size": 32,
    "max_context_len": 2048,
    "head_num": 1,
    "head_dim": 4,
}


@dataclass(frozen=True)
class Setting:
    """A configuration of SGLang's fixtures with recurrent state, and what it caches states in.

    Attributes:
        cfg: sizes and components.
        kind: of the recurrent state.
        arm: ``"dense"`` is SGLang without an extra pool, ``"int8"`` its INT8 pool, ``"compressed-only"`` ours.
    """

    cfg: CacheConfig
    kind: Kind
    arm: Arm

    def __str__(self) -> str:
        return f"{self.cfg.label}-{self.kind}-{self.arm}"


def all_settings(arms: Sequence[Arm] = ARMS) -> list[Setting]:
    """Every configuration with recurrent state as GDN, and the first as KDA too."""
    with_state = [_small(cfg) for cfg in CONFIGS if cfg.has_mamba]
    kinds = [(cfg, "gdn") for cfg in with_state] + [(with_state[0], "kda")]
    return [Setting(dataclasses.replace(cfg, enable_int8_mamba_checkpoint=arm == "int8"), kind, arm)
            for cfg, kind in kinds for arm in arms]  # fmt: skip


def _small(cfg: CacheConfig) -> CacheConfig:
    return dataclasses.replace(cfg, kv_size=KV_TOKENS, **_SMALL)


def geometry(setting: Setting) -> StateGeometry:
    """What dasc calls the fixture's recurrent state."""
    cfg = setting.cfg
    return StateGeometry(
        family="qwen3_next" if setting.kind == "gdn" else "kimi_linear",
        kind=setting.kind,
        num_blocks=cfg.num_layers,
        recurrent_layers=tuple(cfg.non_full_layer_ids),
        num_value_heads=cfg.mamba_num_heads,
        num_key_heads=cfg.mamba_n_groups if setting.kind == "gdn" else cfg.mamba_num_heads,
        head_v_dim=cfg.mamba_head_dim,
        head_k_dim=cfg.mamba_state_size,
        conv_width=cfg.mamba_conv_kernel,
    )


DTYPES = DtypePolicy(torch.bfloat16, torch.float32)
"""Of the fixture's state: it sets the temporal one itself."""


def layout(setting: Setting) -> RaggedLayout:
    """Random units are kept, about half; those of the last layer are all omitted."""
    shape = geometry(setting)
    mask = torch.rand(shape.num_layers, shape.units_per_layer, generator=torch.Generator().manual_seed(5)) < 0.5
    mask[-1] = False
    return RaggedLayout.from_mask(shape, mask, DTYPES)


class KimiShape(KimiLinearStateShape):
    """Kimi's layout of a state with d_k != d_v, for which SGLang's own ``create`` has no argument."""

    @staticmethod
    def create(  # type: ignore[override]
        *, tp_world_size: int, intermediate_size: int, n_groups: int, num_heads: int, head_dim: int, state_size: int,
        conv_kernel: int,
    ) -> KimiLinearStateShape:  # fmt: skip
        made = KimiLinearStateShape.create(
            tp_world_size=tp_world_size,
            num_heads=num_heads,
            head_dim=head_dim,
            head_k_dim=state_size,
            conv_kernel_size=conv_kernel,
        )
        return dataclasses.replace(made, temporal=(num_heads, head_dim, state_size))
