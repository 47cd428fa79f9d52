"""OLMo-Hybrid: GDN with the softplus gate. Its beta lies in [0, 2], which does not touch the decay."""

from __future__ import annotations

from dasc.geometry import StateGeometry
from dasc.models.config import Config
from dasc.models.families.config_forms import gdn_keys, periodic_layers, softplus, typed_layers
from dasc.models.families.family import Family
from dasc.models.gate_parameters import GateParameters


def _layers(config: Config) -> tuple[int, ...]:
    """``layer_types``; without them every fourth block is full, and the last where there is no fourth."""
    if config.has("layer_types"):
        return typed_layers(config)
    blocks = config.num_blocks()
    return periodic_layers(blocks, 4) if blocks >= 4 else tuple(range(blocks - 1))


def _geometry(config: Config) -> StateGeometry:
    """Sizes left out follow from the attention heads and the hidden size, as the model's own code derives them."""
    heads = config.integer("num_attention_heads")
    key_heads = config.integer_or("linear_num_key_heads", heads)
    if config.has("linear_key_head_dim"):
        key_dim = config.integer("linear_key_head_dim")
    else:
        key_dim = int(0.75 * config.integer("hidden_size") / key_heads)
    return StateGeometry(
        family="olmo_hybrid",
        kind="gdn",
        num_blocks=config.num_blocks(),
        recurrent_layers=_layers(config),
        num_value_heads=config.integer_or("linear_num_value_heads", heads),
        num_key_heads=key_heads,
        head_v_dim=config.integer_or("linear_value_head_dim", 2 * key_dim),
        head_k_dim=key_dim,
        conv_width=config.conv_width("linear_conv_kernel_dim") if config.has("linear_conv_kernel_dim") else 4,
    )


def _example_config(geometry: StateGeometry, gate: GateParameters) -> dict[str, object]:
    return {
        "model_type": "olmo_hybrid",
        "architectures": ["OlmoHybridForCausalLM"],
        "num_attention_heads": geometry.num_value_heads,
        **gdn_keys(geometry),
    }


OLMO_HYBRID = Family(
    name="olmo_hybrid",
    model_types=("olmo_hybrid",),
    kind="gdn",
    geometry=_geometry,
    lower_bound=softplus,
    usual_lower_bound=None,
    module="linear_attn",
    default_gate_input=-0.3,
    calibrated=False,
    example_config=_example_config,
)
