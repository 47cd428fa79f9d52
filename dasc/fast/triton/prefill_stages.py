"""The kernels of prefill, one function for each launch, and how each launch is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dasc.contract import DecayGate, DeltaRuleShape
from dasc.fast.triton.aot import ShippedKernel
from dasc.fast.triton.chunk_table import CHUNK_TOKENS, ChunkTable
from dasc.fast.triton.gates import safe_gate, softplus_gate
from dasc.fast.triton.kda_kernels import kda_solve_kernel
from dasc.fast.triton.launch import SMS, token_rows
from dasc.fast.triton.output_kernels import gdn_output_kernel, kda_output_kernel
from dasc.fast.triton.solve_kernels import gdn_solve_kernel
from dasc.fast.triton.state_kernels import state_kernel

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # q, k, v, g, beta


@dataclass(frozen=True)
class StageLaunch:
    """How the launch of one kernel is cut.

    Attributes:
        block_k: columns of ``K`` at a time.
        block_v: columns of ``V`` at a time, or of a program.
        num_warps: of a program.
        num_stages: of software pipelining.
    """

    block_k: int
    block_v: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class PrefillLaunch:
    """How a prefill is computed.

    Attributes:
        operand: dtype of what goes between the kernels and into matrix products; products are summed in FP32. BF16 for
            BF16 inputs. FP32 for FP16 ones, whose range the state may leave.
        precision: of products of FP32 operands.
        solve: the launch of ``*_solve_kernel``.
        state: of ``state_kernel``.
        output: of ``*_output_kernel``.
    """

    operand: torch.dtype
    precision: str
    solve: StageLaunch
    state: StageLaunch
    output: StageLaunch


def prefill_launch(states: int, K: int, V: int, dtypes: Sequence[torch.dtype], channel_gate: bool) -> PrefillLaunch:
    """The launch for so many states: blocks that leave no register spilled with ``K`` and ``V`` up to 128.

    Args:
        states: sequences times value heads.
        K: key head dimension.
        V: value head dimension.
        dtypes: of ``q``, ``k`` and ``v``.
        channel_gate: KDA.
    """
    k, v = (max(triton.next_power_of_2(size), 16) for size in (K, V))
    if torch.float32 in dtypes:
        return PrefillLaunch(
            operand=torch.float32,
            precision="ieee",
            solve=StageLaunch(16 if channel_gate else min(k, 32), min(v, 32), 8, 1),
            state=StageLaunch(k, min(v, 16 if k > 128 else 32), 8, 1),
            output=StageLaunch(min(k, 32), min(v, 64), 8, 1),
        )
    if torch.float16 in dtypes:
        return PrefillLaunch(
            operand=torch.float32,
            precision="tf32",
            solve=StageLaunch(min(k, 32), min(v, 64), 8 if channel_gate else 4, 1),
            state=StageLaunch(k, min(v, 32), 4, 1 if k > 128 else 2),
            output=StageLaunch(min(k, 32), min(v, 128), 4 if channel_gate else 8, 2),
        )
    # the state's way is serial: programs for all SMs come before large blocks
    if k > 128:
        state = StageLaunch(k, min(v, 32), 8, 2)
    elif states * triton.cdiv(V, 64) >= SMS:
        state = StageLaunch(k, min(v, 64), 8, 2)
    else:
        state = StageLaunch(k, min(v, 32), 4, 3)
    return PrefillLaunch(
        operand=torch.bfloat16,
        precision="tf32",  # of the triangular systems, which stay in FP32
        solve=StageLaunch(min(k, 64), min(v, 64), 8 if channel_gate else 4, 1),
        state=state,
        output=StageLaunch(min(k, 64), min(v, 128), 4 if channel_gate else 8, 2),
    )


class Solved(NamedTuple):
    """What a solve leaves for the state and the outputs.

    Attributes:
        q: rows of queries; GDN's are as given, KDA's scaled and decayed since the start of their chunk.
        k: rows of keys; GDN's are as given, KDA's decayed until the end of their chunk.
        u: ``[tokens, HV, V]``, which :func:`carry` makes the writes.
        w: ``[tokens, HV, K]``.
        decay: ``[HV, tokens]`` FP64, log2 of the decay since the chunk's start (GDN); ``[chunks, HV, K]`` FP32, the
            decay of whole chunks (KDA).
        pairs: ``[tokens, HV, CHUNK_TOKENS]``, what each query gets of each write of its chunk (KDA).
        states: ``[chunks, HV, K, V]``, before each chunk; :func:`carry` writes them.
        scale: of GDN's outputs.
        l2norm: whether GDN's queries have yet to be normalised.
    """

    q: Tensor
    k: Tensor
    u: Tensor
    w: Tensor
    decay: Tensor
    pairs: Tensor | None
    states: Tensor
    scale: float
    l2norm: bool


def solve_gdn(
    inputs: Inputs,
    shape: DeltaRuleShape,
    gate: DecayGate | None,
    scale: float,
    l2norm: bool,
    table: ChunkTable,
    launch: PrefillLaunch,
) -> Solved:
    """Launch ``gdn_solve_kernel``, gates included."""
    q, k, v, g, beta = (token_rows(x) for x in inputs)
    chunks, HV = len(table.chunks), shape.HV
    u = v.new_empty(table.tokens, HV, shape.V, dtype=launch.operand)
    w = v.new_empty(table.tokens, HV, shape.K, dtype=launch.operand)
    decay = v.new_empty(HV, table.tokens, dtype=torch.float64)
    gdn_solve_kernel[(chunks * HV,)](
        k,
        v,
        g,
        beta,
        None if gate is None else gate.A_log.contiguous(),
        None if gate is None else gate.dt_bias.contiguous(),
        table.chunks,
        decay,
        u,
        w,
        0.0 if gate is None or gate.lower_bound is None else gate.lower_bound,
        table.tokens,
        *(stride for x in (k, v, g, beta) for stride in x.stride()[:2]),
        SAFE_GATE=gate is not None and gate.lower_bound is not None,
        NEG_EIGVAL=gate is not None and gate.allow_neg_eigval,
        L2NORM=l2norm,
        H=shape.H,
        **_constants(shape, launch, launch.solve),
    )
    states = v.new_empty(chunks, HV, shape.K, shape.V, dtype=launch.operand)
    return Solved(q, k, u, w, decay, None, states, scale, l2norm)


def solve_kda(
    inputs: Inputs,
    shape: DeltaRuleShape,
    gate: DecayGate | None,
    scale: float,
    l2norm: bool,
    table: ChunkTable,
    launch: PrefillLaunch,
) -> Solved:
    """Launch ``kda_solve_kernel``; the gate has a launch of its own, as each decay is read several times."""
    q, k, v, g, beta = inputs
    if gate is not None:
        g = (
            softplus_gate(g, gate.A_log, gate.dt_bias)
            if gate.lower_bound is None
            else safe_gate(g, gate.A_log, gate.dt_bias, gate.lower_bound)
        )
    q, k, v, g, beta = (token_rows(x) for x in (q, k, v, g, beta))
    chunks, HV = len(table.chunks), shape.HV

    def buffer(*size: int, dtype: torch.dtype = launch.operand) -> Tensor:
        return v.new_empty(size, dtype=dtype)

    solved = Solved(
        q=buffer(table.tokens, HV, shape.K),
        k=buffer(table.tokens, HV, shape.K),
        u=buffer(table.tokens, HV, shape.V),
        w=buffer(table.tokens, HV, shape.K),
        decay=buffer(chunks, HV, shape.K, dtype=torch.float32),
        pairs=buffer(table.tokens, HV, CHUNK_TOKENS),
        states=buffer(chunks, HV, shape.K, shape.V),
        scale=scale,
        l2norm=l2norm,
    )
    kda_solve_kernel[(chunks * HV,)](
        q,
        k,
        v,
        g,
        beta,
        table.chunks,
        solved.u,
        solved.w,
        solved.q,
        solved.k,
        solved.pairs,
        solved.decay,
        scale,
        *(stride for x in (q, k, v, g, beta) for stride in x.stride()[:2]),
        LOGIT=gate is not None,
        NEG_EIGVAL=gate is not None and gate.allow_neg_eigval,
        L2NORM=l2norm,
        H=shape.H,
        **_constants(shape, launch, launch.solve),
    )
    return solved


def carry(
    x: Solved,
    shape: DeltaRuleShape,
    pool: Tensor,
    state_indices: Tensor,
    keep: Tensor | None,
    table: ChunkTable,
    launch: PrefillLaunch,
) -> None:
    """Launch ``state_kernel``; writes to ``x.u``, ``x.states`` and ``pool``."""
    channel_gate = x.pairs is not None
    state_kernel[(shape.N * shape.HV * triton.cdiv(shape.V, launch.state.block_v),)](
        x.k,
        x.w,
        x.u,
        x.decay,
        x.states,
        pool,
        state_indices.contiguous(),
        None if keep is None else keep.contiguous().view(torch.uint8),
        table.sequences,
        table.tokens,
        *x.k.stride()[:2],
        *pool.stride(),
        H=x.k.shape[1],
        CHUNK=table.chunk_size,
        CHANNEL_GATE=channel_gate,
        **_constants(shape, launch, launch.state),
    )


def read_gdn(x: Solved, o: Tensor, shape: DeltaRuleShape, table: ChunkTable, launch: PrefillLaunch) -> None:
    """Launch ``gdn_output_kernel``; writes to ``o``."""
    gdn_output_kernel[_output_grid(shape, table, launch)](
        x.q,
        x.k,
        x.u,
        x.decay,
        x.states,
        o,
        table.chunks,
        x.scale,
        table.tokens,
        *x.q.stride()[:2],
        *x.k.stride()[:2],
        L2NORM=x.l2norm,
        H=shape.H,
        **_constants(shape, launch, launch.output),
    )


def read_kda(x: Solved, o: Tensor, shape: DeltaRuleShape, table: ChunkTable, launch: PrefillLaunch) -> None:
    """Launch ``kda_output_kernel``; writes to ``o``."""
    kda_output_kernel[_output_grid(shape, table, launch)](
        x.q,
        x.pairs,
        x.u,
        x.states,
        o,
        table.chunks,
        **_constants(shape, launch, launch.output),
    )


def _output_grid(shape: DeltaRuleShape, table: ChunkTable, launch: PrefillLaunch) -> tuple[int]:
    return (len(table.chunks) * shape.HV * triton.cdiv(shape.V, launch.output.block_v),)


def _constants(shape: DeltaRuleShape, launch: PrefillLaunch, stage: StageLaunch) -> dict[str, object]:
    """What all kernels of prefill take."""
    return {
        "HV": shape.HV,
        "K": shape.K,
        "V": shape.V,
        "C": CHUNK_TOKENS,
        "BLOCK_K": stage.block_k,
        "BLOCK_V": stage.block_v,
        "OPERAND": tl.bfloat16 if launch.operand == torch.bfloat16 else tl.float32,
        "PRECISION": launch.precision,
        "num_warps": stage.num_warps,
        "num_stages": stage.num_stages,
        "enable_fp_fusion": True,
    }


def shipped() -> list[ShippedKernel]:
    """The kernels as real models launch them, heads of 128 by 128; see :mod:`dasc.fast.triton.aot`."""
    kernels = []
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        for channel_gate in (False, True):
            kind = "kda" if channel_gate else "gdn"
            solve, output = (
                (kda_solve_kernel, kda_output_kernel) if channel_gate else (gdn_solve_kernel, gdn_output_kernel)
            )
            narrow, wide = (prefill_launch(states, 128, 128, [dtype] * 3, channel_gate) for states in (1, SMS))
            kernels.append(_shipped(f"{kind}_solve_{name}", solve, wide, wide.solve, name, channel_gate))
            kernels.append(_shipped(f"{kind}_output_{name}", output, wide, wide.output, name, channel_gate))
            for launch in dict.fromkeys((narrow, wide)):
                for replay in (False, True):
                    full_name = f"{kind}_state{'_replay' if replay else ''}_{name}_v{launch.state.block_v}"
                    kernels.append(_shipped(full_name, state_kernel, launch, launch.state, name, channel_gate, replay))
    return kernels


def _shipped(
    name: str,
    fn: triton.runtime.JITFunction,
    launch: PrefillLaunch,
    stage: StageLaunch,
    dtype: str,
    channel_gate: bool,
    replay: bool = False,
) -> ShippedKernel:
    """A kernel of a layer with 32 value heads, gates computed by it, over an FP32 pool."""
    H = 32 if channel_gate else 16
    shape = DeltaRuleShape(B=1, T=1, H=H, HV=32, K=128, V=128, N=1)
    values: dict[str, object] = {"H": H, "CHANNEL_GATE": channel_gate, "CHUNK": CHUNK_TOKENS}
    values |= {"SAFE_GATE": False, "NEG_EIGVAL": False, "L2NORM": True, "LOGIT": True, "beta_head": 1, "pool_k": 1}
    values |= ({} if channel_gate else {"g_head": 1}) | _constants(shape, launch, stage)
    if not replay:
        values["keep"] = None
    constexprs = {arg: values[arg] for arg in fn.arg_names if arg in values}
    operand = "bf16" if launch.operand == torch.bfloat16 else "fp32"
    types = dict.fromkeys(["q", "k", "v", "g", "beta", "o"], f"*{dtype}")
    types |= dict.fromkeys(["u", "w", "queries", "keys", "pairs", "states"], f"*{operand}")
    types |= dict.fromkeys(["A_log", "dt_bias", "pool"], "*fp32") | dict.fromkeys(["scale", "lower_bound"], "fp32")
    types |= {"chunks": "*i64", "sequences": "*i64", "state_indices": "*i64", "keep": "*u8", "log_since": "*fp64"}
    types["decay"] = "*fp32" if channel_gate else "*fp64"
    if channel_gate:
        types["g"] = "*fp32"  # as the gate's own kernel leaves it
        if fn is not kda_solve_kernel:
            types |= {"q": f"*{operand}", "k": f"*{operand}"}
    signature = {arg: types.get(arg, "i32") for arg in fn.arg_names}
    signature |= dict.fromkeys(constexprs, "constexpr")
    return ShippedKernel(
        name=name,
        fn=fn,
        signature=signature,
        constexprs=constexprs,
        num_warps=stage.num_warps,
        num_stages=stage.num_stages,
        divisible_by_16=tuple(a for a, t in signature.items() if t.startswith("*") or (t == "i32" and a != "tokens")),
        uses_tensor_cores=operand == "bf16",
    )
