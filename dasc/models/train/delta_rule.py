"""The gated delta rule for training: whole batches of equal length, block by block, differentiable and fast on a CPU.

All blocks of all sequences are reduced together (WY form, UT transform) in batched matrix products; only the state is
carried from block to block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 16
"""Tokens of a block, a power of two."""

# No g is taken to be lower. exp(-60) is nothing beside a number of FP32, and half a block of them is within FP64.
_LEAST_G = -60.0
# Largest sum of g over half a block for which FP32 does: no product of a decay and an inverse then loses digits that
# count. The safe gate's, with a lower bound of -5, is never larger.
_FP32_SUM = 44.0


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Outputs of eq. 1 from a zero state, queries and keys divided by their norms, queries scaled by ``K ** -0.5``.

    Args:
        q: ``[B, T, H, K]``; ``T`` is a multiple of :data:`BLOCK`.
        k: ``[B, T, H, K]``.
        v: ``[B, T, HV, V]``.
        g: ``[B, T, HV]`` (GDN) or ``[B, T, HV, K]`` (KDA).
        beta: ``[B, T, HV]``.

    Returns:
        ``[B, T, HV, V]``.

    Raises:
        ValueError: for another number of tokens.
    """
    B, T, HV, V = v.shape
    if T % BLOCK:
        raise ValueError(f"T must be a multiple of {BLOCK}, got {T}")
    scale = k.shape[-1] ** -0.5
    q, k = (_blocks(_normalized(x).repeat_interleave(HV // x.shape[2], dim=2)) for x in (q, k))
    v, beta = _blocks(v), _blocks(beta.unsqueeze(-1))
    since = _blocks(g if g.ndim == 4 else g.unsqueeze(-1)).clamp(min=_LEAST_G).cumsum(dim=-2)

    # decays are counted from the middle of the block, so that neither their exponentials nor the inverses overflow
    middle = since[..., BLOCK // 2 - 1, None, :]
    from_middle = since - middle
    wide = from_middle if float(from_middle.detach().abs().max()) < _FP32_SUM else from_middle.double()
    rows = torch.stack([k, q * scale]) * wide.exp()
    columns = k * (-wide).exp()
    overlap, reads = (rows @ columns.mT).tril().to(v.dtype).unbind()
    k_rows, q_rows = (rows * middle.to(wide.dtype).exp()).to(v.dtype).unbind()
    keys = (columns * (since[..., -1:, :] - middle).to(wide.dtype).exp()).to(v.dtype).mT
    decay = since[..., -1, :].exp().unsqueeze(-1)

    # the writes of a block are ``u - w S`` with the state S before it
    solved = _inverse(overlap * beta) @ (torch.cat([v, k_rows], dim=-1) * beta)
    u, w = solved[..., :V], solved[..., V:]
    state = v.new_zeros(B, HV, k.shape[-1], V)
    states, writes = [], []
    for n in range(T // BLOCK):
        states.append(state)
        writes.append(u[:, :, n] - w[:, :, n] @ state)
        state = decay[:, :, n] * state + keys[:, :, n] @ writes[-1]
    o = q_rows @ torch.stack(states, dim=2) + reads @ torch.stack(writes, dim=2)
    return o.flatten(2, 3).transpose(1, 2)


def _blocks(x: Tensor) -> Tensor:
    """``[B, T, heads, D]`` -> ``[B, heads, blocks, BLOCK, D]``."""
    B, T, heads, D = x.shape
    return x.reshape(B, T // BLOCK, BLOCK, heads, D).permute(0, 3, 1, 2, 4).contiguous()


def _normalized(x: Tensor) -> Tensor:
    return x * (x.square().sum(dim=-1, keepdim=True) + 1e-6).rsqrt()


def _inverse(lower: Tensor) -> Tensor:
    inverse: Tensor = _UnitLowerInverse.apply(lower)  # type: ignore[no-untyped-call]
    return inverse


class _UnitLowerInverse(torch.autograd.Function):
    """Inverses of unit lower triangular matrices ``[.., C, C]``, of which only what is below the diagonal is read.

    Joins the inverses of diagonal blocks of 1, 2, 4, .. rows. LAPACK's solver is many times slower on many small ones.
    """

    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:
        C = lower.shape[-1]
        inverse = torch.eye(C, dtype=lower.dtype).expand(lower.shape).contiguous()
        size = 1
        while size < C:
            for first in range(0, C, 2 * size):
                a, b = slice(first, first + size), slice(first + size, first + 2 * size)
                inverse[..., b, a] = -(inverse[..., b, b] @ lower[..., b, a] @ inverse[..., a, a])
            size *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        inverse: Tensor = ctx.saved_tensors[0]
        return -(inverse.mT @ grad @ inverse.mT).tril(-1)
