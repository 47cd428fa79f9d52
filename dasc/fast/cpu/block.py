"""One block of the gated delta rule for many (sequence, value head) pairs at once, in batched matrix products.

The state after token ``i`` of a block is ``S_0 Diag(D[i, start]) + sum_j w_j (k_j * D[i, j])^T`` over ``j <= i``:
``D[i, j]`` is the product of ``alpha`` over ``j + 1 .. i``, and the writes ``w_j = beta_j (v_j - S k_j)`` solve a unit
lower triangular system (WY form, UT transform). A block is first reduced to :class:`Factors`, the only part that
differs between GDN and KDA and may be had for many blocks at once; then :func:`advance` carries the state across it.

Every decay is the exponential of a sum of the ``g <= 0`` that it spans, or a product of such exponentials. No quotient
of decays and no difference of sums is ever taken: nothing overflows, and neither ``g = -60`` nor ``g = -inf`` beside
small ones costs digits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Factors(NamedTuple):
    """What a block of ``C`` tokens does, apart from its values and the state; ``b`` counts (sequence, value head).

    Attributes:
        overlap: ``[b, C, C]``, ``beta_i k_i . (k_j * D[i, j])`` for ``j < i``. The rest is never read.
        reads: ``[b, C, C]``, ``q_i . (k_j * D[i, j])`` for ``j <= i``, zero for ``j > i``.
        k_rows: ``[b, C, K]``, ``beta_i k_i * D[i, start]``.
        q_rows: ``[b, C, K]``, ``q_i * D[i, start]``.
        keys: ``[b, C, K]``, ``k_i * D[end, i]``.
        decay: of the whole block, ``[b, K]`` (KDA) or ``[b, 1]`` (GDN).
    """

    overlap: Tensor
    reads: Tensor
    k_rows: Tensor
    q_rows: Tensor
    keys: Tensor
    decay: Tensor


def gdn_factors(q: Tensor, k: Tensor, g: Tensor, beta: Tensor) -> Factors:
    """One decay a head: the products of keys and queries are those of the key head, weighted for each value head.

    Args:
        q: ``[n, H, C, K]``.
        k: ``[n, H, C, K]``.
        g: ``[n, HV, C]``.
        beta: ``[n, HV, C]``.
    """
    n, H, C, K = k.shape
    b = n * g.shape[1]
    g, beta = (x.contiguous().view(n, H, -1, C, 1) for x in (g, beta))
    # between[i, j] = g_{j + 1} + .. + g_i: sums of the wanted terms alone, so that none is the difference of two
    between = g.expand(-1, -1, -1, -1, C).tril(-1).cumsum_(dim=-2)
    since = between[..., :1] + g[..., :1, :]  # log of the decay since the block's start, the token's own included
    decays, since_start = exp_decay(between).tril_(), exp_decay(since)
    to_end = decays[..., -1, :].unsqueeze(-1)
    kq = k.new_empty(n, H, 1, 2 * C, K)
    kq[:, :, 0, :C] = k
    kq[:, :, 0, C:] = q
    keys = kq[..., :C, :]
    gram = kq @ keys.mT
    rows = kq * torch.cat([beta * since_start, since_start], dim=-2)
    return Factors(
        overlap=(gram[..., :C, :] * (beta * decays)).view(b, C, C),
        reads=(gram[..., C:, :] * decays).view(b, C, C),
        k_rows=rows[..., :C, :].view(b, C, K),
        q_rows=rows[..., C:, :].view(b, C, K),
        keys=(keys * to_end).view(b, C, K),
        decay=since_start[..., -1, :].view(b, 1),
    )


def kda_factors(q: Tensor, k: Tensor, g: Tensor, beta: Tensor) -> Factors:
    """A decay for each key channel, by joining neighbouring sub-blocks of 1, 2, 4, .. tokens until one is left.

    Two sub-blocks that meet need only the decays to and from where they meet: ``k_i`` and ``q_i`` of the later one
    decayed since its start, ``k_j`` of the earlier one decayed until its end. One matrix product then gives all pairs
    between the two.

    Args:
        q: ``[n, H, C, K]``, ``C`` a power of two.
        k: ``[n, H, C, K]``.
        g: ``[n, HV, C, K]``.
        beta: ``[n, HV, C]``.
    """
    n, H, C, K = k.shape
    ratio = g.shape[1] // H
    b = n * H * ratio
    keys = k.new_empty(n, H, ratio, C, K)
    keys[:] = k.unsqueeze(2)
    kq = k.new_empty(n, H, ratio, C, 2, K)
    torch.mul(keys, beta.reshape(n, H, ratio, C, 1), out=kq[..., 0, :])
    kq[..., 1, :] = q.unsqueeze(2)
    keys, kq = keys.view(b, C, K), kq.view(b, C, 2, K)
    since = k.new_empty(n, H * ratio, C, K).copy_(g).view(b, C, K)  # log of the decay since the start of the sub-block
    until = torch.zeros_like(since)  # .. and from after the token until its end
    pairs = k.new_zeros(b, C, 2, C)
    pairs[:, :, 1].diagonal(dim1=-2, dim2=-1).copy_((kq[:, :, 1] * keys).sum(dim=-1))
    size = 1
    while size < C:
        joins = C // (2 * size)
        since_halves, until_halves = since.view(b * joins, 2, size, K), until.view(b * joins, 2, size, K)
        first, second = since_halves[:, :, -1:].clone().unbind(dim=1)  # of each half
        later = kq.view(b * joins, 2, size, 2, K)[:, 1] * exp_decay(since_halves[:, 1], factors=2).unsqueeze(-2)
        earlier = keys.view(b * joins, 2, size, K)[:, 0] * exp_decay(until_halves[:, 0], factors=2)
        across = torch.bmm(later.view(b * joins, 2 * size, K), earlier.mT).view(b, joins, size, 2, size)
        corners = pairs.view(b, joins, 2 * size, 2, joins, 2 * size).diagonal(dim1=1, dim2=4)
        corners[:, size:, :, :size] = across.permute(0, 2, 3, 4, 1)
        since_halves[:, 1] += first
        until_halves[:, 0] += second
        size *= 2
    rows = kq * exp_decay(since).unsqueeze(-2)
    return Factors(
        overlap=pairs[:, :, 0],
        reads=pairs[:, :, 1],
        k_rows=rows[:, :, 0],
        q_rows=rows[:, :, 1],
        keys=keys * exp_decay(until),
        decay=exp_decay(since[:, -1]),
    )


def exp_decay(log_decay: Tensor, factors: int = 1) -> Tensor:
    """``exp``, but zero where the product of so many of these could be subnormal.

    In FP32 that is below 4e-35 for one factor and below 6e-18 for each of two. Arithmetic on subnormal numbers is very
    slow, and so is the exponential of what underflows.
    """
    floor = (math.log(torch.finfo(log_decay.dtype).tiny) + 8) / factors
    return torch.nn.functional.threshold(log_decay.clamp(min=floor - 1).exp_(), math.exp(floor), 0.0, inplace=True)


def advance(x: Factors, v: Tensor, scale: float, state: Tensor, o: Tensor) -> None:
    """Carry the state across a block and write the block's outputs.

    Args:
        x: of the block.
        v: ``beta_i v_i``, ``[b, C, V]``.
        scale: of the outputs.
        state: ``[b, K, V]`` contiguous, before the block and then after it.
        o: ``[b, C, V]``, only written.
    """
    w = torch.baddbmm(v, x.k_rows, state, alpha=-1)
    if v.shape[1] > 1:
        # the system transposed, which is how LAPACK reads it: nothing is copied
        w = torch.linalg.solve_triangular(x.overlap.mT, w.mT, upper=True, left=False, unitriangular=True).mT
    torch.bmm(x.q_rows, state, out=o)
    o.baddbmm_(x.reads, w, beta=scale, alpha=scale)
    state.mul_(x.decay.unsqueeze(-1)).baddbmm_(x.keys.mT, w)
