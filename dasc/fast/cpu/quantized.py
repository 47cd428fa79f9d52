"""Units to codes and back on the CPU (eq. 8)."""

from __future__ import annotations

import torch
from torch import Tensor

from dasc.contract import MIN_ABSMAX, QMAX
from dasc.geometry import Quantization


def quantize(values: Tensor, v_dim: int, quantized: Quantization) -> tuple[Tensor, Tensor]:
    """Eq. 8: ``s = max(max_v |S|, 1e-8) / QMAX`` and ``q = clip(round(S / s))``, in FP32.

    What shares a scale with NaN or infinity gets ``q = 0`` and a scale of NaN.

    Args:
        values: units, floating point.
        v_dim: their ``V`` axis.
        quantized: as what.

    Returns:
        Codes as they are stored, and scales in the dtype of the values, without the ``V`` axis.
    """
    qmax, exact = QMAX[quantized], values.float()
    absmax = exact.abs().amax(dim=v_dim, keepdim=True)
    step = torch.where(absmax.isfinite(), absmax.clamp(min=MIN_ABSMAX) / qmax, torch.nan)
    codes = (exact / step).round_().clamp_(-qmax, qmax).nan_to_num_(nan=0.0).to(torch.int8)
    if quantized == "int4":
        low, high = codes.view(torch.uint8).chunk(2, dim=v_dim)
        codes = (low & 15) | (high << 4)
    return codes, step.squeeze(v_dim).to(values.dtype)


def dequantize(stored: Tensor, scales: Tensor, v_dim: int, quantized: Quantization) -> Tensor:
    """``q * s`` in the dtype of the scales, of what :func:`quantize` returned."""
    if quantized == "int4":
        signed = stored.view(torch.int8)
        stored = torch.cat([signed << 4 >> 4, signed >> 4], dim=v_dim)
    return stored.to(scales.dtype) * scales.unsqueeze(v_dim)
