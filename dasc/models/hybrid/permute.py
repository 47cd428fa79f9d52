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
class _HeadAxis:
    """The axis of a weight that holds heads.

    Attributes:
        dim: which one.
        segments: one after another, each all heads in order: whose heads, and the entries of one.
        padded: entries may follow that belong to no head.
    """

    dim: int
    segments: tuple[tuple[Literal["key", "value"], int], ...]
    padded: bool = False


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
    axes = _gdn_axes(geometry) if geometry.kind == "gdn" else _kda_axes(geometry)
    module = family_of_name(geometry.family).module
    for block, order in zip(geometry.recurrent_layers, placement.head_order):
        prefix = f"{config.tensor_prefix}model.layers.{block}.{module}."
        layer = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
        _check(prefix, layer, axes)
        orders = {"value": order, "key": key_head_order(order, geometry)}
        for name, axis in axes.items():
            if axis is not None:
                permuted[prefix + name] = _permute(prefix + name, layer[name], axis, orders)
    return permuted


def _gdn_axes(geometry: StateGeometry) -> dict[str, _HeadAxis | None]:
    """Qwen3-Next's weights of a recurrent layer; ``None`` for those that all heads share."""
    K, V, bundle = geometry.head_k_dim, geometry.head_v_dim, geometry.bundle
    of_value_heads = _HeadAxis(0, (("value", 1),))
    return {
        # a key head's query, key, and its value heads' values and output gates; then their b and a
        "in_proj_qkvz.weight": _HeadAxis(0, (("key", 2 * K + 2 * bundle * V),)),
        "in_proj_ba.weight": _HeadAxis(0, (("key", 2 * bundle),)),
        "conv1d.weight": _HeadAxis(0, (("key", K), ("key", K), ("value", V))),
        "A_log": of_value_heads,
        "dt_bias": of_value_heads,
        "norm.weight": None,
        "out_proj.weight": _HeadAxis(1, (("value", V),)),
    }


def _kda_axes(geometry: StateGeometry) -> dict[str, _HeadAxis | None]:
    """Kimi-Linear's weights of a recurrent layer; ``None`` for those that all heads share."""
    of_channels = _HeadAxis(0, (("value", geometry.head_v_dim),))
    return {
        **{f"{part}_proj.weight": of_channels for part in "qkv"},
        **{f"{part}_conv1d.weight": of_channels for part in "qkv"},
        "f_a_proj.weight": None,
        "f_b_proj.weight": of_channels,
        "g_a_proj.weight": None,
        "g_b_proj.weight": of_channels,
        "b_proj.weight": _HeadAxis(0, (("value", 1),)),
        "A_log": _HeadAxis(0, (("value", 1),), padded=True),
        "dt_bias": of_channels,
        "o_norm.weight": None,
        "o_proj.weight": _HeadAxis(1, (("value", geometry.head_v_dim),)),
    }


def _permute(name: str, weight: Tensor, axis: _HeadAxis, orders: Mapping[str, Tensor]) -> Tensor:
    flat = weight.flatten() if axis.padded else weight  # KDA's A_log comes with other axes of size 1 too
    sizes = [len(orders[heads]) * size for heads, size in axis.segments]
    entries = flat.shape[axis.dim] if flat.ndim > axis.dim else 0
    if entries < sum(sizes) or (entries > sum(sizes) and not axis.padded):
        raise ValueError(f"{name} must hold {sum(sizes)} entries of heads in axis {axis.dim}, got {list(weight.shape)}")
    *parts, rest = flat.split_with_sizes([*sizes, entries - sum(sizes)], dim=axis.dim)
    moved = [permute_heads(part, orders[heads], axis.dim, size) for part, (heads, size) in zip(parts, axis.segments)]
    return torch.cat([*moved, rest], dim=axis.dim).view(weight.shape)


def _check(prefix: str, layer: Mapping[str, Tensor], axes: Mapping[str, _HeadAxis | None]) -> None:
    """Raise unless the layer's weights are those of ``axes``, all and no others, in a dtype of plain numbers."""
    unknown, missing = sorted(set(layer) - set(axes)), sorted(set(axes) - set(layer))
    packed = sorted(name for name, weight in layer.items() if weight.dtype not in DTYPES)
    if unknown or packed:
        name = (unknown + packed)[0]
        raise ValueError(
            f"placement 'hybrid' cannot permute the heads of {prefix}{name} ({layer[name].dtype}), which is no plain "
            "weight of a recurrent layer; quantised and packed weights allow 'storage' only"
        )
    if missing:
        raise ValueError(f"weights must hold {prefix}{missing[0]}, which is missing")
