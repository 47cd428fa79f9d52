"""The recurrences over a pool of states, as a server runs them: in place, by slot, gates and refresh included."""

from __future__ import annotations

from torch import Tensor

from dasc.contract import DecayGate, RefreshMerge
from dasc.fast.choice import Impl, implementation


def prefill_gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    state_indices: Tensor,
    *,
    gate: DecayGate | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm: bool = False,
    chunk_size: int = 64,
    refresh: RefreshMerge | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Gated DeltaNet over pooled states: each sequence starts from its slot and leaves its final state there.

    Computed in the compute dtype of inputs and pool, cast to the pool's dtype when written. Slots that no index names
    are neither read nor written.

    Args:
        q: ``[B, T, H, K]``.
        k: ``[B, T, H, K]``.
        v: ``[B, T, HV, V]``.
        g: natural log of the decay, ``<= 0``, ``[B, T, HV]``; the raw gate input when ``gate`` is given.
        beta: update strength, ``[B, T, HV]``; its raw logit when ``gate`` is given.
        pool: ``[S, HV, V, K]`` in any strides; written to.
        state_indices: ``[N]`` integers, a slot for each sequence, no slot twice. ``-1``: the sequence starts from zero
            and its final state is dropped.
        gate: the layer's gates, to be computed here.
        scale: of ``q``; ``K ** -0.5`` when ``None``.
        cu_seqlens: ``[N + 1]`` boundaries of packed sequences (then ``B = 1``).
        use_qk_l2norm: divide ``q`` and ``k`` by ``sqrt(sum(x^2) + 1e-6)`` first.
        chunk_size: tokens of a block.
        refresh: replay at the head of the sequences, merged with the pool's state.
        impl: as in :func:`dasc.fast.chunk_gdn`.

    Returns:
        ``o`` ``[B, T, HV, V]`` in the dtype of ``v``, of replayed tokens too.

    Raises:
        ValueError: as :func:`dasc.contract.check_pooled`, or for an ``impl`` that cannot run.
    """
    return implementation(impl, q).prefill_gdn(
        q,
        k,
        v,
        g,
        beta,
        pool,
        state_indices,
        gate=gate,
        scale=scale,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm=use_qk_l2norm,
        chunk_size=chunk_size,
        refresh=refresh,
    )


def prefill_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    state_indices: Tensor,
    *,
    gate: DecayGate | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm: bool = False,
    chunk_size: int = 64,
    refresh: RefreshMerge | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Kimi Delta Attention over pooled states; as :func:`prefill_gdn`, but ``g`` is ``[B, T, HV, K]``.

    Raises:
        ValueError: as :func:`dasc.contract.check_pooled`, or for an ``impl`` that cannot run.
    """
    return implementation(impl, q).prefill_kda(
        q,
        k,
        v,
        g,
        beta,
        pool,
        state_indices,
        gate=gate,
        scale=scale,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm=use_qk_l2norm,
        chunk_size=chunk_size,
        refresh=refresh,
    )


def decode_gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    state_indices: Tensor,
    *,
    gate: DecayGate | None = None,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    impl: Impl = "auto",
) -> Tensor:
    """One token of Gated DeltaNet for each of ``N`` sequences, states in place.

    Args:
        q: ``[N, 1, H, K]``; all else as in :func:`prefill_gdn` with ``T = 1``.
        k: ``[N, 1, H, K]``.
        v: ``[N, 1, HV, V]``.
        g: ``[N, 1, HV]``.
        beta: ``[N, 1, HV]``.
        pool: ``[S, HV, V, K]`` in any strides; written to.
        state_indices: ``[N]``; ``-1``: padding, which starts from zero and is dropped.
        gate: the layer's gates, to be computed here.
        scale: of ``q``.
        use_qk_l2norm: as in :func:`prefill_gdn`.
        impl: as in :func:`dasc.fast.chunk_gdn`.

    Returns:
        ``o`` ``[N, 1, HV, V]`` in the dtype of ``v``.

    Raises:
        ValueError: as :func:`dasc.contract.check_pooled`, for more than one token a sequence, or for an
            ``impl`` that cannot run.
    """
    return implementation(impl, q).decode_gdn(
        q,
        k,
        v,
        g,
        beta,
        pool,
        state_indices,
        gate=gate,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm,
    )


def decode_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    state_indices: Tensor,
    *,
    gate: DecayGate | None = None,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    impl: Impl = "auto",
) -> Tensor:
    """One token of Kimi Delta Attention for each of ``N`` sequences; as :func:`decode_gdn`, ``g`` ``[N, 1, HV, K]``.

    Raises:
        ValueError: as :func:`decode_gdn`.
    """
    return implementation(impl, q).decode_kda(
        q,
        k,
        v,
        g,
        beta,
        pool,
        state_indices,
        gate=gate,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm,
    )
