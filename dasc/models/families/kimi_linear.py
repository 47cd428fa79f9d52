"""Kimi-Linear: KDA with the softplus gate. The layer lists of ``linear_attn_config`` are 1-based."""

from __future__ import annotations

from dasc.geometry import StateGeometry
from dasc.models.config import Config
from dasc.models.families.config_forms import kda_geometry, kda_keys
from dasc.models.families.family import Family
from dasc.models.gate_parameters import GateParameters


def _geometry(config: Config) -> StateGeometry:
    return kda_geometry("kimi_linear", config, first_block=1)


def _lower_bound(config: Config) -> None:
    linear = config.section("linear_attn_config")
    # Kimi-K3's inner config calls itself kimi_linear too, and there the gate is another.
    if linear is not None and linear.has("gate_lower_bound"):
        raise linear.error("gate_lower_bound", "absent in kimi_linear (the safe gate is that of model_type kimi_k3)")


def _example_config(geometry: StateGeometry, gate: GateParameters) -> dict[str, object]:
    return {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        **kda_keys(geometry, first_block=1),
    }


KIMI_LINEAR = Family(
    name="kimi_linear",
    model_types=("kimi_linear",),
    kind="kda",
    geometry=_geometry,
    lower_bound=_lower_bound,
    usual_lower_bound=None,
    module="self_attn",
    default_gate_input=-0.3,
    calibrated=True,
    example_config=_example_config,
    A_log_shape=lambda heads: (1, 1, heads, 1),
)
