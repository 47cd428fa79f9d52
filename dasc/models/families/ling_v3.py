"""Ling-V3 (Bailing): KDA, with the softplus or the safe gate.

Earlier models of the same ``model_type`` use lightning attention, whose decay is fixed, not learned; they have no short
convolution and are refused.
"""

from __future__ import annotations

from dasc.geometry import StateGeometry
from dasc.models.config import Config
from dasc.models.errors import CheckpointError
from dasc.models.families.config_forms import negative_bound, periodic_layers, typed_layers
from dasc.models.families.family import Family
from dasc.models.gate_parameters import GateParameters


def _layers(config: Config) -> tuple[int, ...]:
    """``layer_types``, or ``layer_group_size``: a period, or one number a block where 1 means recurrent."""
    if config.has("layer_types"):
        return typed_layers(config)
    blocks = config.num_blocks()
    if config.is_integer("layer_group_size"):
        return periodic_layers(blocks, config.integer("layer_group_size"))
    marks = config.integers("layer_group_size")
    if len(marks) != blocks:
        raise config.error("layer_group_size", f"a period, or a list of num_hidden_layers = {blocks} entries")
    return tuple(block for block, mark in enumerate(marks) if mark == 1)


def _geometry(config: Config) -> StateGeometry:
    if not config.has("short_conv_kernel_size"):
        raise CheckpointError(
            f"{config.where}: no short_conv_kernel_size, so this Bailing model uses lightning attention, not KDA; "
            "its decay is not learned and there is nothing to select"
        )
    heads = config.integer("num_attention_heads")
    # transformers keeps the KDA dimension under its own key and writes the rotary dimension as head_dim. v_head_dim is
    # the full attention's: recurrent keys and values have one dimension, in transformers' class and in SGLang's pool.
    head_dim = config.integer("linear_head_dim" if config.has("linear_head_dim") else "head_dim")
    return StateGeometry(
        family="ling_v3",
        kind="kda",
        num_blocks=config.num_blocks(),
        recurrent_layers=_layers(config),
        num_value_heads=heads,
        num_key_heads=heads,
        head_v_dim=head_dim,
        head_k_dim=head_dim,
        conv_width=config.conv_width("short_conv_kernel_size"),
    )


def _lower_bound(config: Config) -> float | None:
    return negative_bound(config, "kda_lower_bound") if config.flag("kda_safe_gate") else None


def _group_size(geometry: StateGeometry) -> int | list[int]:
    """The inverse of :func:`_layers`: a period if there is one."""
    blocks, layers = geometry.num_blocks, geometry.recurrent_layers
    for period in range(2, blocks + 1):
        if periodic_layers(blocks, period) == layers:
            return period
    return [int(block in layers) for block in range(blocks)]


def _example_config(geometry: StateGeometry, gate: GateParameters) -> dict[str, object]:
    return {
        "model_type": "bailing_hybrid",
        "architectures": ["BailingMoeV3ForCausalLM"],
        "num_hidden_layers": geometry.num_blocks,
        "num_attention_heads": geometry.num_value_heads,
        "head_dim": geometry.head_k_dim,
        "short_conv_kernel_size": geometry.conv_width,
        "layer_group_size": _group_size(geometry),
        "kda_safe_gate": gate.gate == "safe",
        "kda_lower_bound": gate.lower_bound,
    }


LING_V3 = Family(
    name="ling_v3",
    model_types=("bailing_hybrid", "bailing_moe_v3", "bailing_moe_v3_vl"),
    kind="kda",
    geometry=_geometry,
    lower_bound=_lower_bound,
    usual_lower_bound=-5.0,
    module="attention",
    default_gate_input=-0.3,
    calibrated=False,
    example_config=_example_config,
)
