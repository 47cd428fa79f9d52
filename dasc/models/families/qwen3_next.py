"""Qwen3-Next: GDN with the softplus gate."""

from __future__ import annotations

from dasc.geometry import StateGeometry
from dasc.models.config import Config
from dasc.models.families.config_forms import gdn_geometry, gdn_keys, softplus
from dasc.models.families.family import Family
from dasc.models.gate_parameters import GateParameters


def _geometry(config: Config) -> StateGeometry:
    return gdn_geometry("qwen3_next", config)


def _example_config(geometry: StateGeometry, gate: GateParameters) -> dict[str, object]:
    return {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], **gdn_keys(geometry)}


QWEN3_NEXT = Family(
    name="qwen3_next",
    model_types=("qwen3_next",),
    kind="gdn",
    geometry=_geometry,
    lower_bound=softplus,
    usual_lower_bound=None,
    module="linear_attn",
    default_gate_input=-0.3,
    calibrated=True,
    example_config=_example_config,
)
