"""The forms in which config.json files say layers and sizes, shared by the families, and their inverses."""

from __future__ import annotations

from dasc.geometry import StateGeometry
from dasc.models.config import Config


def typed_layers(config: Config) -> tuple[int, ...]:
    """0-based recurrent blocks from ``layer_types``: the entries ``"linear_attention"``.

    Raises:
        CheckpointError: for a list of another length than ``num_hidden_layers``, or a type that is no attention.
    """
    types = config.strings("layer_types")
    if len(types) != config.num_blocks():
        raise config.error("layer_types", f"a list of num_hidden_layers = {config.num_blocks()} entries")
    if not all(name.endswith("attention") for name in types):
        raise config.error("layer_types", "a list of attention types")
    return tuple(block for block, name in enumerate(types) if name == "linear_attention")


def periodic_layers(blocks: int, period: int) -> tuple[int, ...]:
    """0-based recurrent blocks when every ``period``-th block has full attention."""
    return tuple(block for block in range(blocks) if (block + 1) % period)


def _listed_layers(config: Config, linear: Config, first: int) -> tuple[int, ...]:
    """0-based recurrent blocks from ``linear_attn_config.kda_layers``, whose first block has the number ``first``."""
    blocks = config.num_blocks()
    # Next-token-prediction blocks stand behind the last block; some lists name them.
    extra = config.integer_or("num_nextn_predict_layers", 0, minimum=0)
    listed: dict[str, set[int]] = {}
    for key in ("kda_layers", "full_attn_layers"):
        numbers = linear.integers(key) if linear.has(key) else []
        listed[key] = {number - first for number in numbers}
        if any(not 0 <= block < blocks + extra for block in listed[key]):
            raise linear.error(key, f"{first}-based block numbers in [{first}, {blocks + extra - 1 + first}]")
    kda, full = listed["kda_layers"], listed["full_attn_layers"]
    if linear.has("full_attn_layers") and (kda & full or not set(range(blocks)) <= kda | full):
        raise linear.error("full_attn_layers", f"the rest of {blocks} blocks, numbered from {first}, beside kda_layers")
    return tuple(sorted(block for block in kda if block < blocks))


def kda_geometry(family: str, config: Config, *, first_block: int) -> StateGeometry:
    """Geometry of a KDA model from ``linear_attn_config``, or from the ``linear_*`` keys that transformers writes.

    ``v_head_dim`` is the full attention's and plays no part here.

    Args:
        first_block: number of the first block in ``linear_attn_config``'s lists, 0 or 1.

    Raises:
        CheckpointError: naming the key.
    """
    linear = config.section("linear_attn_config")
    if linear is None:
        heads, head_dim = config.integer("linear_num_heads"), config.integer("linear_head_dim")
        conv_width = config.conv_width("linear_conv_kernel_dim")
    else:
        heads, head_dim = linear.integer("num_heads"), linear.integer("head_dim")
        conv_width = linear.conv_width("short_conv_kernel_size")
    if linear is not None and linear.has("kda_layers"):
        layers = _listed_layers(config, linear, first_block)
    else:
        layers = typed_layers(config)
    return StateGeometry(
        family=family,
        kind="kda",
        num_blocks=config.num_blocks(),
        recurrent_layers=layers,
        num_value_heads=heads,
        num_key_heads=heads,
        head_v_dim=head_dim,
        head_k_dim=head_dim,
        conv_width=conv_width,
    )


def gdn_geometry(family: str, config: Config) -> StateGeometry:
    """Geometry of a GDN model of the Qwen line: layers from ``layer_types``, else from ``full_attention_interval`` (4).

    Raises:
        CheckpointError: naming the key.
    """
    if config.has("layer_types"):
        layers = typed_layers(config)
    else:
        layers = periodic_layers(config.num_blocks(), config.integer_or("full_attention_interval", 4))
    return StateGeometry(
        family=family,
        kind="gdn",
        num_blocks=config.num_blocks(),
        recurrent_layers=layers,
        num_value_heads=config.integer("linear_num_value_heads"),
        num_key_heads=config.integer("linear_num_key_heads"),
        head_v_dim=config.integer("linear_value_head_dim"),
        head_k_dim=config.integer("linear_key_head_dim"),
        conv_width=config.conv_width("linear_conv_kernel_dim"),
    )


def softplus(config: Config) -> None:
    """The gate of a family that only has the softplus form: no lower bound."""


def negative_bound(config: Config, key: str) -> float:
    """A safe gate's lower bound.

    Raises:
        CheckpointError: unless it is a negative number.
    """
    bound = config.number(key)
    if not -1e6 < bound < 0:
        raise config.error(key, "a negative number, the lower bound of the log-decay")
    return bound


def layer_type_list(geometry: StateGeometry, full: str = "full_attention") -> list[str]:
    """The inverse of :func:`typed_layers`."""
    recurrent = set(geometry.recurrent_layers)
    return ["linear_attention" if block in recurrent else full for block in range(geometry.num_blocks)]


def gdn_keys(geometry: StateGeometry) -> dict[str, object]:
    """The inverse of :func:`gdn_geometry`."""
    return {
        "num_hidden_layers": geometry.num_blocks,
        "layer_types": layer_type_list(geometry),
        "linear_num_value_heads": geometry.num_value_heads,
        "linear_num_key_heads": geometry.num_key_heads,
        "linear_value_head_dim": geometry.head_v_dim,
        "linear_key_head_dim": geometry.head_k_dim,
        "linear_conv_kernel_dim": geometry.conv_width,
    }


def kda_keys(geometry: StateGeometry, *, first_block: int, **gate: object) -> dict[str, object]:
    """The inverse of :func:`kda_geometry`, with ``linear_attn_config``, to which the ``gate`` keys are added.

    Raises:
        ValueError: for a geometry whose key and value heads or dimensions differ: this form cannot say them.
    """
    if geometry.num_key_heads != geometry.num_value_heads or geometry.head_k_dim != geometry.head_v_dim:
        raise ValueError(
            f"{geometry.family}: geometry must have equal key and value heads and dimensions, got "
            f"{geometry.num_key_heads} x {geometry.head_k_dim} and {geometry.num_value_heads} x {geometry.head_v_dim}"
        )
    recurrent = set(geometry.recurrent_layers)
    return {
        "num_hidden_layers": geometry.num_blocks,
        "linear_attn_config": {
            "kda_layers": [block + first_block for block in geometry.recurrent_layers],
            "full_attn_layers": [b + first_block for b in range(geometry.num_blocks) if b not in recurrent],
            "num_heads": geometry.num_value_heads,
            "head_dim": geometry.head_k_dim,
            "short_conv_kernel_size": geometry.conv_width,
            **gate,
        },
    }
