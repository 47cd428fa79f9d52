"""The recurrences over a pool of states, as a server runs them: in place, by slot, gates and refresh included.

One sequence after another, each as the public recurrences define it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dasc.contract import DecayGate, DeltaRuleOutput, RefreshMerge, check_pooled, compute_dtype, sequence_spans
from dasc.reference.chunk import chunk_gdn, chunk_kda
from dasc.reference.gates import beta_gate, safe_gate, softplus_gate


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

    Returns:
        ``o`` ``[B, T, HV, V]`` in the dtype of ``v``, of replayed tokens too.

    Raises:
        ValueError: as :func:`dasc.contract.check_pooled`.
    """
    return _prefill(
        chunk_gdn, q, k, v, g, beta, pool, state_indices, gate, scale, cu_seqlens, use_qk_l2norm, chunk_size, refresh
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
) -> Tensor:
    """Kimi Delta Attention over pooled states; as :func:`prefill_gdn`, but ``g`` is ``[B, T, HV, K]``.

    Raises:
        ValueError: as :func:`dasc.contract.check_pooled`.
    """
    return _prefill(
        chunk_kda, q, k, v, g, beta, pool, state_indices, gate, scale, cu_seqlens, use_qk_l2norm, chunk_size, refresh
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

    Returns:
        ``o`` ``[N, 1, HV, V]`` in the dtype of ``v``.

    Raises:
        ValueError: as :func:`dasc.contract.check_pooled`, or for more than one token a sequence.
    """
    return _prefill(
        chunk_gdn, q, k, v, g, beta, pool, state_indices, gate, scale, None, use_qk_l2norm, 1, None, one_token=True
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
) -> Tensor:
    """One token of Kimi Delta Attention for each of ``N`` sequences; as :func:`decode_gdn`, ``g`` ``[N, 1, HV, K]``.

    Raises:
        ValueError: as :func:`decode_gdn`.
    """
    return _prefill(
        chunk_kda, q, k, v, g, beta, pool, state_indices, gate, scale, None, use_qk_l2norm, 1, None, one_token=True
    )


def _prefill(
    recurrence: Callable[..., DeltaRuleOutput],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    state_indices: Tensor,
    gate: DecayGate | None,
    scale: float | None,
    cu_seqlens: Tensor | None,
    use_qk_l2norm: bool,
    chunk_size: int,
    refresh: RefreshMerge | None,
    one_token: bool = False,
) -> Tensor:
    shape = check_pooled(
        q,
        k,
        v,
        g,
        beta,
        pool,
        state_indices,
        channel_gate=recurrence is chunk_kda,
        gate=gate,
        cu_seqlens=cu_seqlens,
        refresh=refresh,
        one_token=one_token,
    )
    if gate is not None:
        if gate.lower_bound is None:
            g = softplus_gate(g, gate.A_log, gate.dt_bias)
        else:
            g = safe_gate(g, gate.A_log, gate.dt_bias, gate.lower_bound)
        beta = beta_gate(beta, allow_neg_eigval=gate.allow_neg_eigval)
    dtype = compute_dtype(q, k, v, g, beta, pool)
    rows = [x.flatten(0, 1) for x in (q, k, v, g, beta)]
    starts, lengths = sequence_spans(shape.B, shape.T, cu_seqlens, q.device)
    o = v.new_empty(shape.B * shape.T, shape.HV, shape.V)

    def run(begin: int, end: int, state: Tensor) -> Tensor:
        """Tokens ``[begin, end)`` from ``state``; the state after them."""
        out = recurrence(
            *(x[None, begin:end] for x in rows),
            scale=scale,
            initial_state=state[None],
            use_qk_l2norm=use_qk_l2norm,
            chunk_size=chunk_size,
        )
        o[begin:end] = out.o[0]
        return out.final_state[0]

    for n, slot in enumerate(state_indices.tolist()):
        begin, end = int(starts[n]), int(starts[n] + lengths[n])
        state = torch.zeros(shape.HV, shape.V, shape.K, dtype=dtype, device=q.device)
        stored = pool[slot].to(dtype) if slot >= 0 else state
        replay = 0 if refresh is None else int(refresh.tokens[n])
        if refresh is None or replay == 0:
            state = stored
        else:
            replayed = run(begin, begin + replay, state)
            keep = refresh.keep.view(shape.HV, 1, -1)  # [HV, 1, 1] for heads, [HV, 1, K] for key channels
            state = torch.where(keep, stored, replayed)
        state = run(begin + replay, end, state)
        if slot >= 0:
            pool[slot] = state.to(pool.dtype)
    return o.view(v.shape)
