"""Rank agreement of static horizons with observed signals, and calibration of the gate input (section 3.4, A.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dasc.models.gate_parameters import GateParameters
from dasc.reference.horizons import static_horizons


class MedianIQR(NamedTuple):
    """Median and quartiles, as table 1(b) reports them.

    Attributes:
        median: the median.
        q1: first quartile.
        q3: third quartile; the interquartile range is ``[q1, q3]``.
        ignored: NaN values left out.
    """

    median: float
    q1: float
    q3: float
    ignored: int


class Calibration(NamedTuple):
    """What :func:`calibrate_gate_input` chose, and how it does on prefixes that had no part in the choice.

    Attributes:
        gate_input: the chosen ``a_s``.
        objective: of each candidate on the even-indexed prefixes, in the order given; smaller is better.
        validation: within-layer Spearman correlation of ``H_s`` at the chosen ``a_s`` with ``H_e`` on the odd-indexed
            prefixes.
    """

    gate_input: float
    objective: tuple[float, ...]
    validation: MedianIQR


def average_ranks(x: Tensor) -> Tensor:
    """Ranks from 1 along the last axis, equal values sharing the mean of their ranks; float64, the shape of ``x``.

    Raises:
        ValueError: for NaN, which has no rank.
    """
    if torch.isnan(x).any():
        raise ValueError("values to rank must not be NaN")
    values = x.contiguous()
    ordered = values.sort(dim=-1).values
    below = torch.searchsorted(ordered, values, right=False)
    up_to = torch.searchsorted(ordered, values, right=True)
    return (below + up_to + 1).double() / 2


def spearman(x: Tensor, y: Tensor) -> Tensor:
    """Spearman correlation along the last axis, with average ranks for ties.

    Args:
        x: ``[..., U]``; infinite values rank last or first.
        y: ``[..., U]``; leading axes broadcast.

    Returns:
        ``[...]`` float64 within ``[-1, 1]``; NaN where either side is constant.

    Raises:
        ValueError: for other lengths or NaN.
    """
    if x.ndim < 1 or y.ndim < 1 or x.shape[-1] != y.shape[-1]:
        raise ValueError(f"x and y must have equally many units, got {list(x.shape)} and {list(y.shape)}")
    middle = (x.shape[-1] + 1) / 2  # the mean of the ranks, ties or not
    rx, ry = average_ranks(x) - middle, average_ranks(y) - middle
    covariance = (rx * ry).sum(dim=-1)
    variances = (rx * rx).sum(dim=-1) * (ry * ry).sum(dim=-1)
    return covariance / variances.sqrt()


def within_layer_spearman(static: Tensor, observed: Tensor) -> Tensor:
    """Spearman correlation over the units of each prefix and layer; units of different layers are not pooled (A.2).

    Args:
        static: ``[L, U]``, e.g. static horizons.
        observed: ``[P, L, U]``, e.g. empirical horizons or state magnitudes.

    Returns:
        ``[P, L]`` float64; NaN where either side is constant.

    Raises:
        ValueError: for other shapes or NaN.
    """
    if static.ndim != 2 or observed.ndim != 3 or observed.shape[1:] != static.shape:
        raise ValueError(
            f"static must be [L, U] and observed [P, L, U], got {list(static.shape)} and {list(observed.shape)}"
        )
    return spearman(static, observed)


def median_iqr(values: Tensor) -> MedianIQR:
    """Median and quartiles (linear interpolation) of all values but NaN, which are counted.

    Raises:
        ValueError: when nothing but NaN is left, or a value is infinite.
    """
    flat = values.detach().double().flatten()
    kept = flat[~flat.isnan()]
    if not kept.numel() or kept.isinf().any():
        got = "infinity" if kept.numel() else f"{flat.numel()} NaN and nothing else"
        raise ValueError(f"values must hold finite numbers, got {got}")
    q1, median, q3 = np.quantile(kept.cpu().numpy(), [0.25, 0.5, 0.75])
    return MedianIQR(float(median), float(q1), float(q3), flat.numel() - kept.numel())


def calibrate_gate_input(
    params: GateParameters, observed_horizons: Tensor, candidates: Sequence[float], epsilon: float = 1e-3
) -> Calibration:
    """Choose the representative gate input ``a_s``: even-indexed prefixes choose, odd-indexed ones validate (A.2).

    The paper does not say what the choice minimises. Here it is the median of ``|ln(H_s / H_e)|`` over the even-indexed
    prefixes, layers and units: a factor too long counts as much as one too short, and a few units that never decay
    cannot sway it. Of equal candidates the smallest wins, because a larger gate input means shorter horizons, hence
    units dropped that might matter.

    Args:
        params: stored decay parameters.
        observed_horizons: ``[P, L, U]`` float64 empirical horizons (eq. 4), ``P >= 2``; computed with ``epsilon``.
        candidates: gate inputs to try, finite.
        epsilon: within ``(0, 1)``.

    Raises:
        ValueError: for other shapes or dtypes, horizons that are not positive, no candidates, or none that validates.
    """
    P, *units = observed_horizons.shape
    expected = list(params.dt_bias.flatten(1).shape)
    if observed_horizons.dtype != torch.float64 or P < 2 or units != expected:
        raise ValueError(
            f"observed_horizons must be float64 [P, L, U] with P >= 2 and [L, U] = {expected}, "
            f"got {observed_horizons.dtype} {list(observed_horizons.shape)}"
        )
    if not (observed_horizons > 0).all():
        raise ValueError("observed_horizons must be positive, got NaN, zero or negative ones")
    if not candidates:
        raise ValueError("candidates must hold a gate input, got none")
    choosing, held_out = observed_horizons[::2], observed_horizons[1::2]
    objective = tuple(_median_log_ratio(static_horizons(params, a, epsilon), choosing) for a in candidates)
    _, gate_input = min(zip(objective, candidates, strict=True))
    validation = median_iqr(within_layer_spearman(static_horizons(params, gate_input, epsilon), held_out))
    return Calibration(gate_input, objective, validation)


def _median_log_ratio(static: Tensor, observed: Tensor) -> float:
    distance = (static.log() - observed.log()).abs()
    # two infinite horizons agree; their difference is NaN
    distance = torch.where(static == observed, 0.0, distance)
    return float(np.median(distance.numpy()))
