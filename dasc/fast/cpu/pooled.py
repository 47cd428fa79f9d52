"""The recurrences over a pool of states on the CPU: gather the slots, run all sequences together, write them back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from dasc.contract import DecayGate, DeltaRuleOutput, RefreshMerge, check_pooled, compute_dtype, sequence_spans
from dasc.fast.cpu.delta_rule import chunk_gdn, chunk_kda, recurrent_gdn, recurrent_kda
from dasc.fast.cpu.gates import beta_gate, safe_gate, softplus_gate


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
    """Gated DeltaNet over pooled states; see :func:`dasc.fast.prefill_gdn`."""
    run = partial(chunk_gdn, scale=scale, use_qk_l2norm=use_qk_l2norm, chunk_size=chunk_size)
    return _pooled(run, q, k, v, g, beta, pool, state_indices, False, gate, cu_seqlens=cu_seqlens, refresh=refresh)


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
    """Kimi Delta Attention over pooled states; see :func:`dasc.fast.prefill_kda`."""
    run = partial(chunk_kda, scale=scale, use_qk_l2norm=use_qk_l2norm, chunk_size=chunk_size)
    return _pooled(run, q, k, v, g, beta, pool, state_indices, True, gate, cu_seqlens=cu_seqlens, refresh=refresh)


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
    """One token of Gated DeltaNet a sequence; see :func:`dasc.fast.decode_gdn`."""
    run = partial(recurrent_gdn, scale=scale, use_qk_l2norm=use_qk_l2norm)
    return _pooled(run, q, k, v, g, beta, pool, state_indices, False, gate, one_token=True)


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
    """One token of Kimi Delta Attention a sequence; see :func:`dasc.fast.decode_kda`."""
    run = partial(recurrent_kda, scale=scale, use_qk_l2norm=use_qk_l2norm)
    return _pooled(run, q, k, v, g, beta, pool, state_indices, True, gate, one_token=True)


@torch.no_grad()
def _pooled(
    run: Callable[..., DeltaRuleOutput],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    state_indices: Tensor,
    channel_gate: bool,
    gate: DecayGate | None,
    *,
    cu_seqlens: Tensor | None = None,
    refresh: RefreshMerge | None = None,
    one_token: bool = False,
) -> Tensor:
    check_pooled(
        q,
        k,
        v,
        g,
        beta,
        pool,
        state_indices,
        channel_gate=channel_gate,
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
    has_slot = state_indices >= 0
    slots = state_indices[has_slot]
    stored = pool.new_zeros(len(state_indices), *pool.shape[1:], dtype=compute_dtype(q, k, v, g, beta, pool))
    stored[has_slot] = pool[slots].to(stored.dtype)
    if refresh is None or not bool(refresh.tokens.any()):
        o, final_state = run(q, k, v, g, beta, initial_state=stored, cu_seqlens=cu_seqlens)
    else:
        starts, lengths = sequence_spans(q.shape[0], q.shape[1], cu_seqlens, q.device)
        rows = [x.flatten(0, 1) for x in (q, k, v, g, beta)]
        o = torch.empty_like(v, memory_format=torch.contiguous_format)

        def part(first: Tensor, tokens: Tensor, state: Tensor) -> Tensor:
            """The ``tokens[n]`` rows of each sequence from ``first[n]`` on; the states after them."""
            ends = tokens.cumsum(0)
            at = torch.arange(int(ends[-1])) + (first - ends + tokens).repeat_interleave(tokens)
            bounds = torch.nn.functional.pad(ends, (1, 0))
            out = run(*(x[at].unsqueeze(0) for x in rows), initial_state=state, cu_seqlens=bounds)
            o.flatten(0, 1)[at] = out.o[0]
            return out.final_state

        replayed = part(starts, refresh.tokens, torch.zeros_like(stored))
        kept = refresh.keep.view(len(refresh.keep), 1, -1) | (refresh.tokens == 0).view(-1, 1, 1, 1)
        state = torch.where(kept, stored, replayed)
        final_state = part(starts + refresh.tokens, lengths - refresh.tokens, state)
    pool[slots] = final_state[has_slot].to(pool.dtype)
    return o
