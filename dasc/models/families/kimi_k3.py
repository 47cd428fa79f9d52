"""Kimi-K3: KDA with the safe gate, inside ``text_config``. The layer lists of ``linear_attn_config`` are 1-based."""

from __future__ import annotations

from dasc.geometry import StateGeometry
from dasc.models.config import Config
from dasc.models.families.config_forms import kda_geometry, kda_keys, negative_bound
from dasc.models.families.family import Family
from dasc.models.gate_parameters import GateParameters


def _geometry(config: Config) -> StateGeometry:
    return kda_geometry("kimi_k3", config, first_block=1)


def _lower_bound(config: Config) -> float:
    return negative_bound(config.section("linear_attn_config") or config, "gate_lower_bound")


def _example_config(geometry: StateGeometry, gate: GateParameters) -> dict[str, object]:
    text = kda_keys(geometry, first_block=1, gate_lower_bound=gate.lower_bound)
    return {
        "model_type": "kimi_k3",
        "architectures": ["KimiK3ForConditionalGeneration"],
        "text_config": {"model_type": "kimi_linear", **text},
    }


KIMI_K3 = Family(
    name="kimi_k3",
    model_types=("kimi_k3",),
    kind="kda",
    geometry=_geometry,
    lower_bound=_lower_bound,
    usual_lower_bound=-5.0,
    module="self_attn",
    default_gate_input=0.8,
    calibrated=True,
    example_config=_example_config,
    prefix="language_model.model.",
    # Released checkpoints hold head_dim = 128 values for 96 heads.
    A_log_shape=lambda heads: (max(heads, 128),),
    A_log_padded=True,
)
