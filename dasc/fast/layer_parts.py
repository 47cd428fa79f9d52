"""What surrounds the recurrence in a layer: the gates and the short convolution."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from dasc.contract import ConvOutput
from dasc.fast.choice import Impl, implementation


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: Literal["silu"] | None = "silu",
    impl: Impl = "auto",
) -> ConvOutput:
    """Each channel by itself: ``y_t = act(bias + sum_i weight_i x_{t - (width - 1) + i})``.

    Inputs before the first token are the rows of the state; a sequence shorter than ``width - 1`` keeps some of them.

    Args:
        x: ``[B, T, channels]``.
        weight: ``[channels, width]``; the last tap is the current token's.
        bias: ``[channels]``; zero when ``None``.
        initial_state: ``[N, channels, width - 1]``, oldest row first; zero when ``None``.
        cu_seqlens: ``[N + 1]`` boundaries of packed sequences (then ``B = 1``).
        activation: ``"silu"`` or ``None``.
        impl: as in :func:`chunk_gdn`.

    Returns:
        ``y`` ``[B, T, channels]`` in the dtype of ``x`` and the last rows ``[N, channels, width - 1]`` in the compute
        dtype.

    Raises:
        ValueError: as :func:`dasc.contract.check_conv`, or for an ``impl`` that cannot run.
    """
    return implementation(impl, x).causal_conv1d(
        x, weight, bias, initial_state=initial_state, cu_seqlens=cu_seqlens, activation=activation
    )


def softplus_gate(a: Tensor, A_log: Tensor, dt_bias: Tensor, *, impl: Impl = "auto") -> Tensor:
    """``g = -exp(A_log) * softplus(a + dt_bias)``, the standard gate of eq. 2 (Qwen3-Next, Kimi-Linear).

    Args:
        a: gate input, ``[..., HV]`` (GDN) or ``[..., HV, K]`` (KDA), or one value for all units (no axes).
        A_log: ``[HV]``, or ``[L, HV]`` for all layers at once.
        dt_bias: as ``A_log`` (GDN), or with a last axis ``K`` (KDA: a bias for each channel).
        impl: as in :func:`chunk_gdn`.

    Returns:
        Natural log of the decay, ``<= 0``, with the axes of ``a`` (of ``dt_bias`` for a single value), in FP32 or FP64.
        It is ``-inf`` only where ``g`` overflows its dtype.

    Raises:
        ValueError: as :func:`dasc.contract.check_gate`, or for an ``impl`` that cannot run.
    """
    return implementation(impl, a).softplus_gate(a, A_log, dt_bias)


def safe_gate(a: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float, *, impl: Impl = "auto") -> Tensor:
    """``g = lower_bound * sigmoid(exp(A_log) * (a + dt_bias))``, the bounded gate of eq. 2 (Kimi-K3).

    Args:
        a: as in :func:`softplus_gate`.
        A_log: as in :func:`softplus_gate`.
        dt_bias: as in :func:`softplus_gate`.
        lower_bound: the least ``g``, negative and finite; -5 in Kimi-K3.
        impl: as in :func:`chunk_gdn`.

    Returns:
        Natural log of the decay in ``[lower_bound, 0]``, shape and dtype as in :func:`softplus_gate`.

    Raises:
        ValueError: as :func:`softplus_gate`, or for a wrong ``lower_bound``.
    """
    return implementation(impl, a).safe_gate(a, A_log, dt_bias, lower_bound)


def beta_gate(b: Tensor, *, allow_neg_eigval: bool = False, impl: Impl = "auto") -> Tensor:
    """Update strength ``beta = sigmoid(b)``, in FP32 or FP64.

    Args:
        b: any shape.
        allow_neg_eigval: double it, so that ``I - beta k k^T`` may have a negative eigenvalue (OLMo-Hybrid).
        impl: as in :func:`chunk_gdn`.

    Raises:
        ValueError: if ``b`` is not floating-point, or for an ``impl`` that cannot run.
    """
    return implementation(impl, b).beta_gate(b, allow_neg_eigval=allow_neg_eigval)
