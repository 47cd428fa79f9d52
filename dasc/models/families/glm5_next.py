"""GLM-5-Next: KDA, with the safe or the softplus gate. The layer lists of ``linear_attn_config`` are 0-based."""

from __future__ import annotations

from dasc.geometry import StateGeometry
from dasc.models.config import Config
from dasc.models.families.config_forms import kda_geometry, kda_keys, layer_type_list, negative_bound
from dasc.models.families.family import Family
from dasc.models.gate_parameters import GateParameters

_DEFAULT_LOWER_BOUND = -5.0


def _geometry(config: Config) -> StateGeometry:
    return kda_geometry("glm5_next", config, first_block=0)


def _lower_bound(config: Config) -> float | None:
    """A bound means the safe gate; ``null`` means it too, with the default bound, unless ``safe_gate`` is false.

    Without a bound, ``safe_gate`` must be true: else transformers takes its default bound and SGLang the softplus gate.
    """
    linear = config.section("linear_attn_config")
    if linear is None:
        if not config.given("linear_lower_bound"):
            raise config.error("linear_lower_bound", "a negative number or null")
        return negative_bound(config, "linear_lower_bound") if config.has("linear_lower_bound") else None
    safe = linear.flag("safe_gate") if linear.has("safe_gate") else True
    for place, key in ((linear, "gate_lower_bound"), (config, "linear_lower_bound")):
        if place.has(key):
            return negative_bound(place, key)
        if place.given(key):
            return _DEFAULT_LOWER_BOUND if safe else None
    if not (linear.has("safe_gate") and safe):
        raise linear.error(
            "gate_lower_bound",
            f"given, if only as null, unless safe_gate is true (without it transformers takes {_DEFAULT_LOWER_BOUND}, "
            "SGLang the softplus gate)",
        )
    return _DEFAULT_LOWER_BOUND


def _example_config(geometry: StateGeometry, gate: GateParameters) -> dict[str, object]:
    text = kda_keys(geometry, first_block=0, gate_lower_bound=gate.lower_bound, safe_gate=gate.gate == "safe")
    text["layer_types"] = layer_type_list(geometry, full="indexed_attention")
    return {
        "model_type": "glm5_next",
        "architectures": ["Glm5NextForConditionalGeneration"],
        "text_config": {"model_type": "glm5_next_text", **text},
    }


GLM5_NEXT = Family(
    name="glm5_next",
    model_types=("glm5_next", "glm5_next_text"),
    kind="kda",
    geometry=_geometry,
    lower_bound=_lower_bound,
    usual_lower_bound=-5.0,
    module="self_attn",
    default_gate_input=-0.3,
    calibrated=False,
    example_config=_example_config,
    prefix="model.language_model.",
)
