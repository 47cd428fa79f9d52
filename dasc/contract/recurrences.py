"""Of the recurrences, their pooled forms, the convolution and the gates."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from dasc.contract.expect import expect_device, expect_integers, expect_shape, expect_slots


class DeltaRuleOutput(NamedTuple):
    """Result of every recurrence, whatever its implementation.

    Attributes:
        o: ``[B, T, HV, V]`` in the dtype of ``v``.
        final_state: ``[N, HV, V, K]`` in the compute dtype; ``N`` is ``B``, or the number of packed sequences.
    """

    o: Tensor
    final_state: Tensor


class ConvOutput(NamedTuple):
    """Result of the short convolution, whatever its implementation.

    Attributes:
        y: ``[B, T, channels]`` in the dtype of the input.
        final_state: ``[N, channels, width - 1]`` in the compute dtype: the last inputs, oldest first.
    """

    y: Tensor
    final_state: Tensor


class DecayGate(NamedTuple):
    """A layer's gates (eq. 2). Given one, a pooled recurrence takes the raw gate input ``a`` as ``g`` and the raw logit
    of the update strength as ``beta``, and computes both gates itself.

    Attributes:
        A_log: ``[HV]``.
        dt_bias: ``[HV]`` (GDN) or ``[HV, K]`` (KDA).
        lower_bound: ``None`` for the softplus gate; of the safe gate otherwise, negative and finite.
        allow_neg_eigval: ``beta = 2 sigmoid(logit)`` in place of ``sigmoid(logit)``.
    """

    A_log: Tensor
    dt_bias: Tensor
    lower_bound: float | None = None
    allow_neg_eigval: bool = False


class RefreshMerge(NamedTuple):
    """The suffix refresh in the same pass as the tokens that follow (section 4.2).

    Sequence ``n`` starts from zero, its first ``tokens[n]`` tokens are the replay. After them the global units are
    taken from the pool's state, the local ones from the replay, and the sequence goes on. With ``tokens[n] = 0`` it
    starts from the pool's state.

    Attributes:
        keep: bool, ``[HV]`` (GDN) or ``[HV, K]`` (KDA), true for the global units.
        tokens: ``[N]`` int64.
    """

    keep: Tensor
    tokens: Tensor


class DeltaRuleShape(NamedTuple):
    """Sizes agreed by :func:`check_delta_rule`. ``N`` counts states: ``B``, or sequences when packed."""

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int


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
    expect_shape("k", k, (B, T, H, K), "[B, T, H, K]")
    if K < 1 or V < 1:
        raise ValueError(f"head dimensions must be positive, got K = {K} and V = {V}")
    if H < 1 or HV < 1 or HV % H:
        raise ValueError(f"value heads must be a positive multiple of key heads, got HV = {HV} and H = {H}")
    expect_shape("v", v, (B, T, HV, V), "[B, T, HV, V]")
    if channel_gate:
        expect_shape("g", g, (B, T, HV, K), "[B, T, HV, K]")
    else:
        expect_shape("g", g, (B, T, HV), "[B, T, HV]")
    expect_shape("beta", beta, (B, T, HV), "[B, T, HV]")
    N = B
    if cu_seqlens is not None:
        if B != 1:
            raise ValueError(f"packed sequences (cu_seqlens) need B = 1, got B = {B}")
        N = len(check_cu_seqlens(cu_seqlens, T)) - 1
    if initial_state is not None:
        expect_shape("initial_state", initial_state, (N, HV, V, K), "[N, HV, V, K]")
    return DeltaRuleShape(B, T, H, HV, K, V, N)


def check_pooled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    state_indices: Tensor,
    *,
    channel_gate: bool,
    gate: DecayGate | None = None,
    cu_seqlens: Tensor | None = None,
    refresh: RefreshMerge | None = None,
    one_token: bool = False,
) -> DeltaRuleShape:
    """The one validator of ``prefill_*`` and ``decode_*``.

    What is on a GPU is not read: there, indices outside the pool, the same index twice and replays longer than their
    sequence are the caller's to avoid.

    Args:
        channel_gate: as in :func:`check_delta_rule`.
        one_token: each sequence must have one token (decode).

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    shape = check_delta_rule(q, k, v, g, beta, channel_gate=channel_gate, cu_seqlens=cu_seqlens)
    if one_token and shape.T != 1:
        raise ValueError(f"q must hold one token a sequence, [N, 1, H, K], got T = {shape.T}")
    if not isinstance(pool, Tensor) or not pool.is_floating_point() or pool.device != q.device or pool.ndim != 4:
        got = f"{pool.dtype} {list(pool.shape)} on {pool.device}" if isinstance(pool, Tensor) else type(pool).__name__
        raise ValueError(f"pool must be floating-point [S, HV, V, K] on {q.device}, got {got}")
    S = pool.shape[0]
    expect_shape("pool", pool, (S, shape.HV, shape.V, shape.K), "[S, HV, V, K]")
    expect_integers("state_indices", state_indices, shape.N, q.device)
    units, axes = ((shape.HV, shape.K), "[HV, K]") if channel_gate else ((shape.HV,), "[HV]")
    if gate is not None:
        check_gate(g, gate.A_log, gate.dt_bias)
        expect_shape("gate.A_log", gate.A_log, (shape.HV,), "[HV]")
        expect_shape("gate.dt_bias", gate.dt_bias, units, axes)
        expect_device("gate.A_log", gate.A_log, q.device)
        expect_device("gate.dt_bias", gate.dt_bias, q.device)
        if gate.lower_bound is not None and not (math.isfinite(gate.lower_bound) and gate.lower_bound < 0):
            raise ValueError(f"gate.lower_bound must be negative and finite, got {gate.lower_bound}")
    if refresh is not None:
        if refresh.keep.dtype != torch.bool:
            raise ValueError(f"refresh.keep must be torch.bool, got {refresh.keep.dtype}")
        expect_shape("refresh.keep", refresh.keep, units, axes)
        expect_device("refresh.keep", refresh.keep, q.device)
        expect_integers("refresh.tokens", refresh.tokens, shape.N, q.device)
    if q.device.type == "cpu":
        expect_slots(state_indices, S)
        if refresh is not None:
            lengths = sequence_spans(shape.B, shape.T, cu_seqlens, q.device)[1]
            if not bool(((refresh.tokens >= 0) & (refresh.tokens <= lengths)).all()):
                raise ValueError(
                    "refresh.tokens must be from 0 to the length of its sequence, "
                    f"got {refresh.tokens.tolist()} for lengths {lengths.tolist()}"
                )
    return shape


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """Promotion of the inputs' dtypes with FP32: FP32 at least, FP64 when any input is FP64."""
    dtype = torch.float32
    for tensor in tensors:
        if tensor is not None:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def check_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Validate the tensors of ``causal_conv1d`` and return the first row and the length of each sequence.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias), ("initial_state", initial_state)):
        if tensor is not None and (not tensor.is_floating_point() or tensor.device != x.device):
            raise ValueError(f"{name} must be floating-point on {x.device}, got {tensor.dtype} on {tensor.device}")
    if x.ndim != 3:
        raise ValueError(f"x must be [B, T, channels], got {list(x.shape)}")
    B, T, C = x.shape
    if weight.ndim != 2 or weight.shape[0] != C or weight.shape[1] < 1:
        raise ValueError(f"weight must be [channels, width] = [{C}, >= 1], got {list(weight.shape)}")
    if bias is not None and tuple(bias.shape) != (C,):
        raise ValueError(f"bias must be [channels] = [{C}], got {list(bias.shape)}")
    if cu_seqlens is not None and B != 1:
        raise ValueError(f"packed sequences (cu_seqlens) need B = 1, got B = {B}")
    starts, lengths = sequence_spans(B, T, cu_seqlens, x.device)
    expected = (len(starts), C, weight.shape[1] - 1)
    if initial_state is not None and tuple(initial_state.shape) != expected:
        raise ValueError(
            f"initial_state must be [N, channels, width - 1] = {list(expected)}, got {list(initial_state.shape)}"
        )
    return starts, lengths


def check_gate(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> None:
    """Validate the arguments of a decay gate.

    Raises:
        ValueError: for tensors that are not floating-point or do not fit together.
    """
    for name, tensor in (("a", a), ("A_log", A_log), ("dt_bias", dt_bias)):
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must be a floating-point tensor, got {tensor.dtype}")
    if dt_bias.ndim - A_log.ndim not in (0, 1) or dt_bias.shape[: A_log.ndim] != A_log.shape:
        raise ValueError(
            "dt_bias must have the axes of A_log, for KDA one more at the end, "
            f"got {list(dt_bias.shape)} with A_log {list(A_log.shape)}"
        )
    if a.ndim and a.shape[-dt_bias.ndim :] != dt_bias.shape:
        raise ValueError(f"a must end in the axes of dt_bias {list(dt_bias.shape)}, got {list(a.shape)}")
