"""Decay parameters with wanted retention horizons, and the geometries of the paper's three models."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dasc.geometry import StateGeometry
from dasc.models.families import family_of_name
from dasc.models.gate_parameters import GateParameters


def _all_but_every_fourth_and_last(blocks: int) -> tuple[int, ...]:
    return tuple(block for block in range(blocks - 1) if (block + 1) % 4)


GEOMETRIES: dict[str, StateGeometry] = {
    "kimi-linear": StateGeometry(
        family="kimi_linear",
        kind="kda",
        num_blocks=27,
        recurrent_layers=_all_but_every_fourth_and_last(27),
        num_value_heads=32,
        num_key_heads=32,
        head_v_dim=128,
        head_k_dim=128,
    ),
    "qwen3-next": StateGeometry(
        family="qwen3_next",
        kind="gdn",
        num_blocks=48,
        recurrent_layers=_all_but_every_fourth_and_last(48),
        num_value_heads=32,
        num_key_heads=16,
        head_v_dim=128,
        head_k_dim=128,
    ),
    "kimi-k3": StateGeometry(
        family="kimi_k3",
        kind="kda",
        num_blocks=93,
        recurrent_layers=_all_but_every_fourth_and_last(93),
        num_value_heads=96,
        num_key_heads=96,
        head_v_dim=128,
        head_k_dim=128,
    ),
}
"""The three models the paper evaluates, by short name."""

# How near a unit's log-decay may come to a safe gate's lower bound.
_SAFE_REACH = 0.95
# No horizon within this factor of w_max, so that storing parameters in BF16 moves no unit across it.
_MARGIN = 1.25
# Spread of ln(horizon) away from w_max. With it the published counts of Kimi-Linear at W 16 give about the paper's
# capacities at 64, 128 and 512.
_SPREAD = 1.13

# Median one-step decay (figure 1), and the standard deviations of ln(horizon) over layers, heads and channels that come
# near the published retained fractions and mixed pairs (figures 6 and 8).
_EXAMPLES: dict[str, tuple[float, float, float, float]] = {
    "gdn": (0.969, 0.4, 1.8, 0.0),
    "softplus": (0.471, 0.29, 1.39, 0.55),
    "safe": (0.942, 0.35, 0.5, 1.3),
}


def _gate_of_horizons(
    geometry: StateGeometry, log_horizons: Tensor, a_s: float, epsilon: float, rng: torch.Generator
) -> GateParameters:
    """Parameters, exact in FP32, whose static horizons (eq. 3) are the wanted ones but for FP32 rounding.

    Args:
        log_horizons: ``ln H_s``, ``[L, HV]`` for GDN or ``[L, HV, K]`` for KDA, float64.
    """
    heads = (geometry.num_layers, geometry.num_value_heads)
    lower_bound = family_of_name(geometry.family).usual_lower_bound
    noise = torch.randn(heads, generator=rng, dtype=torch.float64)
    A_log = (1 + 0.5 * noise if lower_bound is None else 0.2 * noise).float().double()
    scale = A_log.exp() if geometry.kind == "gdn" else A_log.exp()[:, :, None]
    g = math.log(epsilon) * torch.exp(-log_horizons)
    if lower_bound is None:
        y = -g / scale  # softplus(x) = y
        x = y + torch.log(-torch.expm1(-y))
    else:
        x = torch.logit(g / lower_bound) / scale
    return GateParameters(
        gate="softplus" if lower_bound is None else "safe",
        lower_bound=lower_bound,
        A_log=A_log,
        dt_bias=(x - a_s).float().double(),
    )


def _shortest_horizon(geometry: StateGeometry, epsilon: float) -> float:
    """Tokens; a safe gate cannot decay faster than its bound."""
    lower_bound = family_of_name(geometry.family).usual_lower_bound
    return 0.01 if lower_bound is None else math.log(epsilon) / (_SAFE_REACH * lower_bound)


def spread_counts(total: int, parts: int, low: int, high: int, rng: torch.Generator) -> list[int]:
    """``parts`` uneven integers within ``[low, high]`` whose sum is ``total``, in random order.

    Raises:
        ValueError: when no such integers exist.
    """
    if not low * parts <= total <= high * parts:
        raise ValueError(f"{total} units cannot be spread over {parts} heads of {low} to {high}")
    counts: list[int] = []
    for left in range(parts, 0, -1):
        rest = total - sum(counts)
        least = max(low, rest - high * (left - 1))
        most = min(high, rest - low * (left - 1), 2 * rest // left)
        counts.append(int(torch.randint(least, most + 1, (), generator=rng)))
    return [counts[i] for i in torch.randperm(parts, generator=rng).tolist()]


def gate_with_counts(
    geometry: StateGeometry, retained: Tensor, *, w_max: float, a_s: float, epsilon: float = 1e-3, seed: int = 0
) -> GateParameters:
    """Decay parameters that retain exactly the wanted numbers of units at one cutoff.

    Which units of a head are retained is random. Horizons spread on both sides of ``w_max``, so that other cutoffs
    give other counts. The gate is the usual one of ``geometry.family``. Values are exact in FP32, and storing them in
    BF16 leaves the selection at ``w_max`` the same.

    Args:
        geometry: of the whole model.
        retained: integers, ``[L, HV]`` units of each head (0 or 1 for GDN), or ``[L]`` units of each layer, which are
            then spread unevenly over its heads.
        w_max: the cutoff, tokens.
        a_s: the gate input of eq. 2.
        epsilon: of eq. 3.
        seed: of the random choices.

    Raises:
        ValueError: for counts of another shape or beyond the units there are, a cutoff that the gate cannot reach, or a
            ``geometry.family`` that is not registered.
    """
    per_head = geometry.units_per_head
    heads = (geometry.num_layers, geometry.num_value_heads)
    if tuple(retained.shape) not in (heads, heads[:1]) or retained.is_floating_point() or retained.dtype == torch.bool:
        got = f"{retained.dtype} {list(retained.shape)}"
        raise ValueError(f"retained must be integers, {list(heads)} or {list(heads[:1])}, got {got}")
    if not 0 < epsilon < 1:
        raise ValueError(f"epsilon must be within (0, 1), got {epsilon}")
    shortest = _shortest_horizon(geometry, epsilon)
    if not _MARGIN * shortest < w_max < math.inf:
        raise ValueError(f"w_max must be finite and above {_MARGIN * shortest:.2f} for this gate, got {w_max}")
    rng = torch.Generator().manual_seed(seed)
    if retained.ndim == 1:
        layers = [spread_counts(count, heads[1], 0, per_head, rng) for count in retained.tolist()]
        retained = torch.tensor(layers)
    if (retained < 0).any() or (retained > per_head).any():
        raise ValueError(
            f"retained must be within [0, {per_head}] units a head, got {int(retained.min())} to {int(retained.max())}"
        )
    order = torch.rand(*heads, per_head, generator=rng, dtype=torch.float64).argsort(dim=2).argsort(dim=2)
    keep = order < retained[:, :, None]
    away = math.log(_MARGIN) + _SPREAD * torch.randn(keep.shape, generator=rng, dtype=torch.float64).abs()
    log_horizons = math.log(w_max) + torch.where(keep, away, -away)
    log_horizons = log_horizons.clamp(min=math.log(shortest))
    if geometry.kind == "gdn":
        log_horizons = log_horizons.squeeze(2)
    return _gate_of_horizons(geometry, log_horizons, a_s, epsilon, rng)


def example_gate(geometry: StateGeometry, seed: int = 0) -> GateParameters:
    """Decay parameters whose horizons differ over layers, heads and channels about as the paper's models' do.

    The gate is the usual one of ``geometry.family``. The median one-step decay at the family's default gate input is
    that of figure 1: 0.471 for KDA with the softplus gate, 0.969 for GDN, 0.942 for KDA with the safe gate.

    Raises:
        ValueError: for a ``geometry.family`` that is not registered.
    """
    rng = torch.Generator().manual_seed(seed)
    lower_bound = family_of_name(geometry.family).usual_lower_bound
    key = "gdn" if geometry.kind == "gdn" else "softplus" if lower_bound is None else "safe"
    median, layer_sd, head_sd, channel_sd = _EXAMPLES[key]
    shape = (geometry.num_layers, geometry.num_value_heads, geometry.units_per_head)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=rng, dtype=torch.float64)

    noise = layer_sd * normal(shape[0], 1, 1) + head_sd * normal(*shape[:2], 1) + channel_sd * normal(*shape)
    epsilon = 1e-3
    log_horizons = math.log(math.log(epsilon) / math.log(median)) + noise - noise.median()
    log_horizons = log_horizons.clamp(min=math.log(_shortest_horizon(geometry, epsilon)))
    if geometry.kind == "gdn":
        log_horizons = log_horizons.squeeze(2)
    a_s = family_of_name(geometry.family).default_gate_input
    return _gate_of_horizons(geometry, log_horizons, a_s, epsilon, rng)
