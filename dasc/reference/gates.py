"""The decay gates of eq. 2 and the update strength, in FP32 or better and defined for every finite input.

The recurrences use them per token; static horizons use the same functions in FP64 with one representative input.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dasc.contract import check_gate, compute_dtype


def softplus_gate(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """``g = -exp(A_log) * softplus(a + dt_bias)``, the standard gate of eq. 2 (Qwen3-Next, Kimi-Linear).

    Args:
        a: gate input, ``[..., HV]`` (GDN) or ``[..., HV, K]`` (KDA), or one value for all units (no axes).
        A_log: ``[HV]``, or ``[L, HV]`` for all layers at once.
        dt_bias: as ``A_log`` (GDN), or with a last axis ``K`` (KDA: a bias for each channel).

    Returns:
        Natural log of the decay, ``<= 0``, with the axes of ``a`` (of ``dt_bias`` for a single value), in FP32 or FP64.
        It is ``-inf`` only where ``g`` overflows its dtype.

    Raises:
        ValueError: for tensors that are not floating-point or do not fit together.
    """
    x, log_rate = _gate_input(a, A_log, dt_bias)
    rate = log_rate.exp()
    softplus = torch.logaddexp(x, x.new_zeros(()))  # torch's softplus drops exp(-x) above 20, too coarse in FP64
    log_softplus = torch.where(x < -40, x, softplus.log())
    return -torch.where(_normal(rate) & _normal(softplus), rate * softplus, (log_rate + log_softplus).exp())


def safe_gate(a: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """``g = lower_bound * sigmoid(exp(A_log) * (a + dt_bias))``, the bounded gate of eq. 2 (Kimi-K3).

    Args:
        a: as in :func:`softplus_gate`.
        A_log: as in :func:`softplus_gate`.
        dt_bias: as in :func:`softplus_gate`.
        lower_bound: the least ``g``, negative and finite; -5 in Kimi-K3.

    Returns:
        Natural log of the decay in ``[lower_bound, 0]``, shape and dtype as in :func:`softplus_gate`.

    Raises:
        ValueError: as :func:`softplus_gate`, or for a wrong ``lower_bound``.
    """
    if not (math.isfinite(lower_bound) and lower_bound < 0):
        raise ValueError(f"lower_bound must be negative and finite, got {lower_bound}")
    x, log_rate = _gate_input(a, A_log, dt_bias)
    rate = log_rate.exp()
    product = torch.where(_normal(rate), rate * x, x.sign() * (log_rate + x.abs().log()).exp())
    return lower_bound * product.sigmoid()


def beta_gate(b: Tensor, *, allow_neg_eigval: bool = False) -> Tensor:
    """Update strength ``beta = sigmoid(b)``, in FP32 or FP64.

    Args:
        b: any shape.
        allow_neg_eigval: double it, so that ``I - beta k k^T`` may have a negative eigenvalue (OLMo-Hybrid).

    Raises:
        ValueError: if ``b`` is not floating-point.
    """
    if not b.is_floating_point():
        raise ValueError(f"b must be a floating-point tensor, got {b.dtype}")
    beta = b.to(compute_dtype(b)).sigmoid()
    return 2 * beta if allow_neg_eigval else beta


def _gate_input(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """``a + dt_bias`` and ``A_log``, checked, in the compute dtype, with axes that broadcast."""
    check_gate(a, A_log, dt_bias)
    dtype = compute_dtype(a, A_log, dt_bias)
    log_rate = A_log if dt_bias.ndim == A_log.ndim else A_log.unsqueeze(-1)
    return a.to(dtype) + dt_bias.to(dtype), log_rate.to(dtype)


def _normal(x: Tensor) -> Tensor:
    """Where ``x >= 0`` neither overflowed nor lost digits to underflow: a product with it is then accurate."""
    return x.isfinite() & (x >= torch.finfo(x.dtype).tiny)
