"""SGLang plugin for tests: plain torch for the Triton kernels that SGLang calls for hybrid models even on a CPU."""

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

# -- both models: gated norm, gated shared expert ----------------------------------------------------------------------


def rms_norm_gated(
    x: Tensor, g: Tensor, weight: Tensor | None, bias: Tensor | None, activation: str = "swish",
    residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False, eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    assert residual is None
    assert not prenorm
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.float()
    if bias is not None:
        y = y + bias.float()
    gate = torch.sigmoid if activation == "sigmoid" else silu
    return (y * gate(g.float())).to(x.dtype)


def fused_gate_sigmoid_mul(hidden: Tensor, weight: Tensor, shared: Tensor) -> Tensor:
    gate = torch.sigmoid(hidden.float() @ weight.float().view(-1, 1))
    return (gate * shared.float()).to(shared.dtype)


def fused_gate_sigmoid_mul_add(hidden: Tensor, weight: Tensor, shared: Tensor, out: Tensor) -> None:
    out += fused_gate_sigmoid_mul(hidden, weight, shared)


# -- Kimi-Linear: recurrence, convolution, latent attention ------------------------------------------------------------


def kda_extend(
    self: object, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *,
    ssm_states: Tensor, cache_indices: Tensor, query_start_loc: Tensor, A_log: Tensor, dt_bias: Tensor,
    lower_bound: float | None = None, beta_is_raw: bool = False, return_intermediate_states: bool = False,
    **kwargs: object,
) -> Tensor:  # fmt: skip
    """``g`` and ``beta`` are raw: the gates are computed here."""
    from sgl_kernel import delta_rule

    assert beta_is_raw
    assert not return_intermediate_states
    heads, K = v.shape[2], k.shape[3]
    a = g.reshape(-1, heads, K).float() + dt_bias.float().view(heads, K)
    rate = A_log.float().reshape(heads, 1).exp()
    log_decay = -rate * softplus(a) if lower_bound is None else lower_bound * torch.sigmoid(rate * a)
    strength = beta.reshape(1, -1, heads).float().sigmoid()
    o = delta_rule(q, k, v, log_decay.unsqueeze(0), strength, ssm_states, cache_indices, query_start_loc, True)
    return o.to(v.dtype)


def kda_decode(self: object, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, **kwargs: object) -> Tensor:
    return kda_extend(self, q, k, v, a, b, beta_is_raw=True, **kwargs)


def causal_conv1d_fn(
    x, weight, bias=None, conv_states=None, query_start_loc=None, seq_lens_cpu=None, cache_indices=None,
    has_initial_state=None, activation="silu", **kwargs,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """The CPU function takes the same in another order."""
    from sgl_kernel.mamba import causal_conv1d_fn_cpu

    return causal_conv1d_fn_cpu(
        x, weight, bias, activation, conv_states, has_initial_state, cache_indices, query_start_loc
    )


def absorbed_latent_attention(self, forward_batch):  # type: ignore[no-untyped-def]
    """The one form of latent attention that the torch_native backend can run."""
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    self.current_attention_backend = "torch_native"
    return AttnForwardMethod.MLA


def register() -> None:
    """Replace each kernel by its stand-in."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    kda = "sglang.srt.layers.attention.linear.kernels.kda_triton.TritonKDAKernel"
    elementwise = "sglang.kernels.ops.elementwise.elementwise"
    latent = "sglang.srt.models.deepseek_v2.DeepseekV2AttentionMLA"
    for target, stand_in in {
        "sglang.kernels.ops.attention.fla.fused_norm_gate.rms_norm_gated": rms_norm_gated,
        f"{elementwise}.fused_gate_sigmoid_mul": fused_gate_sigmoid_mul,
        f"{elementwise}.fused_gate_sigmoid_mul_add": fused_gate_sigmoid_mul_add,
        f"{kda}.extend": kda_extend,
        f"{kda}.decode": kda_decode,
        "sglang.kernels.ops.mamba.causal_conv1d_triton.causal_conv1d_fn": causal_conv1d_fn,
        f"{latent}.dispatch_attn_forward_method": absorbed_latent_attention,
    }.items():
        HookRegistry.register(target, stand_in, HookType.REPLACE)
