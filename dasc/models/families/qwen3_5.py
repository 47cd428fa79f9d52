"""Qwen3.5 and the models that took its GDN over, text-only and multimodal: softplus gate.

Qwen4-Exp's embedding layers (PLE) carry a small convolution state of their own. Nothing is selected there, and
:class:`~dasc.geometry.StateGeometry` does not count it.
"""

from __future__ import annotations

from dasc.geometry import StateGeometry
from dasc.models.config import Config
from dasc.models.families.config_forms import gdn_geometry, gdn_keys, softplus
from dasc.models.families.family import Family
from dasc.models.gate_parameters import GateParameters


def _geometry(config: Config) -> StateGeometry:
    return gdn_geometry("qwen3_5", config)


def _example_config(geometry: StateGeometry, gate: GateParameters) -> dict[str, object]:
    return {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": {"model_type": "qwen3_5_text", **gdn_keys(geometry)},
    }


QWEN3_5 = Family(
    name="qwen3_5",
    model_types=(
        "qwen3_5",
        "qwen3_5_text",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen4_exp",
        "qwen4_exp_text",
        "intern_s2_preview",
        "interns2_mobius",
        "interns2_mobius_text",
    ),
    kind="gdn",
    geometry=_geometry,
    lower_bound=softplus,
    usual_lower_bound=None,
    module="linear_attn",
    default_gate_input=-0.3,
    calibrated=False,
    example_config=_example_config,
    prefix="model.language_model.",
)
