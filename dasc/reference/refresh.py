"""Suffix refresh (section 4.2): how many tokens to replay, and the replay itself on a stack of layers.

The checkpoint of a prefix holds its global units; the local ones are recovered by running the prefix's last tokens
once more from an empty state. What the replay leaves behind is approximate, because history before the window is
missing from every recurrent layer, and with it from the activations that later layers see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

MIN_WINDOW_TOKENS = 4
WindowKV = Literal["replayed", "cached"]


def next_pow2(horizons: Tensor) -> Tensor:
    """``2 ** ceil(log2(H))`` elementwise and exactly, with 0 mapped to 4 (section 4.2).

    Args:
        horizons: ``H`` in tokens, float64, not negative; infinity stays infinity.

    Raises:
        ValueError: for another dtype, negative numbers or NaN.
    """
    if horizons.dtype != torch.float64:
        raise ValueError(f"horizons must be torch.float64, got {horizons.dtype}")
    if not (horizons >= 0).all():
        raise ValueError("horizons must not be negative or NaN")
    mantissa = horizons.frexp().mantissa  # in [1/2, 1); H / mantissa is the power of two above H, unless H is one
    power = torch.where((mantissa == 0.5) | horizons.isinf(), horizons, horizons / mantissa)
    return torch.where(horizons == 0, float(MIN_WINDOW_TOKENS), power)


def unit_windows(horizons: Tensor, mask: Tensor, w_max: int) -> Tensor:
    """``W_u = clamp(next_pow2(H_s), 4, W_max)`` of the local units (eq. 7), 0 for the global ones.

    Args:
        horizons: ``H_s`` in tokens, ``[L, U]`` float64.
        mask: ``[L, U]`` bool, true for global (kept) units.
        w_max: ``W_max`` in tokens, at least 4; the largest window, a power of two or not.

    Returns:
        Tokens, ``[L, U]`` int64.

    Raises:
        ValueError: for a ``w_max`` below 4, a mask of another shape or dtype, or as :func:`next_pow2`.
    """
    if not isinstance(w_max, int) or w_max < MIN_WINDOW_TOKENS:
        raise ValueError(f"w_max must be an integer of at least {MIN_WINDOW_TOKENS} tokens, got {w_max!r}")
    if mask.dtype != torch.bool or mask.shape != horizons.shape:
        raise ValueError(f"mask must be torch.bool {list(horizons.shape)}, got {mask.dtype} {list(mask.shape)}")
    windows = next_pow2(horizons).clamp(MIN_WINDOW_TOKENS, w_max).long()
    return windows.masked_fill(mask, 0)


def replay_window(windows: Tensor, prefix_tokens: int) -> int:
    """``W_replay = min(n_p, max_u W_u)`` over the local units (eq. 7); 0, no replay, when there is none.

    Args:
        windows: of :func:`unit_windows`.
        prefix_tokens: ``n_p``, tokens of the cached prefix.

    Raises:
        ValueError: for a negative ``prefix_tokens``.
    """
    if prefix_tokens < 0:
        raise ValueError(f"prefix_tokens must not be negative, got {prefix_tokens}")
    return min(prefix_tokens, int(windows.max()))


class RecurrentState(NamedTuple):
    """What one sequence carries through one recurrent layer.

    Attributes:
        temporal: ``[HV, V, K]``.
        conv: ``[channels, width - 1]``, oldest row first.
    """

    temporal: Tensor
    conv: Tensor


@dataclass(frozen=True)
class RecurrentLayer:
    """A recurrent layer of the stack, for one sequence.

    Attributes:
        run: ``(x, state) -> (y, state after x)`` with ``x`` and ``y`` ``[T, hidden]``; it must not write to ``state``.
    """

    run: Callable[[Tensor, RecurrentState], tuple[Tensor, RecurrentState]]


@dataclass(frozen=True)
class AttentionLayer:
    """A full-attention layer of the stack, for one sequence. What a KV row holds is the layer's own affair.

    Attributes:
        project_kv: ``(x, position) -> rows`` of the tokens ``x`` ``[T, hidden]``, the first of them at ``position``.
        attend: ``(x, kv) -> y``: ``x`` are the last ``T`` of the tokens whose rows are ``kv``; each attends to its own
            row and those before it.
    """

    project_kv: Callable[[Tensor, int], Tensor]
    attend: Callable[[Tensor, Tensor], Tensor]


def suffix_refresh(
    layers: Sequence[RecurrentLayer | AttentionLayer],
    window_inputs: Tensor,
    *,
    states: Sequence[RecurrentState],
    kv: Sequence[Tensor],
    masks: Tensor,
    prefix_tokens: int,
    window_kv: WindowKV = "replayed",
) -> list[RecurrentState]:
    """Replay the last ``W`` tokens of a prefix from zero and take the local units from the result (section 4.2).

    All units, global ones too, start from a zero temporal and convolution state. With ``window_kv="replayed"`` the
    window attends to the stored KV before it and to K/V that it projects anew and throws away, as the method's authors
    do; with ``"cached"`` to the stored KV alone, causally.

    Args:
        layers: the whole stack, in order.
        window_inputs: embeddings of the window's tokens, ``[W, hidden]``; ``W`` of :func:`replay_window`.
        states: the active state of each recurrent layer as loaded from the checkpoint, at ``prefix_tokens``.
        kv: the stored KV of each attention layer, ``prefix_tokens`` rows.
        masks: ``[L, U]`` bool, true for global units; ``U`` is ``HV``, or ``HV * K`` head-major.
        prefix_tokens: ``n_p``.
        window_kv: what the window's attention reads inside the window.

    Returns:
        New states, one a recurrent layer, in the dtypes given: local units refreshed; global units and convolution rows
        as they were. Nothing is run when there is no local unit.

    Raises:
        ValueError: for a window longer than the prefix or empty, or arguments that do not fit the stack.
    """
    _check_stack(layers, window_inputs, states, kv, masks, prefix_tokens, window_kv)
    if masks.all():
        return [RecurrentState(state.temporal.clone(), state.conv.clone()) for state in states]
    x, start = window_inputs, prefix_tokens - len(window_inputs)
    refreshed: list[RecurrentState] = []
    stored_kv = iter(kv)
    for layer in layers:
        if isinstance(layer, RecurrentLayer):
            state, mask = states[len(refreshed)], masks[len(refreshed)]
            x, scratch = layer.run(x, RecurrentState(torch.zeros_like(state.temporal), torch.zeros_like(state.conv)))
            is_global = mask.reshape(len(state.temporal), 1, -1)  # [HV, 1, 1] for heads, [HV, 1, K] for key channels
            temporal = torch.where(is_global, state.temporal, scratch.temporal.to(state.temporal.dtype))
            refreshed.append(RecurrentState(temporal, state.conv.clone()))
        else:
            rows = next(stored_kv)
            if window_kv == "replayed":
                rows = torch.cat([rows[:start], layer.project_kv(x, start)])
            x = layer.attend(x, rows)
    return refreshed


def _check_stack(
    layers: Sequence[RecurrentLayer | AttentionLayer],
    window_inputs: Tensor,
    states: Sequence[RecurrentState],
    kv: Sequence[Tensor],
    masks: Tensor,
    prefix_tokens: int,
    window_kv: str,
) -> None:
    if window_kv not in ("replayed", "cached"):
        raise ValueError(f"window_kv must be 'replayed' or 'cached', got {window_kv!r}")
    recurrent = sum(isinstance(layer, RecurrentLayer) for layer in layers)
    if len(states) != recurrent or len(kv) != len(layers) - recurrent:
        raise ValueError(
            f"states and kv must be one for each of {recurrent} recurrent and {len(layers) - recurrent} attention "
            f"layers, got {len(states)} and {len(kv)}"
        )
    if masks.dtype != torch.bool or masks.ndim != 2 or masks.shape[0] != recurrent:
        raise ValueError(f"masks must be torch.bool [{recurrent}, U], got {masks.dtype} {list(masks.shape)}")
    for state in states:
        HV, _, K = state.temporal.shape
        if masks.shape[1] not in (HV, HV * K):
            raise ValueError(f"masks must have HV = {HV} or HV * K = {HV * K} units a layer, got {masks.shape[1]}")
    for rows in kv:
        if len(rows) != prefix_tokens:
            raise ValueError(f"kv must hold prefix_tokens = {prefix_tokens} rows a layer, got {len(rows)}")
    window = len(window_inputs)
    if window > prefix_tokens or (window == 0 and not masks.all()):
        raise ValueError(f"window_inputs must be 1 to prefix_tokens = {prefix_tokens} tokens, got {window}")
