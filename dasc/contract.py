"""What the recurrences take and return, checked once for both the reference and the fast path.

Axes and layouts are in ``CONVENTIONS.md``: ``[B, T, H, K]`` inputs, states ``[N, HV, V, K]``, ``g`` the natural log of
the decay.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor


class DeltaRuleOutput(NamedTuple):
    """Result of every recurrence, whatever its implementation.

    Attributes:
        o: ``[B, T, HV, V]`` in the dtype of ``v``.
        final_state: ``[N, HV, V, K]`` in the compute dtype; ``N`` is ``B``, or the number of packed sequences.
    """

    o: Tensor
    final_state: Tensor


class DeltaRuleShape(NamedTuple):
    """Sizes agreed by :func:`check_delta_rule`. ``N`` counts states: ``B``, or sequences when packed."""

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...], axes: str) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must be {axes} = {list(shape)}, got {list(tensor.shape)}")


def check_cu_seqlens(cu_seqlens: Tensor, tokens: int) -> list[int]:
    """Validate packed sequence boundaries and return them as plain integers; the tensor is only read.

    Raises:
        ValueError: unless it is a 1-D integer tensor that starts at 0, never decreases and ends at ``tokens``.
    """
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seqlens must be a 1-D int32 or int64 tensor, got {cu_seqlens.dtype} {list(cu_seqlens.shape)}"
        )
    bounds: list[int] = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != tokens or any(a > b for a, b in itertools.pairwise(bounds)):
        shown = bounds if len(bounds) <= 16 else [*bounds[:8], "...", *bounds[-8:]]
        raise ValueError(f"cu_seqlens must rise from 0 to T = {tokens} without decreasing, got {shown}")
    return bounds


def sequence_spans(batch: int, tokens: int, cu_seqlens: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where each sequence lies when the batch is flattened to ``[B * T, ...]`` rows.

    Returns:
        First row and length of each of the ``N`` sequences, both ``[N]`` int64 on ``device``.

    Raises:
        ValueError: as :func:`check_cu_seqlens`.
    """
    if cu_seqlens is None:
        return torch.arange(batch, device=device) * tokens, torch.full((batch,), tokens, device=device)
    bounds = torch.tensor(check_cu_seqlens(cu_seqlens, tokens), device=device)
    return bounds[:-1], bounds.diff()


def check_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    channel_gate: bool,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> DeltaRuleShape:
    """The one validator of ``recurrent_*`` and ``chunk_*``: shapes, dtypes, devices and packing.

    Args:
        channel_gate: ``g`` is ``[B, T, HV, K]`` (KDA) rather than ``[B, T, HV]`` (GDN).

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    named = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    if initial_state is not None:
        named["initial_state"] = initial_state
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{name} must be a floating-point tensor, got {got}")
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on {q.device} like q, got {tensor.device}")
    for name, tensor in (("q", q), ("v", v)):
        if tensor.ndim != 4:
            raise ValueError(f"{name} must have 4 axes (batch, token, head, dim), got {list(tensor.shape)}")
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    _expect("k", k, (B, T, H, K), "[B, T, H, K]")
    if K < 1 or V < 1:
        raise ValueError(f"head dimensions must be positive, got K = {K} and V = {V}")
    if H < 1 or HV < 1 or HV % H:
        raise ValueError(f"value heads must be a positive multiple of key heads, got HV = {HV} and H = {H}")
    _expect("v", v, (B, T, HV, V), "[B, T, HV, V]")
    if channel_gate:
        _expect("g", g, (B, T, HV, K), "[B, T, HV, K]")
    else:
        _expect("g", g, (B, T, HV), "[B, T, HV]")
    _expect("beta", beta, (B, T, HV), "[B, T, HV]")
    N = B
    if cu_seqlens is not None:
        if B != 1:
            raise ValueError(f"packed sequences (cu_seqlens) need B = 1, got B = {B}")
        N = len(check_cu_seqlens(cu_seqlens, T)) - 1
    if initial_state is not None:
        _expect("initial_state", initial_state, (N, HV, V, K), "[N, HV, V, K]")
    return DeltaRuleShape(B, T, H, HV, K, V, N)


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """Promotion of the inputs' dtypes with FP32: FP32 at least, FP64 when any input is FP64."""
    dtype = torch.float32
    for tensor in tensors:
        if tensor is not None:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype
