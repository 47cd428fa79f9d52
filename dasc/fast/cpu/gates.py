"""The decay gates of eq. 2 in a few passes over the gate input, defined for every finite input."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dasc.contract import check_gate, compute_dtype


@torch.no_grad()
def softplus_gate(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """``g = -exp(A_log) * softplus(a + dt_bias)``; see :func:`dasc.fast.softplus_gate`."""
    x, log_rate = _gate_input(a, A_log, dt_bias)
    root = _root_of_rate(log_rate)
    info = torch.finfo(x.dtype)
    # torch's softplus gives x itself above the threshold: there ln(1 + exp(-x)) is below half an ulp of x
    g = torch.nn.functional.softplus(x, threshold=-math.log(info.eps)).mul_(root).mul_(-root)
    # far below, softplus(x) = exp(x) loses its digits to underflow before a large rate can restore them
    low = 0.7 * math.log(info.tiny)
    if not bool((x >= low).all()):
        g = torch.where(x < low, -(log_rate + x).exp(), g)
    return g


@torch.no_grad()
def safe_gate(a: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """``g = lower_bound * sigmoid(exp(A_log) * (a + dt_bias))``; see :func:`dasc.fast.safe_gate`."""
    if not (math.isfinite(lower_bound) and lower_bound < 0):
        raise ValueError(f"lower_bound must be negative and finite, got {lower_bound}")
    x, log_rate = _gate_input(a, A_log, dt_bias)
    root = _root_of_rate(log_rate)
    return x.mul_(root).mul_(root).sigmoid_().mul_(lower_bound)


@torch.no_grad()
def beta_gate(b: Tensor, *, allow_neg_eigval: bool = False) -> Tensor:
    """``beta = sigmoid(b)``, or twice that; see :func:`dasc.fast.beta_gate`."""
    if not b.is_floating_point():
        raise ValueError(f"b must be a floating-point tensor, got {b.dtype}")
    beta = b.to(compute_dtype(b)).sigmoid()
    return beta.mul_(2) if allow_neg_eigval else beta


def _gate_input(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """``a + dt_bias``, a new tensor, and ``A_log``, checked, in the compute dtype, with axes that broadcast."""
    check_gate(a, A_log, dt_bias)
    dtype = compute_dtype(a, A_log, dt_bias)
    log_rate = A_log if dt_bias.ndim == A_log.ndim else A_log.unsqueeze(-1)
    return a.to(dtype) + dt_bias.to(dtype), log_rate.to(dtype)


def _root_of_rate(log_rate: Tensor) -> Tensor:
    """``sqrt(exp(A_log))``, kept from zero and infinity: multiplied with twice, only the product meets either."""
    info = torch.finfo(log_rate.dtype)
    return (log_rate / 2).exp().clamp(min=info.tiny * info.eps, max=info.max)
