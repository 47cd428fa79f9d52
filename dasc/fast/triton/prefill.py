"""The gated delta rule by chunks on a GPU: prefill over pooled states, and ``chunk_*``.

Three kernels, one after another: what each chunk does apart from the state, all chunks at once; the state through the
chunks of each sequence; the outputs, all chunks at once. Between them, bytes a token and value head in BF16 (twice that
from FP32 or FP16 inputs, but for the ``8``), with ``K = V = 128``:

==========  =====================  ========================
buffer      GDN                    KDA
==========  =====================  ========================
u, writes   ``2 V`` = 256          ``2 V`` = 256
w           ``2 K`` = 256          ``2 K`` = 256
states      ``2 K V / 64`` = 512   ``2 K V / 64`` = 512
decays      ``8``                  ``4 K / 64`` = 8
q, k, pairs                        ``4 K + 128`` = 640
gate                               ``4 K`` = 512, if computed
==========  =====================  ========================

``states`` are for each chunk, full or not: of many short sequences there is one ``K V`` for each sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dasc.contract import DecayGate, DeltaRuleOutput, DeltaRuleShape, RefreshMerge, check_delta_rule, check_pooled
from dasc.fast.triton.chunk_table import CHUNK_TOKENS, ChunkTable, chunk_table
from dasc.fast.triton.launch import check_dtypes, on_device_of
from dasc.fast.triton.prefill_stages import Inputs, carry, prefill_launch, read_gdn, read_kda, solve_gdn, solve_kda


@torch.no_grad()
def prefill_gdn(
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
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm: bool = False,
    chunk_size: int = CHUNK_TOKENS,
    refresh: RefreshMerge | None = None,
    table: ChunkTable | None = None,
) -> Tensor:
    """Gated DeltaNet over pooled states; see :func:`dasc.fast.prefill_gdn`.

    Args:
        table: of the batch, from :func:`chunk_table`, for all layers. It stands for ``cu_seqlens``, ``chunk_size`` and
            ``refresh.tokens``, which are then not read, so that nothing waits for the GPU.

    Raises:
        ValueError: also for FP64, or a ``table`` of another batch.
    """
    return _prefill(
        (q, k, v, g, beta), pool, state_indices, False, gate, scale, cu_seqlens, use_qk_l2norm, chunk_size, refresh,
        table,
    )  # fmt: skip


@torch.no_grad()
def prefill_kda(
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
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm: bool = False,
    chunk_size: int = CHUNK_TOKENS,
    refresh: RefreshMerge | None = None,
    table: ChunkTable | None = None,
) -> Tensor:
    """Kimi Delta Attention over pooled states; see :func:`dasc.fast.prefill_kda`, and :func:`prefill_gdn`."""
    return _prefill(
        (q, k, v, g, beta), pool, state_indices, True, gate, scale, cu_seqlens, use_qk_l2norm, chunk_size, refresh,
        table,
    )  # fmt: skip


@torch.no_grad()
def chunk_gdn(
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
    chunk_size: int = CHUNK_TOKENS,
) -> DeltaRuleOutput:
    """Gated DeltaNet by chunks; see :func:`dasc.fast.chunk_gdn`."""
    return _chunk((q, k, v, g, beta), False, scale, initial_state, cu_seqlens, use_qk_l2norm, chunk_size)


@torch.no_grad()
def chunk_kda(
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
    chunk_size: int = CHUNK_TOKENS,
) -> DeltaRuleOutput:
    """Kimi Delta Attention by chunks; see :func:`dasc.fast.chunk_kda`."""
    return _chunk((q, k, v, g, beta), True, scale, initial_state, cu_seqlens, use_qk_l2norm, chunk_size)


def _prefill(
    inputs: Inputs,
    pool: Tensor,
    state_indices: Tensor,
    channel_gate: bool,
    gate: DecayGate | None,
    scale: float | None,
    cu_seqlens: Tensor | None,
    use_qk_l2norm: bool,
    chunk_size: int,
    refresh: RefreshMerge | None,
    table: ChunkTable | None,
) -> Tensor:
    if table is not None:
        cu_seqlens = table.cu_seqlens
    elif cu_seqlens is not None:
        cu_seqlens = cu_seqlens.cpu()  # read twice
    shape = check_pooled(
        *inputs,
        pool,
        state_indices,
        channel_gate=channel_gate,
        gate=gate,
        cu_seqlens=cu_seqlens,
        refresh=refresh,
    )
    device = pool.device
    if table is None:
        replay = None if refresh is None else refresh.tokens
        table = chunk_table(shape.B, shape.T, cu_seqlens, device, replay_tokens=replay, chunk_size=chunk_size)
    elif table.tokens != shape.B * shape.T or len(table.sequences) != shape.N or table.chunks.device != device:
        raise ValueError(
            f"table must be of {shape.B * shape.T} tokens and {shape.N} sequences on {device}, got one of "
            f"{table.tokens} and {len(table.sequences)} on {table.chunks.device}"
        )
    if table.has_replay and refresh is None:
        raise ValueError("refresh must be given with a table that has replayed tokens, got None")
    keep = refresh.keep if refresh is not None and table.has_replay else None
    return _run(inputs, shape, pool, state_indices, channel_gate, gate, scale, use_qk_l2norm, keep, table)


def _chunk(
    inputs: Inputs,
    channel_gate: bool,
    scale: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    use_qk_l2norm: bool,
    chunk_size: int,
) -> DeltaRuleOutput:
    """Over a pool made of the initial state."""
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.cpu()  # read twice
    shape = check_delta_rule(*inputs, channel_gate=channel_gate, initial_state=initial_state, cu_seqlens=cu_seqlens)
    check_dtypes(initial_state=initial_state)
    q = inputs[0]
    table = chunk_table(shape.B, shape.T, cu_seqlens, q.device, chunk_size=chunk_size)
    if initial_state is None:
        pool = q.new_zeros(shape.N, shape.HV, shape.V, shape.K, dtype=torch.float32)
    else:
        pool = initial_state.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    slots = torch.arange(shape.N, device=q.device)
    o = _run(inputs, shape, pool, slots, channel_gate, None, scale, use_qk_l2norm, None, table)
    return DeltaRuleOutput(o, pool)


def _run(
    inputs: Inputs,
    shape: DeltaRuleShape,
    pool: Tensor,
    state_indices: Tensor,
    channel_gate: bool,
    gate: DecayGate | None,
    scale: float | None,
    use_qk_l2norm: bool,
    keep: Tensor | None,
    table: ChunkTable,
) -> Tensor:
    """All kernels on checked arguments; writes to ``pool`` and returns ``o``."""
    check_dtypes(**dict(zip(["q", "k", "v", "g", "beta"], inputs)), pool=pool)
    if gate is not None:
        check_dtypes(A_log=gate.A_log, dt_bias=gate.dt_bias)
    v = inputs[2]
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    if table.tokens == 0:
        return o
    scale = shape.K**-0.5 if scale is None else scale
    launch = prefill_launch(shape.N * shape.HV, shape.K, shape.V, [x.dtype for x in inputs[:3]], channel_gate)
    with on_device_of(v):
        if channel_gate:
            x = solve_kda(inputs, shape, gate, scale, use_qk_l2norm, table, launch)
            carry(x, shape, pool, state_indices, keep, table, launch)
            read_kda(x, o, shape, table, launch)
        else:
            x = solve_gdn(inputs, shape, gate, scale, use_qk_l2norm, table, launch)
            carry(x, shape, pool, state_indices, keep, table, launch)
            read_gdn(x, o, shape, table, launch)
    return o
