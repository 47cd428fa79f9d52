"""The gated delta rule block by block (WY form with the UT transform): a second oracle beside the recurrence.

Inside a block, ``D[i, j]`` is the decay of what token ``j`` wrote by the time token ``i`` has decayed the state:
the product of ``alpha`` over ``j + 1 .. i``. It is built by multiplying, never as a quotient or as the exponential of a
difference of sums. So nothing overflows whatever the gate, a decay of 0 (``g = -inf``) is as good as any other, and a
long product of small decays loses no more digits than the recurrence does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dasc.contract import DeltaRuleOutput
from dasc.reference.recurrent import Operands, delta_rule_operands


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
) -> DeltaRuleOutput:
    """Gated DeltaNet in blocks of ``chunk_size`` tokens, any number from 1.

    Arguments, results and errors as :func:`dasc.reference.recurrent.recurrent_gdn`.

    Raises:
        ValueError: also for a ``chunk_size`` below 1.
    """
    operands = delta_rule_operands(q, k, v, g, beta, False, scale, initial_state, cu_seqlens, use_qk_l2norm)
    return _chunk(operands, chunk_size, like=v)


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
) -> DeltaRuleOutput:
    """Kimi Delta Attention in blocks of ``chunk_size`` tokens, any number from 1.

    Arguments, results and errors as :func:`dasc.reference.recurrent.recurrent_kda`.

    Raises:
        ValueError: also for a ``chunk_size`` below 1.
    """
    operands = delta_rule_operands(q, k, v, g, beta, True, scale, initial_state, cu_seqlens, use_qk_l2norm)
    return _chunk(operands, chunk_size, like=v)


def _chunk(x: Operands, chunk_size: int, like: Tensor) -> DeltaRuleOutput:
    """Step all sequences together, a block each, the last one filled up with tokens that change nothing."""
    if not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size must be a positive integer, got {chunk_size!r}")
    o = x.v.new_zeros(x.v.shape)
    state = x.state
    within = torch.arange(min(chunk_size, x.longest), device=o.device)
    for first in range(0, x.longest, chunk_size):
        live = (x.lengths > first).nonzero().flatten()
        real = first + within < x.lengths[live, None]  # [live, C]
        token = (x.starts[live, None] + first + within) * real
        q, k, v, beta = (_gather(tensor, token, real, 0.0) for tensor in (x.q, x.k, x.v, x.beta))
        out, state[live] = _block(q, k, v, _gather(x.alpha, token, real, 1.0), beta, state[live])
        o[token[real]] = out.transpose(1, 2)[real]
    return DeltaRuleOutput(o.view(like.shape).to(like.dtype), state)


def _gather(tensor: Tensor, token: Tensor, real: Tensor, filler: float) -> Tensor:
    """Rows ``token`` of ``[B * T, HV, ..]`` as ``[live, HV, C, ..]``, ``filler`` where no token is ``real``."""
    return tensor[token].masked_fill(~real[..., None, None], filler).transpose(1, 2)


def _block(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One block of every sequence: inputs ``[n, HV, C, ..]`` and state ``[n, HV, V, K]`` to output and next state.

    The state after token ``i`` is ``S_0 Diag(D[i, start]) + sum_j w_j (k_j * D[i, j])^T`` over ``j <= i``, where
    ``w_j = beta_j (v_j - S k_j)`` with the decayed state that token ``j`` finds. Written out for all tokens this is a
    unit lower triangular system in ``w``.
    """
    C = q.shape[2]
    overlap = q.new_zeros(*q.shape[:3], C)  # k_i (k_j * D[i, j]) for j < i
    reads = torch.zeros_like(overlap)  # q_i (k_j * D[i, j]) for j <= i
    decay = torch.ones_like(alpha)  # D[i, :], row i of the loop
    for i in range(C):
        decay[:, :, :i] *= alpha[:, :, i, None]
        written = k[:, :, : i + 1] * decay[:, :, : i + 1]
        overlap[:, :, i, :i] = (k[:, :, i, None] * written[:, :, :i]).sum(-1)
        reads[:, :, i, : i + 1] = (q[:, :, i, None] * written).sum(-1)
    from_start = alpha.cumprod(dim=2)  # D[i, start]
    with torch.autocast(q.device.type, enabled=False):
        found = (k * from_start) @ state.mT
        w = torch.linalg.solve_triangular(beta * overlap, beta * (v - found), upper=False, unitriangular=True)
        o = (q * from_start) @ state.mT + reads @ w
        return o, state * from_start[:, :, -1:] + w.mT @ (k * decay)
