"""Retention horizons from weights and from observed gates, state magnitude, layerwise structure (section 3, A.1)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dasc.geometry import Kind, StateGeometry
from dasc.layout import check_mask
from dasc.models.gate_parameters import GateParameters
from dasc.reference.gates import safe_gate, softplus_gate


def static_gate(params: GateParameters, gate_input: float) -> Tensor:
    """Static log-decay ``g_s`` of every unit: eq. 2 with the gate input fixed to ``a_s``.

    Args:
        params: stored decay parameters of all ``L`` layers.
        gate_input: ``a_s``, finite.

    Returns:
        ``[L, U]`` float64, natural logarithm, never positive or NaN; ``U`` is ``HV``, or ``HV * K`` head-major.

    Raises:
        ValueError: for a gate input that is not finite.
    """
    if not math.isfinite(gate_input):
        raise ValueError(f"gate_input must be finite, got {gate_input}")
    a = torch.tensor(gate_input, dtype=torch.float64, device=params.A_log.device)
    if params.lower_bound is None:
        g = softplus_gate(a, params.A_log, params.dt_bias)
    else:
        g = safe_gate(a, params.A_log, params.dt_bias, params.lower_bound)
    return g.flatten(1)


def one_step_decay(params: GateParameters, gate_input: float) -> Tensor:
    """``alpha_s = exp(g_s)``, ``[L, U]`` float64 in ``[0, 1]``: the profile of figure 1.

    Raises:
        ValueError: for a gate input that is not finite.
    """
    return static_gate(params, gate_input).exp()


def static_horizons(params: GateParameters, gate_input: float, epsilon: float = 1e-3) -> Tensor:
    """``H_s = ln(epsilon) / g_s`` of every unit (eq. 3).

    Args:
        params: stored decay parameters of all ``L`` layers.
        gate_input: ``a_s``, finite.
        epsilon: what is left of a unit after ``H_s`` tokens, within ``(0, 1)``.

    Returns:
        ``[L, U]`` float64, tokens, positive; ``inf`` where ``g_s`` is 0.

    Raises:
        ValueError: for arguments outside their range.
    """
    return _horizon(static_gate(params, gate_input), epsilon)


def empirical_horizons(g: Tensor, token_mask: Tensor | None = None, epsilon: float = 1e-3) -> Tensor:
    """``H_e``: the horizon of the observed log-decay, averaged over each prefix's own tokens (eq. 4).

    Args:
        g: ``[P, T, ...]`` observed log-decay of ``P`` prefixes, natural logarithm, not positive; averaged in FP64.
        token_mask: ``[P, T]`` bool, false at padding, whose ``g`` is not read; every position counts when ``None``.
        epsilon: within ``(0, 1)``.

    Returns:
        ``[P, ...]`` float64, tokens, positive; ``inf`` where every ``g`` is 0.

    Raises:
        ValueError: for other shapes or dtypes, a prefix without tokens, positive or NaN ``g``, or a wrong epsilon.
    """
    if g.ndim < 2 or not g.is_floating_point():
        raise ValueError(f"g must be floating-point [P, T, ...], got {g.dtype} {list(g.shape)}")
    if token_mask is None:
        token_mask = torch.ones(g.shape[:2], dtype=torch.bool, device=g.device)
    if token_mask.dtype != torch.bool or token_mask.shape != g.shape[:2]:
        raise ValueError(
            f"token_mask must be torch.bool {list(g.shape[:2])} like g, got {token_mask.dtype} {list(token_mask.shape)}"
        )
    counts = token_mask.sum(dim=1)
    if not (counts > 0).all():
        raise ValueError(f"token_mask must leave every prefix a token, got counts {counts.tolist()}")
    per_token = (..., *[None] * (g.ndim - 2))
    observed = torch.where(token_mask[per_token], g.double(), 0.0)
    if not (observed <= 0).all():
        raise ValueError("g must be a log-decay, at most 0, got positive values or NaN")
    return _horizon(observed.sum(dim=1) / counts[per_token], epsilon)


def _horizon(g: Tensor, epsilon: float) -> Tensor:
    """``ln(epsilon) / g`` for float64 ``g <= 0``, positive even where ``g`` is 0 or ``-inf``."""
    if not 0 < epsilon < 1:
        raise ValueError(f"epsilon must be within (0, 1), got {epsilon}")
    # abs(): a positive zero must not turn the horizon into -inf. clamp(): an infinite decay must not make it 0.
    return -math.log(epsilon) / g.abs().clamp(max=torch.finfo(g.dtype).max)


def state_magnitude(state: Tensor, kind: Kind) -> Tensor:
    """``M_S`` of every unit (eq. 5): Frobenius norm of a GDN head, Euclidean norm over ``V`` of a KDA channel.

    Args:
        state: ``[..., HV, V, K]``, floating point.
        kind: ``"gdn"`` or ``"kda"``.

    Returns:
        ``[..., HV]`` (GDN) or ``[..., HV * K]`` head-major (KDA), float64.

    Raises:
        ValueError: for fewer axes, another dtype or an unknown kind.
    """
    if state.ndim < 3 or not state.is_floating_point():
        raise ValueError(f"state must be floating-point [..., HV, V, K], got {state.dtype} {list(state.shape)}")
    if kind not in ("gdn", "kda"):
        raise ValueError(f"kind must be 'gdn' or 'kda', got {kind!r}")
    channels: Tensor = torch.linalg.vector_norm(state.double(), dim=-2)
    return channels.norm(dim=-1) if kind == "gdn" else channels.flatten(-2)


class PairCounts(NamedTuple):
    """Layer-head pairs, pooled over all layers (appendix A.1).

    Attributes:
        mixed: pairs with both retained and omitted units.
        omit_all: pairs that omit every unit.
        retain_all: pairs that retain every unit.
    """

    mixed: int
    omit_all: int
    retain_all: int


class LayerFractions(NamedTuple):
    """Mean retained fraction of each layer (appendix A.1).

    Attributes:
        mean: ``[L]`` float64.
        lowest: least of ``mean``.
        highest: largest of ``mean``.
    """

    mean: Tensor
    lowest: float
    highest: float


def retained_fractions(mask: Tensor, geometry: StateGeometry) -> Tensor:
    """``r_{l,h}(w)``: the share of each head's units that ``mask``, selected at ``w``, retains (appendix A.1).

    Args:
        mask: ``[L, units_per_layer]`` bool.
        geometry: of the whole model.

    Returns:
        ``[L, HV]`` float64 within ``[0, 1]``; only 0 or 1 for GDN, whose unit is the head.

    Raises:
        ValueError: for a mask of another shape or dtype.
    """
    check_mask(geometry, mask)
    per_head = mask.reshape(geometry.num_layers, geometry.num_value_heads, geometry.units_per_head)
    return per_head.double().mean(dim=2)


def mixed_pairs(fractions: Tensor) -> PairCounts:
    """Count the layer-head pairs of :func:`retained_fractions` that are mixed, wholly omitted and wholly retained."""
    omit_all = int((fractions == 0).sum())
    retain_all = int((fractions == 1).sum())
    return PairCounts(fractions.numel() - omit_all - retain_all, omit_all, retain_all)


def layer_fractions(fractions: Tensor) -> LayerFractions:
    """Average :func:`retained_fractions` over the heads of each layer, and give the range over layers."""
    mean = fractions.mean(dim=1)
    return LayerFractions(mean, float(mean.min()), float(mean.max()))
