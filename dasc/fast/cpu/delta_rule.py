"""The gated delta rule on the CPU: sequences sorted by length, stepped together a block at a time.

Work goes in *groups* of sequences of similar length whose state and temporaries stay near the caches, and in each group
in *rounds*: block 0 of all its sequences, block 1 of those that are long enough, and so on. A loop runs over blocks,
never over tokens, and many short sequences are few groups. A round of one token is the decode step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dasc.contract import DeltaRuleOutput, DeltaRuleShape, check_delta_rule, compute_dtype, sequence_spans
from dasc.fast.cpu.block import advance, gdn_factors, kda_factors

GROUP_ELEMENTS = 2**19  # of the largest tensor of a group; a few such tensors fit the second-level caches


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
    chunk_size: int = 64,
) -> DeltaRuleOutput:
    """Gated DeltaNet by blocks; see :func:`dasc.fast.chunk_gdn`."""
    return _run(q, k, v, g, beta, False, scale, initial_state, cu_seqlens, use_qk_l2norm, chunk_size)


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
    chunk_size: int = 64,
) -> DeltaRuleOutput:
    """Kimi Delta Attention by blocks; see :func:`dasc.fast.chunk_kda`."""
    return _run(q, k, v, g, beta, True, scale, initial_state, cu_seqlens, use_qk_l2norm, chunk_size)


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
    """Gated DeltaNet for few tokens a sequence; see :func:`dasc.fast.recurrent_gdn`."""
    return _run(q, k, v, g, beta, False, scale, initial_state, cu_seqlens, use_qk_l2norm, 64)


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
    """Kimi Delta Attention for few tokens a sequence; see :func:`dasc.fast.recurrent_kda`."""
    return _run(q, k, v, g, beta, True, scale, initial_state, cu_seqlens, use_qk_l2norm, 64)


class _Inputs(NamedTuple):
    """The inputs of some heads as they came, one row a token ``[B * T, ..]``, and how to read them."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    scale: float
    l2norm: bool
    dtype: torch.dtype


@torch.no_grad()
def _run(
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
    chunk_size: int,
) -> DeltaRuleOutput:
    shape = check_delta_rule(
        q, k, v, g, beta, channel_gate=channel_gate, initial_state=initial_state, cu_seqlens=cu_seqlens
    )
    if not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size must be a positive integer, got {chunk_size!r}")
    scale = shape.K**-0.5 if scale is None else scale
    dtype = compute_dtype(q, k, v, g, beta, initial_state)
    starts, lengths = sequence_spans(shape.B, shape.T, cu_seqlens, q.device)
    lengths, order = lengths.sort(descending=True, stable=True)
    starts = starts[order]
    q, k, v, g, beta = (x.flatten(0, 1) for x in (q, k, v, g, beta))
    o = v.new_empty(shape.B * shape.T, shape.HV, shape.V)
    final_state = q.new_empty(shape.N, shape.HV, shape.V, shape.K, dtype=dtype)
    with torch.autocast(q.device.type, enabled=False):
        for group, key_heads, heads in _groups(lengths.tolist(), shape, chunk_size):
            members = order[group]
            state = final_state.new_zeros(len(members), heads.stop - heads.start, shape.V, shape.K)
            if initial_state is not None:
                state.copy_(initial_state[:, heads][members])
            inputs = _Inputs(
                q[:, key_heads], k[:, key_heads], v[:, heads], g[:, heads], beta[:, heads], scale, use_qk_l2norm, dtype
            )
            _run_group(inputs, starts[group], lengths[group], state, o[:, heads], chunk_size)
            final_state[:, heads][members] = state
    return DeltaRuleOutput(o.view(shape.B, shape.T, shape.HV, shape.V), final_state)


def _block_width(tokens: int) -> int:
    """The least power of two that holds so many tokens."""
    return 1 << max(tokens - 1, 0).bit_length()


def _groups(longest_first: list[int], shape: DeltaRuleShape, chunk_size: int) -> Iterator[tuple[slice, slice, slice]]:
    """Cut sequences and heads so that no tensor of a round has many more than ``GROUP_ELEMENTS``.

    Yields:
        Sequences (longest first), key heads, and the value heads that read them.
    """
    ratio = shape.HV // shape.H
    first = 0
    while first < shape.N:
        C = _block_width(min(longest_first[first], chunk_size))
        at_once = GROUP_ELEMENTS // max(shape.V * shape.K, 2 * C * shape.K, 2 * C * C, C * shape.V)  # value heads
        width = min(max(at_once // ratio, 1), shape.H)
        stop = min(first + max(at_once // (width * ratio), 1), shape.N)
        for head in range(0, shape.H, width):
            end = min(head + width, shape.H)
            yield slice(first, stop), slice(head, end), slice(head * ratio, end * ratio)
        first = stop


def _run_group(x: _Inputs, starts: Tensor, lengths: Tensor, state: Tensor, o: Tensor, chunk_size: int) -> None:
    """All blocks of some sequences, longest first; writes to ``state`` ``[n, HV, V, K]`` and to their rows of ``o``.

    A sequence that ends inside a block has its last token repeated there, without decay and without writing. So a pad
    changes nothing and never reads another sequence.
    """
    for first in range(0, int(lengths[0]), chunk_size):
        live = int((lengths > first).sum())
        begin = starts[:live] + first
        left = (lengths[:live] - first).clamp(max=chunk_size)
        C = _block_width(int(left[0]))
        within = torch.arange(C, device=o.device)
        real = within < left[:, None]  # [live, C]
        rows: Tensor | slice
        if live == 1 and left[0] == C:  # one long sequence: views in place of gathered copies
            rows = slice(int(begin), int(begin) + C)
            o[rows] = _block(x, rows, real, state[:1])
        else:
            rows = (begin[:, None] + within.minimum(left[:, None] - 1)).flatten()
            kept = real.flatten()
            o[rows[kept]] = _block(x, rows, real, state[:live])[kept].to(o.dtype)


def _block(x: _Inputs, rows: Tensor | slice, real: Tensor, state: Tensor) -> Tensor:
    """One block of ``n`` sequences.

    Args:
        x: of ``H`` key heads and ``HV`` value heads.
        rows: ``n * C`` of the inputs' rows, sequence by sequence.
        real: ``[n, C]``, false for pads.
        state: ``[n, HV, V, K]``, written to.

    Returns:
        Outputs, ``[n * C, HV, V]``.
    """
    (n, C), (_, HV, V, K) = real.shape, state.shape
    # [n, heads, C, ..]
    q, k, v, g, beta = (tensor[rows].view(n, C, *tensor.shape[1:]).transpose(1, 2) for tensor in x[:5])
    kq = state.new_empty(n, k.shape[1], C, 2, K)
    kq[:, :, :, 0] = k
    kq[:, :, :, 1] = q
    if x.l2norm:
        kq /= (kq.square().sum(dim=-1, keepdim=True) + 1e-6).sqrt()
    kq[:, :, :, 1] *= x.scale
    pad = ~real.unsqueeze(1)  # [n, 1, C]
    if g.ndim == 4:
        factors = kda_factors(kq, g.to(x.dtype).masked_fill(pad.unsqueeze(-1), 0.0).contiguous())
    else:
        factors = gdn_factors(kq, g.to(x.dtype).masked_fill(pad, 0.0))
    v = v.to(x.dtype).reshape(n * HV, C, V)
    beta = beta.to(x.dtype).masked_fill(pad, 0.0).reshape(n * HV, C, 1)
    out = advance(factors, v, beta, state.view(n * HV, V, K))
    return out.view(n, HV, C, V).transpose(1, 2).flatten(0, 1)
