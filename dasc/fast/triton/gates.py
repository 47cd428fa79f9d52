"""The decay gates of eq. 2 and the update strength on a GPU: one pass over the gate input, in FP32."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from dasc.contract import check_gate
from dasc.fast.triton.aot import ShippedKernel
from dasc.fast.triton.gate_kernels import gate_kernel
from dasc.fast.triton.launch import check_dtypes, on_device_of


@dataclass(frozen=True)
class GateLaunch:
    """How one launch is cut.

    Attributes:
        block: elements of a program.
        num_warps: of a program.
    """

    block: int
    num_warps: int


def gate_launch(elements: int) -> GateLaunch:
    """Eight elements a thread, or one warp for what is small."""
    return GateLaunch(1024, 4) if elements > 2**14 else GateLaunch(128, 1)


@torch.no_grad()
def softplus_gate(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """``g = -exp(A_log) * softplus(a + dt_bias)``; see :func:`dasc.fast.softplus_gate`."""
    return _decay_gate(a, A_log, dt_bias, None)


@torch.no_grad()
def safe_gate(a: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """``g = lower_bound * sigmoid(exp(A_log) * (a + dt_bias))``; see :func:`dasc.fast.safe_gate`."""
    if not (math.isfinite(lower_bound) and lower_bound < 0):
        raise ValueError(f"lower_bound must be negative and finite, got {lower_bound}")
    return _decay_gate(a, A_log, dt_bias, lower_bound)


@torch.no_grad()
def beta_gate(b: Tensor, *, allow_neg_eigval: bool = False) -> Tensor:
    """``beta = sigmoid(b)``, or twice that; see :func:`dasc.fast.beta_gate`."""
    if not b.is_floating_point():
        raise ValueError(f"b must be a floating-point tensor, got {b.dtype}")
    check_dtypes(b=b)
    units = b.shape[-1] if b.ndim else 1
    out = b.new_empty(b.shape, dtype=torch.float32)
    _launch(b.reshape(-1, units) if b.numel() else b, None, None, out, units, 1, None, allow_neg_eigval)
    return out


def _decay_gate(a: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    check_gate(a, A_log, dt_bias)
    check_dtypes(a=a, A_log=A_log, dt_bias=dt_bias)
    out = a.new_empty(a.shape if a.ndim else dt_bias.shape, dtype=torch.float32)
    units = dt_bias.numel()
    rows = a.reshape(-1, units) if a.ndim and out.numel() else a
    per_head = units // max(A_log.numel(), 1)
    _launch(rows, A_log.contiguous(), dt_bias.contiguous(), out, units, per_head, lower_bound, False)
    return out


def _launch(
    rows: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    out: Tensor,
    units: int,
    per_head: int,
    lower_bound: float | None,
    double: bool,
) -> None:
    """Run the kernel; ``rows`` are ``[rows, units]``, or one value without axes."""
    elements = out.numel()
    if elements == 0:
        return
    if rows.ndim and rows.stride(1) != 1:
        rows = rows.contiguous()
    launch = gate_launch(elements)
    with on_device_of(out):
        gate_kernel[(triton.cdiv(elements, launch.block),)](
            rows,
            A_log,
            dt_bias,
            out,
            0.0 if lower_bound is None else lower_bound,
            elements,
            rows.stride(0) if rows.ndim else 0,
            ONE_VALUE=rows.ndim == 0,
            UNITS=units,
            PER_HEAD=per_head,
            SAFE=lower_bound is not None,
            DOUBLE=double,
            BLOCK=launch.block,
            num_warps=launch.num_warps,
            num_stages=1,
            enable_fp_fusion=True,
        )


def shipped() -> list[ShippedKernel]:
    """The kernel as real models launch it; see :mod:`dasc.fast.triton.aot`."""
    kernels = []
    for launch in (gate_launch(1), gate_launch(2**20)):
        for dtype in ("bf16", "fp16", "fp32"):
            for name, units, per_head in (("softplus", 32, 1), ("softplus", 4096, 128), ("safe", 4096, 128)):
                kernels.append(_shipped(f"{name}_gate_{units}", launch, dtype, units, per_head, name == "safe"))
            kernels.append(_shipped("beta_gate", launch, dtype, 32, None, False))
    return kernels


def _shipped(name: str, launch: GateLaunch, dtype: str, units: int, per_head: int | None, safe: bool) -> ShippedKernel:
    constexprs: dict[str, object] = {
        "ONE_VALUE": False,
        "UNITS": units,
        "PER_HEAD": per_head or 1,
        "SAFE": safe,
        "DOUBLE": False,
        "BLOCK": launch.block,
    }
    if per_head is None:
        constexprs |= {"A_log": None, "dt_bias": None}
    types = {"a": f"*{dtype}", "out": "*fp32", "A_log": "*fp32", "dt_bias": "*fp32", "lower_bound": "fp32"}
    signature = {arg: types.get(arg, "i32") for arg in gate_kernel.arg_names}
    signature |= dict.fromkeys(constexprs, "constexpr")
    return ShippedKernel(
        name=f"{name}_{dtype}_b{launch.block}",
        fn=gate_kernel,
        signature=signature,
        constexprs=constexprs,
        num_warps=launch.num_warps,
        num_stages=1,
        divisible_by_16=tuple(a for a, t in signature.items() if t.startswith("*") or a == "a_row"),
        uses_tensor_cores=False,
    )
