"""The recurrences token by token on a GPU: decode over pooled states, and ``recurrent_*``.

A decode step does some 8 operations on a state element that it reads and writes, so its time is that of moving the
state. Each program holds a tile of one head's state in registers: read once, written once, everything else beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from dasc.contract import DecayGate, DeltaRuleOutput, DeltaRuleShape, check_delta_rule, check_pooled
from dasc.fast.triton.aot import ShippedKernel
from dasc.fast.triton.decode_kernels import delta_rule_kernel
from dasc.fast.triton.launch import SMS, check_dtypes, on_device_of, token_rows


@dataclass(frozen=True)
class DecodeLaunch:
    """How one launch is cut.

    Attributes:
        block_v: rows of a head's state that a program holds.
        block_k: columns, all of ``K``.
        lanes_k: neighbouring columns; how a row is spread over threads (:func:`delta_rule_kernel`).
        num_warps: of a program.
    """

    block_v: int
    block_k: int
    lanes_k: int
    num_warps: int


def decode_launch(states: int, V: int, K: int) -> DecodeLaunch:
    """The largest tile that still gives every SM the programs that it can hold; a thread has 64 elements of it.

    Compiled for Hopper, 7 or 8 programs of two warps fit on an SM, and with them 112 KiB of state or more are on their
    way to it: some three times what covers the latency of the memory.

    Args:
        states: sequences times value heads.
        V: value head dimension.
        K: key head dimension.
    """
    block_v = 32
    while block_v > 8 and states * triton.cdiv(V, block_v) < 8 * SMS:
        block_v //= 2
    block_v = min(block_v, triton.next_power_of_2(V))
    block_k = triton.next_power_of_2(K)
    num_warps = min(max(block_v * block_k // 2048, 1), 8)
    return DecodeLaunch(block_v, block_k, min(block_k, 32), num_warps)


@torch.no_grad()
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
    """One token for each of ``N`` sequences, states in place; see :func:`dasc.fast.decode_gdn`."""
    return _decode(q, k, v, g, beta, pool, state_indices, False, gate, scale, use_qk_l2norm)


@torch.no_grad()
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
    """One token for each of ``N`` sequences, states in place; see :func:`dasc.fast.decode_kda`."""
    return _decode(q, k, v, g, beta, pool, state_indices, True, gate, scale, use_qk_l2norm)


@torch.no_grad()
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
    """Gated DeltaNet token by token; see :func:`dasc.fast.recurrent_gdn`."""
    return _recurrent(q, k, v, g, beta, False, scale, initial_state, cu_seqlens, use_qk_l2norm)


@torch.no_grad()
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
    """Kimi Delta Attention token by token; see :func:`dasc.fast.recurrent_kda`."""
    return _recurrent(q, k, v, g, beta, True, scale, initial_state, cu_seqlens, use_qk_l2norm)


def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    state_indices: Tensor,
    channel_gate: bool,
    gate: DecayGate | None,
    scale: float | None,
    use_qk_l2norm: bool,
) -> Tensor:
    shape = check_pooled(q, k, v, g, beta, pool, state_indices, channel_gate=channel_gate, gate=gate, one_token=True)
    check_dtypes(q=q, k=k, v=v, g=g, beta=beta, pool=pool)
    if gate is not None:
        check_dtypes(A_log=gate.A_log, dt_bias=gate.dt_bias)
    return _launch((q, k, v, g, beta), shape, pool, pool, state_indices, None, channel_gate, gate, scale, use_qk_l2norm)


def _recurrent(
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
) -> DeltaRuleOutput:
    shape = check_delta_rule(
        q, k, v, g, beta, channel_gate=channel_gate, initial_state=initial_state, cu_seqlens=cu_seqlens
    )
    check_dtypes(q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state)
    final = q.new_empty(shape.N, shape.HV, shape.V, shape.K, dtype=torch.float32)
    inputs = (q, k, v, g, beta)
    o = _launch(inputs, shape, initial_state, final, None, cu_seqlens, channel_gate, None, scale, use_qk_l2norm)
    return DeltaRuleOutput(o, final)


def _launch(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    shape: DeltaRuleShape,
    initial: Tensor | None,
    final: Tensor,
    state_indices: Tensor | None,
    cu_seqlens: Tensor | None,
    channel_gate: bool,
    gate: DecayGate | None,
    scale: float | None,
    use_qk_l2norm: bool,
) -> Tensor:
    """Run the kernel on checked arguments; ``final`` is written to. Returns ``o``."""
    v = inputs[2]
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    if shape.N == 0:
        return o
    rows = [token_rows(x) for x in inputs]
    launch = decode_launch(shape.N * shape.HV, shape.V, shape.K)
    with on_device_of(v):
        delta_rule_kernel[(shape.N * shape.HV * triton.cdiv(shape.V, launch.block_v),)](
            *rows,
            o,
            initial,
            final,
            None if state_indices is None else state_indices.contiguous(),
            None if cu_seqlens is None else cu_seqlens.to(v.device).contiguous(),
            None if gate is None else gate.A_log.contiguous(),
            None if gate is None else gate.dt_bias.contiguous(),
            shape.K**-0.5 if scale is None else float(scale),
            0.0 if gate is None or gate.lower_bound is None else gate.lower_bound,
            shape.T,
            *(stride for x in rows for stride in x.stride()[:2]),
            *(final if initial is None else initial).stride(),
            *final.stride(),
            H=shape.H,
            HV=shape.HV,
            K=shape.K,
            V=shape.V,
            BLOCK_K=launch.block_k,
            LANES_K=launch.lanes_k,
            BLOCK_V=launch.block_v,
            CHANNEL_GATE=channel_gate,
            SAFE_GATE=gate is not None and gate.lower_bound is not None,
            NEG_EIGVAL=gate is not None and gate.allow_neg_eigval,
            L2NORM=use_qk_l2norm,
            ONE_TOKEN=shape.T == 1 and cu_seqlens is None,
            num_warps=launch.num_warps,
            num_stages=1,
            enable_fp_fusion=True,
        )
    return o


def shipped() -> list[ShippedKernel]:
    """The kernel as real models launch it, heads of 128 by 128; see :mod:`dasc.fast.triton.aot`."""
    launches = {decode_launch(states, 128, 128) for states in (1, 2**8, 2**20)}
    kernels = []
    for launch in sorted(launches, key=lambda launch: launch.block_v):
        for dtype in ("fp32", "bf16", "fp16"):
            for gate in ("gdn", "kda", "kda_safe"):
                kernels.append(_shipped(f"decode_{gate}", launch, dtype, gate, one_token=True))
        for kind in ("gdn", "kda"):
            kernels.append(_shipped(f"recurrent_{kind}", launch, "bf16", kind, one_token=False))
    large = decode_launch(2**20, 128, 128)
    for pool in ("bf16", "fp16"):
        kernels.append(_shipped(f"decode_kda_pool_{pool}", large, "bf16", "kda", one_token=True, pool=pool))
    kernels.append(_shipped("decode_kda_pool_kv", large, "bf16", "kda", one_token=True, k_first=True))
    return kernels


def _shipped(
    name: str,
    launch: DecodeLaunch,
    dtype: str,
    gate: str,
    *,
    one_token: bool,
    pool: str = "fp32",
    k_first: bool = False,
) -> ShippedKernel:
    """Decode over a pool with its gates in the kernel, or ``recurrent_*`` over packed sequences."""
    constexprs: dict[str, object] = {
        "H": 16 if gate == "gdn" else 32,
        "HV": 32,
        "K": 128,
        "V": 128,
        "BLOCK_K": launch.block_k,
        "LANES_K": launch.lanes_k,
        "BLOCK_V": launch.block_v,
        "CHANNEL_GATE": gate != "gdn",
        "SAFE_GATE": gate == "kda_safe",
        "NEG_EIGVAL": False,
        "L2NORM": True,
        "ONE_TOKEN": one_token,
        "beta_head": 1,
    }
    if gate == "gdn":
        constexprs["g_head"] = 1
    for of in ("initial", "final"):
        constexprs |= {f"{of}_v": 1, f"{of}_k": 128} if k_first else {f"{of}_v": 128, f"{of}_k": 1}
    for absent in ("cu_seqlens",) if one_token else ("state_indices", "A_log", "dt_bias"):
        constexprs[absent] = None
    types = dict.fromkeys(("q", "k", "v", "g", "beta", "o"), f"*{dtype}")
    types |= {"initial": f"*{pool}", "final": f"*{pool}", "A_log": "*fp32", "dt_bias": "*fp32"}
    types |= {"state_indices": "*i64", "cu_seqlens": "*i64", "scale": "fp32", "lower_bound": "fp32"}
    signature = {arg: types.get(arg, "i32") for arg in delta_rule_kernel.arg_names}
    signature |= dict.fromkeys(constexprs, "constexpr")
    return ShippedKernel(
        name=f"{name}_{dtype}_v{launch.block_v}",
        fn=delta_rule_kernel,
        signature=signature,
        constexprs=constexprs,
        num_warps=launch.num_warps,
        num_stages=1,
        divisible_by_16=tuple(a for a, t in signature.items() if t.startswith("*") or (t == "i32" and a != "T")),
        uses_tensor_cores=False,
    )
