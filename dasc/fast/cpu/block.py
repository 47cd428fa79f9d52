"""One block of the gated delta rule for many (sequence, value head) pairs at once, in batched matrix products.

The state after token ``i`` of a block is ``S_0 Diag(D[i, start]) + sum_j w_j (k_j * D[i, j])^T`` over ``j <= i``:
``D[i, j]`` is the product of ``alpha`` over ``j + 1 .. i``, and the writes ``w_j = beta_j (v_j - S k_j)`` solve a unit
lower triangular system (WY form, UT transform). A block is first reduced to :class:`Factors`, the only part that
differs between GDN and KDA, and then :func:`advance` carries the state across it.

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
        pairs: ``[b, C, 2, C]``; ``[:, i, 0, j]`` is ``k_i . (k_j * D[i, j])`` for ``j < i`` and ``[:, i, 1, j]`` is
            ``q_i . (k_j * D[i, j])`` for ``j <= i``. Zero above the diagonal; the diagonal of part 0 is never read.
        rows: ``[b, C, 2, K]``, ``k_i * D[i, start]`` and ``q_i * D[i, start]``.
        keys: ``[b, C, K]``, ``k_i * D[end, i]``.
        decay: of the whole block, ``[b, K]`` (KDA) or ``[b, 1]`` (GDN).
    """

    pairs: Tensor
    rows: Tensor
    keys: Tensor
    decay: Tensor


def gdn_factors(kq: Tensor, g: Tensor) -> Factors:
    """One decay a head: the products of keys and queries are those of the key head, weighted for each value head.

    Args:
        kq: ``k`` and ``q``, ``[n, H, C, 2, K]``.
        g: ``[n, HV, C]``.
    """
    n, H, C, _, K = kq.shape
    HV = g.shape[1]
    # between[i, j] = g_{j + 1} + .. + g_i: sums of the wanted terms alone, so that none is the difference of two
    between = g.reshape(n, H, -1, C, 1).expand(-1, -1, -1, -1, C).tril(-1).cumsum(dim=-2)
    decays = _exp(between).tril_()
    gram = (kq.flatten(2, 3) @ kq[:, :, :, 0].mT).view(n, H, 1, C, 2, C)
    since = between[..., 0] + g.reshape(n, H, -1, C)[..., :1]  # the start
    to_end = decays[..., -1, :]
    return Factors(
        pairs=(gram * decays.unsqueeze(-2)).view(n * HV, C, 2, C),
        rows=(kq.unsqueeze(2) * _exp(since)[..., None, None]).view(n * HV, C, 2, K),
        keys=(kq[:, :, None, :, 0] * to_end.unsqueeze(-1)).view(n * HV, C, K),
        decay=_exp(since[..., -1]).view(n * HV, 1),
    )


def kda_factors(kq: Tensor, g: Tensor) -> Factors:
    """A decay for each key channel, by joining neighbouring sub-blocks of 1, 2, 4, .. tokens until one is left.

    Two sub-blocks that meet need only the decays to and from where they meet: ``k_i`` and ``q_i`` of the later one
    decayed since its start, ``k_j`` of the earlier one decayed until its end. One matrix product then gives all pairs
    between the two.

    Args:
        kq: ``k`` and ``q``, ``[n, H, C, 2, K]``, ``C`` a power of two.
        g: ``[n, HV, C, K]``.
    """
    n, H, C, _, K = kq.shape
    b = n * g.shape[1]
    of_value_heads = kq.unsqueeze(2).expand(-1, -1, b // (n * H), -1, -1, -1)
    kq = of_value_heads.contiguous().view(b, C, 2, K)
    since = g.reshape(b, C, K).clone()  # log of the decay since the start of the sub-block, the token's own included
    until = torch.zeros_like(since)  # log of the decay from after the token until the end of the sub-block
    pairs = kq.new_zeros(b, C, 2, C)
    pairs[:, :, 1].diagonal(dim1=-2, dim2=-1).copy_((kq[:, :, 0] * kq[:, :, 1]).sum(dim=-1))
    size = 1
    while size < C:
        joins = C // (2 * size)
        since_halves, until_halves = since.view(b * joins, 2, size, K), until.view(b * joins, 2, size, K)
        kq_halves = kq.view(b * joins, 2, size, 2, K)
        first, second = since_halves[:, :, -1:].clone().unbind(dim=1)  # decay of each half
        later = kq_halves[:, 1] * _exp(since_halves[:, 1], factors=2).unsqueeze(-2)
        earlier = kq_halves[:, 0, :, 0] * _exp(until_halves[:, 0], factors=2)
        across = torch.bmm(later.flatten(1, 2), earlier.mT).view(b, joins, size, 2, size)
        corners = pairs.view(b, joins, 2 * size, 2, joins, 2 * size).diagonal(dim1=1, dim2=4)
        corners[:, size:, :, :size] = across.permute(0, 2, 3, 4, 1)
        since_halves[:, 1] += first
        until_halves[:, 0] += second
        size *= 2
    return Factors(
        pairs=pairs,
        rows=kq * _exp(since).unsqueeze(-2),
        keys=kq[:, :, 0] * _exp(until),
        decay=_exp(since[:, -1]),
    )


def _exp(log_decay: Tensor, factors: int = 1) -> Tensor:
    """``exp``, but zero where the product of so many of these could be subnormal: below 2e-35 for one in FP32.

    Arithmetic on subnormal numbers is very slow, and so is the exponential of what underflows.
    """
    floor = (math.log(torch.finfo(log_decay.dtype).tiny) + 8) / factors
    return torch.nn.functional.threshold_(log_decay.clamp(min=floor - 1).exp_(), math.exp(floor), 0.0)


def advance(x: Factors, v: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Carry the state across a block, in place, and return the block's outputs ``[b, C, V]``.

    Args:
        x: of the block.
        v: ``[b, C, V]``.
        beta: ``[b, C, 1]``.
        state: ``[b, V, K]`` contiguous, written to.
    """
    b, C, _, K = x.rows.shape
    from_state = torch.bmm(x.rows.view(b, 2 * C, K), state.mT).view(b, C, 2, -1)
    w = beta * (v - from_state[:, :, 0])
    if C > 1:
        w = torch.linalg.solve_triangular(beta * x.pairs[:, :, 0], w, upper=False, unitriangular=True)
    state.mul_(x.decay.unsqueeze(1)).baddbmm_(w.mT, x.keys)
    return torch.baddbmm(from_state[:, :, 1], x.pairs[:, :, 1], w)
