"""The recurrences, token by token and by blocks."""

from __future__ import annotations

from torch import Tensor

from dasc.contract import DeltaRuleOutput
from dasc.fast.choice import Impl, implementation


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
    return implementation(impl, q).chunk_gdn(
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
    return implementation(impl, q).chunk_kda(
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
    return implementation(impl, q).recurrent_gdn(
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
    return implementation(impl, q).recurrent_kda(
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
