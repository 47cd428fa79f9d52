"""The gated delta rule token by token: eq. 1 as it is written, the oracle of every other form."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dasc.contract import DeltaRuleOutput, check_delta_rule, compute_dtype, sequence_spans


class Operands(NamedTuple):
    """Checked inputs in the compute dtype, one row a token, key heads repeated for the value heads that read them.

    Attributes:
        q: ``[B * T, HV, K]``, normalised if asked for and scaled.
        k: ``[B * T, HV, K]``, normalised if asked for.
        v: ``[B * T, HV, V]``.
        alpha: decay ``exp(g)``, ``[B * T, HV, K]`` (KDA) or ``[B * T, HV, 1]`` (GDN).
        beta: ``[B * T, HV, 1]``.
        state: ``[N, HV, V, K]``, a copy of the initial state, or zeros.
        starts: ``[N]`` int64, first row of each sequence.
        lengths: ``[N]`` int64, tokens of each sequence.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    alpha: Tensor
    beta: Tensor
    state: Tensor
    starts: Tensor
    lengths: Tensor

    @property
    def longest(self) -> int:
        return int(self.lengths.max()) if self.lengths.numel() else 0


def delta_rule_operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    channel_gate: bool,
    scale: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    use_qk_l2norm: bool,
) -> Operands:
    """Check the arguments of a recurrence and bring them to the form that both reference forms work on.

    Raises:
        ValueError: as :func:`dasc.contract.check_delta_rule`.
    """
    shape = check_delta_rule(
        q, k, v, g, beta, channel_gate=channel_gate, initial_state=initial_state, cu_seqlens=cu_seqlens
    )
    dtype = compute_dtype(q, k, v, g, beta, initial_state)
    q, k, v, g, beta = (x.to(dtype).flatten(0, 1) for x in (q, k, v, g, beta))
    if use_qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    # value head h reads key head h // (HV // H)
    q, k = (x.repeat_interleave(shape.HV // shape.H, dim=1) for x in (q, k))
    starts, lengths = sequence_spans(shape.B, shape.T, cu_seqlens, q.device)
    if initial_state is None:
        state = q.new_zeros(shape.N, shape.HV, shape.V, shape.K)
    else:
        state = initial_state.to(dtype, copy=True, memory_format=torch.contiguous_format)
    return Operands(
        q=q * (shape.K**-0.5 if scale is None else scale),
        k=k,
        v=v,
        alpha=(g if channel_gate else g.unsqueeze(-1)).exp(),
        beta=beta.unsqueeze(-1),
        state=state,
        starts=starts,
        lengths=lengths,
    )


def l2norm(x: Tensor) -> Tensor:
    """``x / sqrt(sum(x^2) + 1e-6)`` over the last axis."""
    return x / (x.square().sum(dim=-1, keepdim=True) + 1e-6).sqrt()


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
) -> DeltaRuleOutput:
    """Gated DeltaNet, one token after another (eq. 1 with one decay a head).

    Args:
        q: ``[B, T, H, K]``.
        k: ``[B, T, H, K]``.
        v: ``[B, T, HV, V]``, ``HV`` a multiple of ``H``.
        g: natural log of the decay, ``<= 0``, ``[B, T, HV]``.
        beta: update strength, ``[B, T, HV]``.
        scale: of ``q``; ``K ** -0.5`` when ``None``.
        initial_state: ``[N, HV, V, K]``; zero when ``None``.
        cu_seqlens: ``[N + 1]`` boundaries of packed sequences (then ``B = 1``).
        use_qk_l2norm: divide ``q`` and ``k`` by ``sqrt(sum(x^2) + 1e-6)`` first.

    Returns:
        ``o`` ``[B, T, HV, V]`` in the dtype of ``v`` and the final state ``[N, HV, V, K]`` in the compute dtype.

    Raises:
        ValueError: as :func:`dasc.contract.check_delta_rule`.
    """
    operands = delta_rule_operands(q, k, v, g, beta, False, scale, initial_state, cu_seqlens, use_qk_l2norm)
    return _recurrent(operands, like=v)


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
) -> DeltaRuleOutput:
    """Kimi Delta Attention, one token after another (eq. 1).

    As :func:`recurrent_gdn`, but ``g`` is ``[B, T, HV, K]``: a decay for each key channel.

    Raises:
        ValueError: as :func:`dasc.contract.check_delta_rule`.
    """
    operands = delta_rule_operands(q, k, v, g, beta, True, scale, initial_state, cu_seqlens, use_qk_l2norm)
    return _recurrent(operands, like=v)


def _recurrent(x: Operands, like: Tensor) -> DeltaRuleOutput:
    """Step all sequences together, so that many short ones take as many steps as the longest has tokens."""
    o = x.v.new_zeros(x.v.shape)
    state = x.state
    # sums of products rather than matmuls: neither autocast nor TF32 touches them
    for t in range(x.longest):
        live = (x.lengths > t).nonzero().flatten()
        token = x.starts[live] + t
        k = x.k[token].unsqueeze(-2)  # [live, HV, 1, K]
        S = state[live] * x.alpha[token].unsqueeze(-2)  # S Diag(alpha)
        delta = x.beta[token] * (x.v[token] - (S * k).sum(-1))  # beta (v - S k)
        S = S + delta.unsqueeze(-1) * k
        o[token] = (S * x.q[token].unsqueeze(-2)).sum(-1)
        state[live] = S
    return DeltaRuleOutput(o.view(like.shape).to(like.dtype), state)
