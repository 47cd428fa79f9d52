"""The short causal convolution on the CPU: shifted multiply-adds over pieces of rows that stay in the caches."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from dasc.contract import ConvOutput, check_conv, compute_dtype

PIECE_ELEMENTS = 2**18


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
    (B, T, C), N, before = x.shape, len(starts), weight.shape[1] - 1
    dtype = compute_dtype(x, weight, bias, initial_state)
    taps = weight.to(dtype).T.contiguous()
    offset = weight.new_zeros(C, dtype=dtype) if bias is None else bias.to(dtype)
    stored = x.new_zeros(N, C, before, dtype=dtype) if initial_state is None else initial_state.to(dtype)
    if B * T == 0:
        return ConvOutput(torch.empty_like(x), stored.clone(memory_format=torch.contiguous_format))
    if bool((lengths == 1).all()):
        y, final_state = _one_row(x.flatten(0, 1).to(dtype), taps, offset, stored, activation)
        return ConvOutput(y.to(x.dtype).view(x.shape), final_state)

    # All rows as if they were one sequence, a piece at a time, which is right from each sequence's row `before` on ..
    rows, y, state = x.flatten(0, 1), x.new_empty(B * T, C), stored.mT
    step = max(PIECE_ELEMENTS // max(C, 1), 1)
    for first in range(before, B * T, step):
        piece = rows[first - before : first + step].to(dtype)
        y[first : first + step] = _filter(piece, taps, offset, activation)
    # .. and each sequence's first rows again, after its state.
    first_tokens = torch.arange(min(before, int(lengths.max())))
    at = (starts[:, None] + first_tokens).clamp(max=B * T - 1)
    head = torch.cat([state, rows[at].to(dtype)], dim=1)
    real = first_tokens < lengths[:, None]
    y[at[real]] = _filter(head, taps, offset, activation)[real].to(y.dtype)

    # the last rows: of a short sequence they are still in `head`
    last = torch.arange(before)
    final_state = head[torch.arange(N)[:, None], lengths.clamp(max=before)[:, None] + last]
    long = lengths > before
    final_state[long] = rows[(starts + lengths - before)[long, None] + last].to(dtype)
    return ConvOutput(y.view(x.shape), final_state.mT.contiguous())


def _one_row(x: Tensor, taps: Tensor, offset: Tensor, state: Tensor, activation: str | None) -> tuple[Tensor, Tensor]:
    """``y`` ``[N, C]`` and the new states of sequences of one row each, ``x`` ``[N, C]``: the decode step.

    States stay ``[N, C, before]``: turning them over would cost more than the convolution.
    """
    y = torch.addcmul(offset, x, taps[-1])
    before = state.shape[-1]
    for i in range(before):
        y.addcmul_(state[..., i], taps[i])
    final_state = torch.cat([state[..., 1:], x.unsqueeze(-1)], dim=-1)[..., :before]  # none where none is kept
    return _activated(y, activation), final_state


def _filter(rows: Tensor, taps: Tensor, offset: Tensor, activation: str | None) -> Tensor:
    """``[.., before + m, C]`` to ``[.., m, C]``: every window of ``len(taps)`` rows, weighted, and the activation."""
    m = rows.shape[-2] - len(taps) + 1
    y = torch.addcmul(offset, rows.narrow(-2, 0, m), taps[0])
    for i in range(1, len(taps)):
        y.addcmul_(rows.narrow(-2, i, m), taps[i])
    return _activated(y, activation)


def _activated(y: Tensor, activation: str | None) -> Tensor:
    return torch.nn.functional.silu(y, inplace=True) if activation == "silu" else y
