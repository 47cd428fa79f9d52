"""Symmetric integer codes of the temporal state (eq. 8, appendix E.1)."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dasc.contract import MIN_ABSMAX, QMAX


class Quantized(NamedTuple):
    """``values ~= q * scales``, scales broadcast over the value axis.

    Attributes:
        q: int8, the shape of the values, within ``[-qmax, qmax]``.
        scales: the dtype of the values and their shape without the value axis.
    """

    q: Tensor
    scales: Tensor


def quantize(
    values: Tensor, v_dim: int, *, broken: Literal["raise", "nan"] = "raise", qmax: int = QMAX["int8"]
) -> Quantized:
    """Quantise with one scale for each ``(layer, head, k)``, shared over ``V`` (eq. 8).

    ``s = max(max_v |S|, 1e-8) / 127`` and ``q = clip(round(S / s), -127, 127)`` in FP32, halves rounded to even. The
    error is at most ``s / 2`` when the values are FP32; a source dtype that cannot hold ``s`` exactly adds the rounding
    of ``s``.

    Args:
        values: temporal state or packed units, floating point, finite in FP32.
        v_dim: its ``V`` axis: ``-2`` for ``[..., V, K]``, ``-1`` for packed KDA channels ``[..., V]``.
        broken: what becomes of values that share a scale with NaN or infinity: an error, or ``q = 0`` and a scale of
            NaN, so that they load as NaN.
        qmax: the largest code, in place of 127; 7 in INT4 (:mod:`dasc.reference.int4`).

    Raises:
        ValueError: for values of another dtype, or NaN or infinity unless ``broken`` is ``"nan"``: no scale stores
            them, and saturating would hide a broken state.
    """
    if not values.is_floating_point():
        raise ValueError(f"values must be floating point, got {values.dtype}")
    state = values.float()
    finite = torch.isfinite(state).all(dim=v_dim, keepdim=True)
    if broken == "raise" and not finite.all():
        raise ValueError("values must be finite in float32 to be quantised, got NaN or infinity")
    absmax = state.abs().amax(dim=v_dim, keepdim=True)
    scales = torch.where(finite, absmax.clamp(min=MIN_ABSMAX) / qmax, torch.nan)
    q = torch.where(finite, torch.round(state / scales).clamp(-qmax, qmax), 0)
    return Quantized(q.to(torch.int8), scales.squeeze(v_dim).to(values.dtype))


def dequantize(q: Tensor, scales: Tensor, v_dim: int) -> Tensor:
    """``S_hat = q * s`` in the dtype of the scales, which is the temporal state's own.

    Args:
        q: int8.
        scales: floating point, shaped as ``q`` without ``v_dim``.
        v_dim: as in :func:`quantize`.

    Raises:
        ValueError: for other dtypes or shapes.
    """
    if q.dtype != torch.int8 or not scales.is_floating_point():
        raise ValueError(f"q must be int8 and scales floating point, got {q.dtype} and {scales.dtype}")
    per_value = scales.unsqueeze(v_dim)
    expected = list(q.shape)
    expected[v_dim] = 1
    if list(per_value.shape) != expected:
        raise ValueError(
            f"scales must have the shape of q without axis {v_dim}: q {list(q.shape)}, got {list(scales.shape)}"
        )
    return q.to(scales.dtype) * per_value
