"""The compute permutation of ``hybrid`` placement: a model's weights with the heads in another order (B.1 (a), step 7).

The permuted weights are a model of the same configuration and the same function. Its recurrent states, convolution rows
and masks are those of the unpermuted model with their heads in the new order, so that a tensor-parallel rank that takes
a contiguous block of heads computes the heads that the placement gives to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dasc.geometry import StateGeometry
from dasc.models.families import family_of_name
from dasc.models.hybrid.config import HybridConfig
from dasc.placement import Placement, check_head_order, key_head_order, permute_heads

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class HeadAxis:
    """The axis of a weight that holds heads.

    Attributes:
        dim: which one.
        segments: one after another, each all heads in order: whose heads, and the entries of one.
        padded: entries may follow that belong to no head.
    """

    dim: int
    segments: tuple[tuple[Literal["key", "value"], int], ...]
    padded: bool = False


LayerAxes = Mapping[str, HeadAxis | None]
"""Where the weights of a recurrent layer hold heads, by name in its module; ``None`` for what all heads share."""


def permute_weights(config: HybridConfig, weights: Mapping[str, Tensor], placement: Placement) -> dict[str, Tensor]:
    """Bring every head-coupled weight of the recurrent layers into the placement's compute order.

    All value heads that share a key head move together with it (``B = HV / H`` for GDN, 1 for KDA). Exact: entries are
    moved, none is computed.

    Args:
        config: of the model.
        weights: all of its tensors, by the names that transformers writes.
        placement: of the model's heads; only ``hybrid`` permutes them.

    Returns:
        Weights for the same configuration. Tensors without heads are those given, not copies.

    Raises:
        ValueError: for a placement of another geometry, or a recurrent layer with weights that are missing, misshapen,
            quantised or unknown: nothing that may be coupled to heads is left behind.
    """
    geometry = config.geometry
    check_head_order(geometry, placement.head_order)
    permuted = dict(weights)
    if not placement.permutes_heads:
        return permuted
    axes = layer_axes(geometry)[0]
    module = family_of_name(geometry.family).module
    for block, order in zip(geometry.recurrent_layers, placement.head_order):
        prefix = f"{config.tensor_prefix}model.layers.{block}.{module}."
        layer = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
        _check(prefix, layer, axes)
        for name, axis in axes.items():
            permuted[prefix + name] = permute_weight(prefix + name, layer[name], axis, order, geometry)
    return permuted


def layer_axes(geometry: StateGeometry) -> tuple[LayerAxes, ...]:
    """Every form in which checkpoints hold the weights of a recurrent layer; the first is :class:`HybridModel`'s."""
    if geometry.family == "olmo_hybrid":
        return (_olmo_axes(geometry),)
    return _gdn_axes(geometry) if geometry.kind == "gdn" else _kda_axes(geometry)


def permute_weight(name: str, weight: Tensor, axis: HeadAxis | None, order: Tensor, geometry: StateGeometry) -> Tensor:
    """Bring one weight of a recurrent layer into compute order. Without heads it is returned as it is.

    Args:
        name: for messages.
        weight: of the whole model, on any device.
        axis: where it holds heads.
        order: ``[HV]``, the layer's row of the head order.
        geometry: of the whole model.

    Raises:
        ValueError: for a weight that is misshapen or no tensor of plain numbers.
    """
    if weight.dtype not in DTYPES:
        raise refusal(name, weight)
    if axis is None:
        return weight
    orders = {"value": order.to(weight.device), "key": key_head_order(order, geometry).to(weight.device)}
    return _permute(name, weight, axis, orders)


def refusal(name: str, weight: Tensor) -> ValueError:
    """The error for a weight whose heads cannot be permuted."""
    return ValueError(
        f"placement 'hybrid' cannot permute the heads of {name} ({weight.dtype}), which is no plain "
        "weight of a recurrent layer; quantised and packed weights allow 'storage' only"
    )


def _gdn_axes(geometry: StateGeometry) -> tuple[LayerAxes, ...]:
    """Qwen3-Next's projections are fused by key head, Qwen3.5's are apart."""
    K, V, bundle = geometry.head_k_dim, geometry.head_v_dim, geometry.bundle
    of_value_heads = HeadAxis(0, (("value", 1),))
    shared: LayerAxes = {
        "conv1d.weight": HeadAxis(0, (("key", K), ("key", K), ("value", V))),
        "A_log": of_value_heads,
        "dt_bias": of_value_heads,
        "norm.weight": None,
        "out_proj.weight": HeadAxis(1, (("value", V),)),
    }
    fused = {
        # a key head's query, key, and its value heads' values and output gates; then their b and a
        "in_proj_qkvz.weight": HeadAxis(0, (("key", 2 * K + 2 * bundle * V),)),
        "in_proj_ba.weight": HeadAxis(0, (("key", 2 * bundle),)),
    }
    apart = {
        "in_proj_qkv.weight": HeadAxis(0, (("key", K), ("key", K), ("value", V))),
        "in_proj_z.weight": HeadAxis(0, (("value", V),)),
        "in_proj_b.weight": of_value_heads,
        "in_proj_a.weight": of_value_heads,
    }
    return {**fused, **shared}, {**apart, **shared}


def _olmo_axes(geometry: StateGeometry) -> LayerAxes:
    """OLMo-Hybrid has a projection for each operand."""
    K, V = geometry.head_k_dim, geometry.head_v_dim
    of_keys, of_values, of_value_heads = (
        HeadAxis(0, (("key", K),)),
        HeadAxis(0, (("value", V),)),
        HeadAxis(0, (("value", 1),)),
    )
    return {
        "q_proj.weight": of_keys,
        "k_proj.weight": of_keys,
        "v_proj.weight": of_values,
        "g_proj.weight": of_values,
        "a_proj.weight": of_value_heads,
        "b_proj.weight": of_value_heads,
        "q_conv1d.weight": of_keys,
        "k_conv1d.weight": of_keys,
        "v_conv1d.weight": of_values,
        "A_log": of_value_heads,
        "dt_bias": of_value_heads,
        "o_norm.weight": None,
        "o_proj.weight": HeadAxis(1, (("value", V),)),
    }


def _kda_axes(geometry: StateGeometry) -> tuple[LayerAxes, ...]:
    """Kimi-Linear's output gate is of low rank, Kimi-K3's of full rank."""
    of_channels = HeadAxis(0, (("value", geometry.head_v_dim),))
    shared: LayerAxes = {
        **{f"{part}_proj.weight": of_channels for part in "qkv"},
        **{f"{part}_conv1d.weight": of_channels for part in "qkv"},
        "f_a_proj.weight": None,
        "f_b_proj.weight": of_channels,
        "b_proj.weight": HeadAxis(0, (("value", 1),)),
        "A_log": HeadAxis(0, (("value", 1),), padded=True),
        "dt_bias": of_channels,
        "o_norm.weight": None,
        "o_proj.weight": HeadAxis(1, (("value", geometry.head_v_dim),)),
    }
    low_rank = {"g_a_proj.weight": None, "g_b_proj.weight": of_channels}
    return {**low_rank, **shared}, {"g_proj.weight": of_channels, **shared}


def _permute(name: str, weight: Tensor, axis: HeadAxis, orders: Mapping[str, Tensor]) -> Tensor:
    flat = weight.flatten() if axis.padded else weight  # KDA's A_log comes with other axes of size 1 too
    sizes = [len(orders[heads]) * size for heads, size in axis.segments]
    entries = flat.shape[axis.dim] if flat.ndim > axis.dim else 0
    if entries < sum(sizes) or (entries > sum(sizes) and not axis.padded):
        raise ValueError(f"{name} must hold {sum(sizes)} entries of heads in axis {axis.dim}, got {list(weight.shape)}")
    *parts, rest = flat.split_with_sizes([*sizes, entries - sum(sizes)], dim=axis.dim)
    moved = [permute_heads(part, orders[heads], axis.dim, size) for part, (heads, size) in zip(parts, axis.segments)]
    return torch.cat([*moved, rest], dim=axis.dim).view(weight.shape)


def _check(prefix: str, layer: Mapping[str, Tensor], axes: LayerAxes) -> None:
    """Raise unless the layer's weights are those of ``axes``, all and no others."""
    unknown, missing = sorted(set(layer) - set(axes)), sorted(set(axes) - set(layer))
    if unknown:
        raise refusal(prefix + unknown[0], layer[unknown[0]])
    if missing:
        raise ValueError(f"weights must hold {prefix}{missing[0]}, which is missing")
