"""One token of the gated delta rule for many (sequence, value head) pairs: the state is read and written once."""

from __future__ import annotations

import torch
from torch import Tensor

from dasc.fast.cpu.block import exp_decay

STEP_ELEMENTS = 2**20  # of the states handled at a time: from the first pass over them to the last they stay in caches


def step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, state: Tensor, new_state: Tensor
) -> Tensor:
    """Advance ``n`` sequences by a token each; all tensors in one dtype.

    With ``k'`` and ``q'`` decayed, ``w = beta (v - S k')`` is what the token writes, ``o = S q' + (q . k) w`` what it
    reads, and ``S Diag(alpha) + w k^T`` what it leaves.

    Args:
        q: ``[n, H, K]``.
        k: ``[n, H, K]``.
        v: ``[n, HV, V]``.
        g: ``[n, HV]`` (GDN) or ``[n, HV, K]`` (KDA).
        beta: ``[n, HV]``.
        scale: of the outputs.
        state: ``[n, HV, V, K]`` before the token.
        new_state: contiguous, of the same shape, only written; may be ``state``.

    Returns:
        Outputs, ``[n, HV, V]``.
    """
    n, HV, V, K = state.shape
    units = 1 if g.ndim == 2 else K
    kq = torch.stack([k, q], dim=2).repeat_interleave(HV // k.shape[1], dim=1)
    decay = exp_decay(g.reshape(n, HV, 1, units))
    rows = (kq * decay).view(-1, 2, K)
    keys = kq[:, :, :1].reshape(-1, 1, K)
    overlap = kq.prod(dim=2).sum(dim=-1).view(-1, 1)
    decay, beta, v = decay.view(-1, 1, units), beta.reshape(-1, 1), v.reshape(-1, V)
    states, new_states, o = state.reshape(-1, V, K), new_state.view(-1, V, K), torch.empty_like(v)
    at_once = max(STEP_ELEMENTS // (V * K), 1)
    for first in range(0, n * HV, at_once):
        part = slice(first, first + at_once)
        old, new = states[part], new_states[part]
        of_key, of_query = torch.bmm(rows[part], old.mT).unbind(dim=1)
        w = (v[part] - of_key).mul_(beta[part])
        torch.addcmul(of_query, overlap[part], w, out=o[part])
        torch.mul(old, decay[part], out=new).addcmul_(w.unsqueeze(-1), keys[part])
    return o.mul_(scale).view(n, HV, V)
