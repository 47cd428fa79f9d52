"""The short causal convolution on a GPU: one pass over the tokens, one over the rows that are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
from torch import Tensor

from dasc.contract import ConvOutput, check_conv
from dasc.fast.triton.aot import ShippedKernel
from dasc.fast.triton.conv_kernels import conv_kernel, last_rows_kernel
from dasc.fast.triton.launch import SMS, check_dtypes, on_device_of, token_rows


@dataclass(frozen=True)
class ConvLaunch:
    """How one launch is cut.

    Attributes:
        block_t: tokens of a program.
        block_c: channels of a program.
        num_warps: of a program.
    """

    block_t: int
    block_c: int
    num_warps: int


def conv_launch(rows: int, C: int) -> ConvLaunch:
    """Sixteen tokens a program, as each loads the weights again, or few where that would leave SMs without work.

    Args:
        rows: tokens of all sequences.
        C: channels.
    """
    block_c = min(128, triton.next_power_of_2(C))
    block_t = 16 if triton.cdiv(rows, 16) * triton.cdiv(C, block_c) >= 4 * SMS else 4
    return ConvLaunch(block_t, block_c, num_warps=4)


@torch.no_grad()
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: Literal["silu"] | None = "silu",
) -> ConvOutput:
    """Each channel by itself; see :func:`dasc.fast.causal_conv1d`."""
    if activation not in ("silu", None):
        raise ValueError(f"activation must be 'silu' or None, got {activation!r}")
    starts, lengths = check_conv(x, weight, bias, initial_state, cu_seqlens)
    check_dtypes(x=x, weight=weight, bias=bias, initial_state=initial_state)
    (B, T, C), N, width = x.shape, len(starts), weight.shape[1]
    rows = token_rows(x)
    sequence = None
    if cu_seqlens is not None:
        sequence = torch.arange(N, device=x.device).repeat_interleave(lengths, output_size=T)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    final = x.new_empty(N, C, width - 1, dtype=torch.float32)
    state_strides = (0, 0, 0) if initial_state is None else initial_state.stride()
    with on_device_of(x):
        if y.numel():
            launch = conv_launch(B * T, C)
            conv_kernel[(triton.cdiv(B * T, launch.block_t) * triton.cdiv(C, launch.block_c),)](
                rows,
                weight,
                None if bias is None else bias.contiguous(),
                initial_state,
                sequence,
                starts,
                y,
                B * T,
                T,
                rows.stride(0),
                *weight.stride(),
                *state_strides,
                C=C,
                WIDTH=width,
                SILU=activation == "silu",
                BLOCK_T=launch.block_t,
                BLOCK_C=launch.block_c,
                num_warps=launch.num_warps,
                num_stages=1,
                enable_fp_fusion=True,
            )
        if final.numel():
            block_c = min(256, triton.next_power_of_2(C))
            last_rows_kernel[(N * triton.cdiv(C, block_c),)](
                rows,
                initial_state,
                starts,
                lengths,
                final,
                rows.stride(0),
                *state_strides,
                C=C,
                WIDTH=width,
                BLOCK_C=block_c,
                BLOCK_W=triton.next_power_of_2(width - 1),
                num_warps=4,
                num_stages=1,
                enable_fp_fusion=True,
            )
    return ConvOutput(y, final)


def shipped() -> list[ShippedKernel]:
    """Both kernels as real models launch them, 12,288 channels of width 4; see :mod:`dasc.fast.triton.aot`."""
    kernels = []
    sizes: dict[str, object] = {"C": 12_288, "WIDTH": 4}
    for dtype in ("fp32", "bf16", "fp16"):
        for launch in (conv_launch(1, 12_288), conv_launch(2**20, 12_288)):
            tile = {"BLOCK_T": launch.block_t, "BLOCK_C": launch.block_c, "SILU": True, "weight_tap": 1}
            for packed in (False, True):
                absent = {"bias": None} if packed else {"bias": None, "sequence": None}
                name = f"conv_{'packed_' if packed else ''}{dtype}_t{launch.block_t}"
                kernels.append(_shipped(name, conv_kernel, dtype, sizes | tile | absent, launch.num_warps))
        kernels.append(
            _shipped(f"conv_last_rows_{dtype}", last_rows_kernel, dtype, sizes | {"BLOCK_C": 256, "BLOCK_W": 4}, 4)
        )
    return kernels


def _shipped(
    name: str, fn: triton.runtime.JITFunction, dtype: str, constexprs: dict[str, object], num_warps: int
) -> ShippedKernel:
    """With states contiguous in FP32."""
    constexprs = constexprs | {"state_tap": 1}
    types = {"x": f"*{dtype}", "y": f"*{dtype}", "weight": f"*{dtype}", "state": "*fp32", "final": "*fp32"}
    types |= {"sequence": "*i64", "starts": "*i64", "lengths": "*i64"}
    signature = {arg: types.get(arg, "i32") for arg in fn.arg_names} | dict.fromkeys(constexprs, "constexpr")
    aligned = ("x_row", "state_n", *types)
    return ShippedKernel(
        name=name,
        fn=fn,
        signature=signature,
        constexprs=constexprs,
        num_warps=num_warps,
        num_stages=1,
        divisible_by_16=tuple(arg for arg in aligned if signature.get(arg, "constexpr") != "constexpr"),
        uses_tensor_cores=False,
    )
