"""Stand-in for the CPU build of sgl_kernel, of which there is no wheel: a hybrid model's operators, token by token.

SGLang imports many names from here when it starts and calls few of them; the others fail when they are called.
"""

import torch
from torch import Tensor
from torch.nn.functional import softplus

__version__ = "0.4.10"


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm: bool,
) -> Tensor:
    """The gated delta rule of packed sequences, by its recurrence.

    Args:
        q: ``[1, T, H, K]``, ``k`` likewise.
        v: ``[1, T, HV, V]``.
        g: natural log of the decay, ``[1, T, HV]`` (GDN) or ``[1, T, HV, K]`` (KDA).
        beta: ``[1, T, HV]``.
        pool: states ``[slots, HV, V, K]``, read and written at ``slots``; a negative slot starts from zero, unwritten.
        slots: one a sequence.
        cu_seqlens: boundaries, one more than sequences.
        use_qk_l2norm: normalise ``q`` and ``k``.
    """
    (H, K), (HV, V) = q.shape[2:], v.shape[2:]
    q, k, v, g, beta = (x[0].float() for x in (q, k, v, g, beta))
    if use_qk_l2norm:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = (q * K**-0.5).repeat_interleave(HV // H, dim=1)
    k = k.repeat_interleave(HV // H, dim=1)
    alpha = g.exp().view(len(g), HV, 1, -1)
    o = torch.empty_like(v)
    bounds = cu_seqlens.tolist()
    for slot, start, end in zip(slots.tolist(), bounds, bounds[1:]):
        state = pool[slot].float() if slot >= 0 else torch.zeros(HV, V, K)
        for t in range(start, end):
            state = state * alpha[t]
            error = v[t] - torch.einsum("hvk,hk->hv", state, k[t])
            state = state + torch.einsum("hv,hk->hvk", beta[t, :, None] * error, k[t])
            o[t] = torch.einsum("hvk,hk->hv", state, q[t])
        if slot >= 0:
            pool[slot] = state.to(pool.dtype)
    return o.unsqueeze(0)


def _log_decay(A_log: Tensor, a: Tensor, dt_bias: Tensor) -> Tensor:
    return -A_log.float().exp() * softplus(a.float() + dt_bias.float())


def _gdn_gating(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    return _log_decay(A_log, a, dt_bias).unsqueeze(0), b.float().sigmoid().unsqueeze(0)


def _gdn_decode(A_log, dt_bias, q, k, v, a, b, pool, slots, cu_seqlens, use_qk_l2norm, beta=1.0, threshold=20.0):  # type: ignore[no-untyped-def]
    if (beta, threshold) != (1.0, 20.0):
        raise NotImplementedError(f"softplus with beta {beta} and threshold {threshold}")
    g, strength = _gdn_gating(A_log, a, b, dt_bias)
    return delta_rule(q, k, v, g, strength, pool, slots, cu_seqlens, use_qk_l2norm).to(v.dtype)


_library = torch.library.Library("sgl_kernel", "DEF")
_library.define("fused_gdn_gating_cpu(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)")
_library.define(
    "fused_sigmoid_gating_delta_rule_update_cpu(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a, "
    "Tensor b, Tensor(a!) initial_state_source, Tensor initial_state_indices, Tensor cu_seqlens, "
    "bool use_qk_l2norm_in_kernel, float softplus_beta=1.0, float softplus_threshold=20.0) -> Tensor"
)
_library.impl("fused_gdn_gating_cpu", _gdn_gating, "CompositeExplicitAutograd")
_library.impl("fused_sigmoid_gating_delta_rule_update_cpu", _gdn_decode, "CompositeExplicitAutograd")


def __getattr__(name: str):  # type: ignore[no-untyped-def]
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"the stand-in for sgl_kernel has no {name}")

    return missing
