r"""How many bits each unit is worth under a byte budget, from its horizon and its magnitude.

A unit's error ``E`` at the boundary decays with the unit, ``|E_t| ~ alpha_s^t |E|`` with ``alpha_s = epsilon^(1/H_s)``.
(What the delta rule takes from it besides is left out.) Every token of the continuation reads the state, so over the
``T`` tokens that follow the expected squared error of what is read, up to what all units have in common, is

    |E|^2 sum_{t=1..T} alpha_s^(2t).

Stored with ``b`` bits, ``|E|^2 = rho(b) M_S^2`` where ``M_S`` is the unit's magnitude (eq. 5) and ``rho`` does not
depend on the unit: 1 for a dropped unit, and what quantisation adds otherwise. So each unit has an importance
``M_S^2 sum_t alpha_s^(2t)`` and the modelled cost of an allocation is ``sum_u importance_u rho(b_u)``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from dasc.geometry import StateGeometry
from dasc.reference.bits import BITS, pack_bits, unit_bytes, unpack_bits

_NORMAL_HEADS = 64
_SEED = 0


@cache
def relative_errors(geometry: StateGeometry) -> dict[int, float]:
    """``rho(b)``: expected squared error over squared magnitude of a unit stored with ``b`` bits.

    Measured on FP32 units whose elements are independent and normal, drawn from a fixed seed.

    Args:
        geometry: whose units they are.

    Returns:
        By bits; 1 for none, 0 for 32.
    """
    like = StateGeometry("normal", geometry.kind, 1, (0,), _NORMAL_HEADS, 1, geometry.head_v_dim, geometry.head_k_dim)
    generator = torch.Generator().manual_seed(_SEED)
    state = torch.randn(1, 1, _NORMAL_HEADS, geometry.head_v_dim, geometry.head_k_dim, generator=generator)
    errors = {}
    for width in BITS:
        bits = torch.full((1, like.units_per_layer), width)
        off = unpack_bits(pack_bits(state, bits, like), bits, like) - state
        errors[width] = float(off.double().square().sum() / state.double().square().sum())
    return errors


def decayed_tokens(horizons: Tensor, tokens: int, epsilon: float = 1e-3) -> Tensor:
    """``sum_{t=0..tokens-1} alpha_s^(2t)``: how many tokens' worth of squares a unit holds after so many.

    Args:
        horizons: float64, tokens, positive; ``inf`` never decays.
        tokens: at least 1.
        epsilon: of the horizons.

    Returns:
        Shaped as ``horizons``, within ``[1, tokens]``.

    Raises:
        ValueError: for other horizons, tokens or epsilon.
    """
    if horizons.dtype != torch.float64 or not (horizons > 0).all():
        raise ValueError("horizons must be float64 and positive")
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1, got {tokens}")
    if not 0 < epsilon < 1:
        raise ValueError(f"epsilon must be within (0, 1), got {epsilon}")
    rate = 2 * math.log(epsilon) / horizons
    return torch.where(rate < 0, torch.expm1(rate * tokens) / torch.expm1(rate), float(tokens))


def expected_magnitudes(horizons: Tensor, prefix_tokens: int, epsilon: float = 1e-3) -> Tensor:
    """Magnitudes from horizons alone: each token writes as much into every unit, in a direction of its own.

    Args:
        horizons: ``[L, U]`` float64, tokens.
        prefix_tokens: length of the prefix.
        epsilon: of the horizons.

    Returns:
        Float64, up to a factor that all units have in common.

    Raises:
        ValueError: as :func:`decayed_tokens`.
    """
    return decayed_tokens(horizons, prefix_tokens, epsilon).sqrt()


def head_shares(magnitudes: Tensor, geometry: StateGeometry) -> Tensor:
    """Magnitudes over their head's: a head's output is normalised, so that only errors relative to its state count.

    Args:
        magnitudes: ``[L, U]`` float64.
        geometry: of the model.

    Returns:
        Shaped as ``magnitudes``; squares sum to 1 in each head, or are 0 in a head of zeros. All 1 for GDN, whose unit
        is the head.
    """
    of_head = magnitudes.view(geometry.num_layers, geometry.num_value_heads, geometry.units_per_head)
    return torch.nn.functional.normalize(of_head, dim=2).flatten(1)


def unit_importance(horizons: Tensor, magnitudes: Tensor, use_tokens: int, epsilon: float = 1e-3) -> Tensor:
    """``M_S^2 sum_{t=1..T} alpha_s^(2t)``: what dropping a unit costs, see the head of this module.

    Args:
        horizons: ``[L, U]`` float64, tokens.
        magnitudes: ``[L, U]`` float64, root mean square of ``M_S`` over calibration prefixes, :func:`head_shares` of
            it, or :func:`expected_magnitudes`.
        use_tokens: ``T``, tokens after the hit that count.
        epsilon: of the horizons.

    Raises:
        ValueError: as :func:`decayed_tokens`, or magnitudes that are not shaped so, negative or not finite.
    """
    if magnitudes.dtype != torch.float64 or magnitudes.shape != horizons.shape:
        raise ValueError(
            f"magnitudes must be float64 {list(horizons.shape)}, got {magnitudes.dtype} {list(magnitudes.shape)}"
        )
    if not ((magnitudes >= 0) & torch.isfinite(magnitudes)).all():
        raise ValueError("magnitudes must be finite and not negative")
    first = torch.exp(2 * math.log(epsilon) / horizons)
    return magnitudes.square() * first * decayed_tokens(horizons, use_tokens, epsilon)


def modelled_cost(importance: Tensor, bits: Tensor, geometry: StateGeometry) -> float:
    """``sum_u importance_u rho(b_u)`` of an allocation."""
    errors = relative_errors(geometry)
    return sum(float(importance[bits == width].sum()) * error for width, error in errors.items())


def allocate_bits(
    importance: Tensor,
    budget_bytes: int,
    geometry: StateGeometry,
    *,
    widths: Sequence[int] = BITS,
    temporal: torch.dtype = torch.float32,
) -> Tensor:
    """Bits of each unit, of least modelled cost within a byte budget, nearly.

    Greedy: the step of a unit to its next width that saves most for its bytes comes first, and one that does not fit is
    left out with what follows it in its unit. Only widths on the convex hull of bytes and errors are used. The cost is
    above the least by no more than what the first step left out would save, it is the least where the steps before
    that one spend the budget, and a larger budget never costs more.

    Args:
        importance: ``[L, U]`` float64, as :func:`unit_importance`.
        budget_bytes: most stored bytes of a temporal state, scales included.
        geometry: of the model.
        widths: out of :data:`~dasc.reference.bits.BITS`, with 0: ``(0, 32)`` keeps or drops.
        temporal: dtype of the state.

    Returns:
        ``[L, U]`` int64.

    Raises:
        ValueError: for importance of another shape or dtype, negative or not finite, a negative budget, or widths
            without 0.
    """
    expected = [geometry.num_layers, geometry.units_per_layer]
    if importance.dtype != torch.float64 or list(importance.shape) != expected:
        raise ValueError(f"importance must be float64 {expected}, got {importance.dtype} {list(importance.shape)}")
    if not ((importance >= 0) & torch.isfinite(importance)).all():
        raise ValueError("importance must be finite and not negative")
    if budget_bytes < 0:
        raise ValueError(f"budget_bytes must not be negative, got {budget_bytes}")
    if 0 not in widths:
        raise ValueError(f"widths must have 0 among them, got {tuple(widths)}")
    errors = relative_errors(geometry)
    hull = _hull([(unit_bytes(geometry, width, temporal), errors[width], width) for width in sorted(set(widths))])
    size = [after[0] - before[0] for before, after in itertools.pairwise(hull)]
    saving = [_saving(before, after) for before, after in itertools.pairwise(hull)]
    steps = len(size)
    order = torch.argsort(
        (importance.flatten()[:, None] * torch.tensor(saving, dtype=torch.float64)).flatten(),
        descending=True,
        stable=True,
    )
    taken = [0] * geometry.num_units
    left = budget_bytes
    for number in order.tolist():
        unit, step = divmod(number, steps)
        if taken[unit] == step and size[step] <= left:
            taken[unit] += 1
            left -= size[step]
    return torch.tensor([hull[step][2] for step in taken]).view(expected)


def _hull(points: Sequence[tuple[int, float, int]]) -> list[tuple[int, float, int]]:
    """Lower convex hull of ``(bytes, error, width)``: what each further byte saves falls from step to step."""
    hull: list[tuple[int, float, int]] = []
    for point in sorted(points):
        if hull and point[1] >= hull[-1][1]:
            continue  # more bytes for nothing
        while len(hull) > 1 and _saving(hull[-1], point) >= _saving(hull[-2], hull[-1]):
            hull.pop()
        hull.append(point)
    return hull


def _saving(before: tuple[int, float, int], after: tuple[int, float, int]) -> float:
    return (before[1] - after[1]) / (after[0] - before[0])
