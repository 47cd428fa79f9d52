"""The short causal convolution before the recurrence, with the rows that a checkpoint carries of it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from dasc.contract import ConvOutput, check_conv, compute_dtype


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: Literal["silu"] | None = "silu",
) -> ConvOutput:
    """Each channel by itself: ``y_t = act(bias + sum_i weight_i x_{t - (width - 1) + i})``.

    Inputs before the first token are the rows of the state; a sequence shorter than ``width - 1`` keeps some of them.

    Args:
        x: ``[B, T, channels]``.
        weight: ``[channels, width]``; the last tap is the current token's.
        bias: ``[channels]``; zero when ``None``.
        initial_state: ``[N, channels, width - 1]``, oldest row first; zero when ``None``.
        cu_seqlens: ``[N + 1]`` boundaries of packed sequences (then ``B = 1``).
        activation: ``"silu"`` or ``None``.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    if activation not in ("silu", None):
        raise ValueError(f"activation must be 'silu' or None, got {activation!r}")
    starts, lengths = check_conv(x, weight, bias, initial_state, cu_seqlens)
    (B, T, C), N, width = x.shape, len(starts), weight.shape[1]
    dtype = compute_dtype(x, weight, bias, initial_state)

    # every sequence with its rows before it: sequence n begins (width - 1) * n rows later than in the packed tokens
    row = torch.arange(width - 1, device=x.device)
    sequence = torch.arange(N, device=x.device)
    begins = starts + sequence * (width - 1)
    token = torch.arange(B * T, device=x.device) + (sequence.repeat_interleave(lengths) + 1) * (width - 1)
    extended = torch.zeros(B * T + N * (width - 1), C, dtype=dtype, device=x.device)
    extended[token] = x.flatten(0, 1).to(dtype)
    if initial_state is not None:
        extended[begins[:, None] + row] = initial_state.mT.to(dtype)

    y = torch.zeros(B * T, C, dtype=dtype, device=x.device)
    if bias is not None:
        y += bias
    for i in range(width):
        y += weight[:, i].to(dtype) * extended[token - (width - 1) + i]
    if activation == "silu":
        y = torch.nn.functional.silu(y)
    final_state = extended[(begins + lengths)[:, None] + row].mT.contiguous()
    return ConvOutput(y.view(x.shape).to(x.dtype), final_state)
