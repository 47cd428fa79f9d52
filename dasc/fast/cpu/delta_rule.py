"""The gated delta rule on the CPU: sequences sorted by length, stepped together a block at a time.

Work goes in *groups* of sequences of similar length whose state and temporaries stay near the caches, and in each group
in *rounds*: block 0 of all its sequences, block 1 of those that are long enough, and so on. A loop runs over blocks,
never over tokens, and many short sequences are few groups. Where no sequence has more than one token, as in decode, one
step takes all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dasc.contract import DeltaRuleOutput, DeltaRuleShape, check_delta_rule, compute_dtype, sequence_spans
from dasc.fast.cpu.block import Factors, advance, gdn_factors, kda_factors
from dasc.fast.cpu.step import step

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

    def heads(self, key_heads: slice, heads: slice) -> _Inputs:
        q, k, v, g, beta = self[:5]
        return self._replace(q=q[:, key_heads], k=k[:, key_heads], v=v[:, heads], g=g[:, heads], beta=beta[:, heads])

    def read(self, rows: Tensor | slice) -> list[Tensor]:
        """``q k v g beta`` of some rows, in the compute dtype and normalised if they are to be."""
        q, k, v, g, beta = (t[rows].to(self.dtype) for t in self[:5])
        if self.l2norm:
            q, k = (t / (t.square().sum(dim=-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
        return [q, k, v, g, beta]


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
    q, k, v, g, beta = (t.flatten(0, 1) for t in (q, k, v, g, beta))
    x = _Inputs(q, k, v, g, beta, scale, use_qk_l2norm, dtype)
    o = v.new_empty(shape.B * shape.T, shape.HV, shape.V)
    final_state = q.new_empty(shape.N, shape.HV, shape.V, shape.K, dtype=dtype)
    with torch.autocast(q.device.type, enabled=False):
        if bool((lengths <= 1).all()):
            _one_step(x, lengths, initial_state, final_state, o)
        else:
            _all_blocks(x, starts, lengths, shape, initial_state, final_state, o, chunk_size)
    return DeltaRuleOutput(o.view(shape.B, shape.T, shape.HV, shape.V), final_state)


def _one_step(x: _Inputs, lengths: Tensor, initial_state: Tensor | None, final_state: Tensor, o: Tensor) -> None:
    """Every sequence has one token or none, so that the tokens stand in the order of the sequences."""
    state = final_state.zero_() if initial_state is None else initial_state.to(x.dtype)
    q, k, v, g, beta = x.read(slice(None))
    if len(q) == len(state):
        o.copy_(step(q, k, v, g, beta, x.scale, state, final_state))
    else:
        live = lengths == 1
        stepped = state[live]
        o.copy_(step(q, k, v, g, beta, x.scale, stepped, stepped))
        final_state.copy_(state)[live] = stepped


def _all_blocks(
    x: _Inputs,
    starts: Tensor,
    lengths: Tensor,
    shape: DeltaRuleShape,
    initial_state: Tensor | None,
    final_state: Tensor,
    o: Tensor,
    chunk_size: int,
) -> None:
    lengths, order = lengths.sort(descending=True, stable=True)
    starts = starts[order]
    for group, key_heads, heads in _groups(lengths.tolist(), shape, chunk_size):
        members = order[group]
        if initial_state is None:
            state = final_state.new_zeros(len(members), heads.stop - heads.start, shape.K, shape.V)
        else:
            state = initial_state[:, heads][members].to(x.dtype).mT.contiguous()
        _run_group(x.heads(key_heads, heads), starts[group], lengths[group], state, o[:, heads], chunk_size)
        final_state[:, heads][members] = state.mT


def _block_width(tokens: int) -> int:
    """The least power of two that holds so many tokens."""
    return 1 << max(tokens - 1, 0).bit_length()


def _at_once(C: int, K: int, V: int) -> int:
    """So many blocks of ``C`` tokens of one value head make a tensor of ``GROUP_ELEMENTS``; at least one."""
    return max(GROUP_ELEMENTS // max(V * K, 2 * C * K, 2 * C * C, C * V), 1)


def _groups(longest_first: list[int], shape: DeltaRuleShape, chunk_size: int) -> Iterator[tuple[slice, slice, slice]]:
    """Cut the sequences, and the heads where one sequence is already too much.

    Yields:
        Sequences (longest first), key heads, and the value heads that read them.
    """
    ratio = shape.HV // shape.H
    first = 0
    while first < shape.N:
        at_once = _at_once(_block_width(min(longest_first[first], chunk_size)), shape.K, shape.V)
        width = min(max(at_once // ratio, 1), shape.H)
        stop = min(first + max(at_once // (width * ratio), 1), shape.N)
        for head in range(0, shape.H, width):
            end = min(head + width, shape.H)
            yield slice(first, stop), slice(head, end), slice(head * ratio, end * ratio)
        first = stop


def _run_group(x: _Inputs, starts: Tensor, lengths: Tensor, state: Tensor, o: Tensor, chunk_size: int) -> None:
    """All blocks of some sequences, longest first; writes to ``state`` ``[n, HV, K, V]`` and to its rows of ``o``.

    A round takes one block of each, or several while all are long enough and there is room. A sequence that ends inside
    a block has its last token repeated there, without decay and without writing. So a pad changes nothing and never
    reads another sequence.
    """
    longest_first, first_row = lengths.tolist(), int(starts[0])
    live, first = len(longest_first), 0
    while first < longest_first[0]:
        while longest_first[live - 1] <= first:
            live -= 1
        tokens = min(longest_first[0] - first, chunk_size)
        C = _block_width(tokens)
        room = _at_once(C, x.k.shape[-1], x.v.shape[-1]) // (live * x.v.shape[-2])
        blocks = max(min((longest_first[live - 1] - first) // C, room), 1)
        if live == 1 and tokens == C:  # one long sequence: views in place of gathered copies
            begin = first_row + first
            rows = slice(begin, begin + blocks * C)
            o[rows] = _round(x, rows, C, None, state[:1])
        else:
            left = (lengths[:live, None] - first).clamp(max=blocks * chunk_size)
            within = torch.arange(blocks * C).view(blocks, 1, C)
            at = (starts[:live, None] + first + within.minimum(left - 1)).flatten()
            pad = (within >= left).flatten(0, 1)
            out = _round(x, at, C, pad, state[:live])
            kept = ~pad.flatten()
            o[at[kept]] = out[kept].to(o.dtype)
        first += blocks * chunk_size


def _round(x: _Inputs, rows: Tensor | slice, C: int, pad: Tensor | None, state: Tensor) -> Tensor:
    """One or several blocks of ``C`` tokens of each of ``n`` sequences.

    Args:
        x: of ``H`` key heads and ``HV`` value heads.
        rows: of the inputs: a block of each sequence, then the next of each.
        C: a power of two.
        pad: ``[len(rows) / C, C]``, true where a row only fills up a block; ``None`` where none does.
        state: ``[n, HV, K, V]`` contiguous, before these blocks and then after them.

    Returns:
        Outputs, ``[len(rows), HV, V]``.
    """
    # [blocks * n, heads, C, ..]
    q, k, v, g, beta = (t.view(-1, C, *t.shape[1:]).transpose(1, 2) for t in x.read(rows))
    if pad is not None:
        beta = beta.masked_fill(pad.unsqueeze(1), 0.0)
        g = g.masked_fill(pad.view(-1, 1, C, *[1] * (g.ndim - 3)), 0.0)
    factors = (gdn_factors if g.ndim == 3 else kda_factors)(q, k, g, beta)
    written = torch.mul(v, beta.unsqueeze(-1), out=state.new_empty(v.shape)).flatten(0, 1)
    o, state = torch.empty_like(written), state.flatten(0, 1)
    for begin in range(0, len(o), len(state)):
        block = slice(begin, begin + len(state))
        advance(Factors(*(t[block] for t in factors)), written[block], x.scale, state, o[block])
    return o.view(v.shape).transpose(1, 2).flatten(0, 1)
