"""What :mod:`dasc.reference` offers for serving, under the same names and signatures, fast. Forward only, no autograd.

Each function takes one argument more, ``impl``: ``"cpu"``, ``"triton"`` or ``"auto"``. :func:`chosen_impl` tells what
a call would run, by which rule, or why it cannot; nothing falls back silently.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from dasc.contract import ConvOutput, DeltaRuleOutput, DenseState, PackedState
from dasc.fast import cpu
from dasc.fast.choice import Impl, chosen_impl
from dasc.layout import Layout

__all__ = [
    "ConvOutput",
    "DeltaRuleOutput",
    "DenseState",
    "Impl",
    "PackedState",
    "beta_gate",
    "causal_conv1d",
    "chosen_impl",
    "chunk_gdn",
    "chunk_kda",
    "pack",
    "recurrent_gdn",
    "recurrent_kda",
    "safe_gate",
    "softplus_gate",
    "unpack",
]


def chunk_gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm: bool = False,
    chunk_size: int = 64,
    impl: Impl = "auto",
) -> DeltaRuleOutput:
    """Gated DeltaNet in blocks of ``chunk_size`` tokens (eq. 1 with one decay a head), for prefill.

    Computed in FP32, or in FP64 when any input is FP64. No exponential of a positive number is taken, so any
    ``g <= 0``, ``-inf`` included, is safe. Decays below 4e-35 in FP32 (for KDA, 6e-18 between tokens of one block) are
    taken for zero. Inputs may be strided and are never written to.

    Args:
        q: ``[B, T, H, K]``.
        k: ``[B, T, H, K]``.
        v: ``[B, T, HV, V]``, ``HV`` a multiple of ``H``. Value head ``h`` reads key head ``h // (HV // H)``.
        g: natural log of the decay, ``<= 0``, ``[B, T, HV]``.
        beta: update strength, ``[B, T, HV]``.
        scale: of ``q``; ``K ** -0.5`` when ``None``.
        initial_state: ``[N, HV, V, K]``; zero when ``None``.
        cu_seqlens: ``[N + 1]`` boundaries of packed sequences (then ``B = 1``).
        use_qk_l2norm: divide ``q`` and ``k`` by ``sqrt(sum(x^2) + 1e-6)`` first.
        chunk_size: tokens of a block, any number from 1; powers of two waste nothing.
        impl: ``"cpu"``, ``"triton"`` or ``"auto"`` (:func:`chosen_impl`).

    Returns:
        ``o`` ``[B, T, HV, V]`` in the dtype of ``v`` and the final state ``[N, HV, V, K]`` in the compute dtype.

    Raises:
        ValueError: as :func:`dasc.contract.check_delta_rule`, for a ``chunk_size`` below 1, or for an ``impl`` that
            cannot run.
    """
    _check_impl(impl, q)
    return cpu.chunk_gdn(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm=use_qk_l2norm,
        chunk_size=chunk_size,
    )


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm: bool = False,
    chunk_size: int = 64,
    impl: Impl = "auto",
) -> DeltaRuleOutput:
    """Kimi Delta Attention in blocks of ``chunk_size`` tokens (eq. 1), for prefill.

    As :func:`chunk_gdn`, but ``g`` is ``[B, T, HV, K]``: a decay for each key channel.

    Raises:
        ValueError: as :func:`chunk_gdn`.
    """
    _check_impl(impl, q)
    return cpu.chunk_kda(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm=use_qk_l2norm,
        chunk_size=chunk_size,
    )


def recurrent_gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm: bool = False,
    impl: Impl = "auto",
) -> DeltaRuleOutput:
    """Gated DeltaNet (eq. 1 with one decay a head), for decode: one token of each of many sequences is one step.

    More tokens a sequence are allowed and go by blocks. Arguments, results and errors as :func:`chunk_gdn`.

    Raises:
        ValueError: as :func:`chunk_gdn`.
    """
    _check_impl(impl, q)
    return cpu.recurrent_gdn(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm=use_qk_l2norm,
    )


def recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm: bool = False,
    impl: Impl = "auto",
) -> DeltaRuleOutput:
    """Kimi Delta Attention (eq. 1), for decode: one token of each of many sequences is one step.

    As :func:`recurrent_gdn`, but ``g`` is ``[B, T, HV, K]``: a decay for each key channel.

    Raises:
        ValueError: as :func:`chunk_gdn`.
    """
    _check_impl(impl, q)
    return cpu.recurrent_kda(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm=use_qk_l2norm,
    )


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
    _check_impl(impl, x)
    return cpu.causal_conv1d(x, weight, bias, initial_state=initial_state, cu_seqlens=cu_seqlens, activation=activation)


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
    _check_impl(impl, a)
    return cpu.softplus_gate(a, A_log, dt_bias)


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
    _check_impl(impl, a)
    return cpu.safe_gate(a, A_log, dt_bias, lower_bound)


def beta_gate(b: Tensor, *, allow_neg_eigval: bool = False, impl: Impl = "auto") -> Tensor:
    """Update strength ``beta = sigmoid(b)``, in FP32 or FP64.

    Args:
        b: any shape.
        allow_neg_eigval: double it, so that ``I - beta k k^T`` may have a negative eigenvalue (OLMo-Hybrid).
        impl: as in :func:`chunk_gdn`.

    Raises:
        ValueError: if ``b`` is not floating-point, or for an ``impl`` that cannot run.
    """
    _check_impl(impl, b)
    return cpu.beta_gate(b, allow_neg_eigval=allow_neg_eigval)


def pack(state: Tensor, conv: Tensor, layout: Layout, *, impl: Impl = "auto") -> PackedState:
    """Store: copy the retained units out of ``N`` dense states, exactly or as INT8 (eq. 8, appendix B).

    Omitted units are not read. The convolution rows are copied whole.

    Args:
        state: ``[L, N, HV, V, K]`` in ``layout.dtypes.temporal``, of one rank.
        conv: ``[L, N, channels, width - 1]`` in ``layout.dtypes.conv``.
        layout: of that rank; its slot must have room for every unit that it retains.
        impl: as in :func:`chunk_gdn`.

    Raises:
        ValueError: as :func:`dasc.contract.check_pack`, for retained units that INT8 cannot store (NaN or infinity), or
            for an ``impl`` that cannot run.
    """
    _check_impl(impl, state)
    return cpu.pack(state, conv, layout)


def unpack(packed: PackedState, layout: Layout, base: Tensor | None = None, *, impl: Impl = "auto") -> DenseState:
    """Load: put the retained units back into ``N`` dense states (section 4.2).

    Args:
        packed: from :func:`pack` with the same layout.
        layout: of this rank.
        base: ``[L, N, HV, V, K]`` in ``layout.dtypes.temporal``. The omitted units are zero without it (NR) and taken
            from it when given (WR: the refreshed state). It is not written to.
        impl: as in :func:`chunk_gdn`.

    Raises:
        ValueError: as :func:`dasc.contract.check_unpack`, or for an ``impl`` that cannot run.
    """
    _check_impl(impl, packed.temporal)
    return cpu.unpack(packed, layout, base)


def _check_impl(impl: Impl, like: Tensor) -> None:
    """Raise unless ``impl`` can run where ``like`` is. What is no tensor is for the function's own checks to refuse."""
    chosen_impl(impl, like.device if isinstance(like, Tensor) else torch.device("cpu"))
