"""The recurrent layers, with the one-pass suffix refresh of section 4.2: replay, merge and go on within one forward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from dasc.geometry import StateGeometry
from dasc.models.hybrid.batch import PackedBatch
from dasc.models.hybrid.ops import DeltaRuleOps
from dasc.models.hybrid.weights import Linear, WeightReader, rms_norm

# transformers builds the norm of OLMo-Hybrid's output with this epsilon, whatever the configuration says
OLMO_OUTPUT_NORM_EPS = 1e-5


class Projected(NamedTuple):
    """What a recurrent layer projects from its input.

    Attributes:
        qkv: ``[T, channels]``, input of the convolution, segments ``q | k | v``.
        decay: gate input ``a``, ``[T, HV]`` (GDN) or ``[T, HV, K]`` (KDA).
        beta: ``[T, HV]``, before its gate.
        gate: ``[T, HV, V]``, output gate before its activation.
    """

    qkv: Tensor
    decay: Tensor
    beta: Tensor
    gate: Tensor


class Operands(NamedTuple):
    """Arguments of the recurrence for all rows: ``q``, ``k`` ``[1, T, H, K]``, ``v`` ``[1, T, HV, V]`` and gates."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    @classmethod
    def of(cls, qkv: Tensor, g: Tensor, beta: Tensor, geometry: StateGeometry) -> Operands:
        """Split the convolved segments ``[1, T, channels]`` into heads."""
        q, k, v = qkv.split_with_sizes(geometry.conv_segments, dim=-1)
        key, value = (geometry.num_key_heads, geometry.head_k_dim), (geometry.num_value_heads, geometry.head_v_dim)
        return cls(q.reshape(1, -1, *key), k.reshape(1, -1, *key), v.reshape(1, -1, *value), g, beta)

    def rows(self, first: int, end: int | None) -> Operands:
        """Tokens ``first .. end - 1``."""
        return Operands(*(x[:, first:end] for x in self))


class Recurrent(ABC):
    """A recurrent layer; subclasses say what it projects, its decay and its output.

    Attributes:
        geometry: of the model.
        conv_weight: ``[channels, width]``.
        allow_neg_eigval: ``beta`` reaches 2, so that a token may turn what the state holds for a key around.
    """

    geometry: StateGeometry
    conv_weight: Tensor
    allow_neg_eigval: bool = False

    @abstractmethod
    def project(self, x: Tensor) -> Projected:
        """Everything that is linear in the tokens ``[T, hidden]``."""

    @abstractmethod
    def log_decay(self, a: Tensor, ops: DeltaRuleOps) -> Tensor:
        """``g`` from the gate input (eq. 2)."""

    @abstractmethod
    def output(self, o: Tensor, gate: Tensor) -> Tensor:
        """``[T, hidden]`` from the recurrence's output ``[T, HV, V]``."""

    def __call__(
        self,
        x: Tensor,
        packed: PackedBatch,
        temporal: Tensor,
        conv: Tensor,
        global_units: Tensor | None,
        ops: DeltaRuleOps,
    ) -> Tensor:
        """Run windows and new tokens, read and write the states of the sequences.

        Windows run from a zero scratch state. A refreshed sequence goes on from its slot's global units, the scratch's
        local ones and its slot's convolution rows. Each projection and the convolution run once for all rows.

        Args:
            x: ``[W + T, hidden]``.
            packed: layout of the rows.
            temporal: ``[slots, HV, V, K]``, this layer's part of the pool.
            conv: ``[slots, channels, width - 1]``, likewise.
            global_units: ``[units]`` bool; needed when there are windows.
            ops: the operators to compute with.
        """
        geometry, projected = self.geometry, self.project(x)
        first, windows = packed.window_rows, len(packed.refreshed)

        rows = _read(conv, packed)
        rows = torch.cat([rows.new_zeros(windows, *rows.shape[1:]), rows])
        qkv, rows = ops.causal_conv1d(
            projected.qkv[None], self.conv_weight, initial_state=rows, cu_seqlens=packed.conv_cu
        )
        g = self.log_decay(projected.decay, ops)
        beta = ops.beta_gate(projected.beta, allow_neg_eigval=self.allow_neg_eigval)
        operands = Operands.of(qkv, g[None], beta[None], geometry)

        if geometry.kind == "gdn":
            chunk, recurrent = ops.chunk_gdn, ops.recurrent_gdn
        else:
            chunk, recurrent = ops.chunk_kda, ops.recurrent_kda
        state = _read(temporal, packed)
        outputs = []
        if windows:
            assert global_units is not None
            scratch = chunk(*operands.rows(0, first), cu_seqlens=packed.window_cu, use_qk_l2norm=True)
            is_global = global_units.view(geometry.num_value_heads, 1, geometry.units_per_head)
            local = scratch.final_state.to(state.dtype)
            state[packed.refreshed] = torch.where(is_global, state[packed.refreshed], local)
            outputs.append(scratch.o)
        delta_rule = recurrent if packed.single_tokens else chunk
        new = delta_rule(*operands.rows(first, None), initial_state=state, cu_seqlens=packed.new_cu, use_qk_l2norm=True)
        outputs.append(new.o)

        temporal[packed.write_slots] = new.final_state.to(temporal.dtype)
        conv[packed.write_slots] = rows[windows:].to(conv.dtype)
        return self.output(torch.cat(outputs, dim=1)[0], projected.gate)


def _read(pool: Tensor, packed: PackedBatch) -> Tensor:
    """A copy of the sequences' states; zero for one that starts at 0, whatever its slot held before (even NaN)."""
    state = pool[packed.read_slots]
    state[packed.fresh] = 0
    return state


class GatedDeltaNet(Recurrent):
    """A decay for each value head, SiLU output gate; subclasses say how the projections are stored."""

    A_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    norm_eps: float
    qkv: Linear
    a: Linear
    b: Linear
    z: Linear
    out: Linear

    def project(self, x: Tensor) -> Projected:
        gate = self.z(x).view(len(x), self.geometry.num_value_heads, self.geometry.head_v_dim)
        return Projected(self.qkv(x), self.a(x), self.b(x), gate)

    def log_decay(self, a: Tensor, ops: DeltaRuleOps) -> Tensor:
        return ops.softplus_gate(a, self.A_log, self.dt_bias)

    def output(self, o: Tensor, gate: Tensor) -> Tensor:
        gated = rms_norm(o, self.norm, self.norm_eps) * torch.nn.functional.silu(gate)
        return self.out(gated.flatten(1))


class QwenDeltaNet(GatedDeltaNet):
    """Qwen3-Next's recurrent layer: two projections, fused by key head."""

    def __init__(self, weights: WeightReader, name: str, hidden: int, geometry: StateGeometry, eps: float) -> None:
        self.geometry, self.norm_eps = geometry, eps
        heads, bundle, V = geometry.num_key_heads, geometry.bundle, geometry.head_v_dim
        sizes = [geometry.head_k_dim, geometry.head_k_dim, bundle * V, bundle * V]
        qkvz = Linear.read(weights, f"{name}.in_proj_qkvz", heads * sum(sizes), hidden)
        ba = Linear.read(weights, f"{name}.in_proj_ba", heads * 2 * bundle, hidden)
        # stored key head by key head, each with its part of every segment; wanted segment by segment
        self.qkv, self.z = (qkvz.rows(_segments(heads, sizes, part)) for part in ((0, 1, 2), (3,)))
        self.b, self.a = (ba.rows(_segments(heads, [bundle, bundle], part)) for part in ((0,), (1,)))
        self.conv_weight = weights.take(f"{name}.conv1d.weight", geometry.conv_channels, 1, geometry.conv_width)[:, 0]
        self.A_log = weights.take_wide(f"{name}.A_log", geometry.num_value_heads)
        self.dt_bias = weights.take_wide(f"{name}.dt_bias", geometry.num_value_heads)
        self.norm = weights.take_wide(f"{name}.norm.weight", V)
        self.out = Linear.read(weights, f"{name}.out_proj", hidden, geometry.num_value_heads * V)


def _segments(heads: int, sizes: list[int], part: tuple[int, ...]) -> Tensor:
    """Row numbers of some segments, each over all heads, in a weight stored head by head."""
    by_head = torch.arange(heads * sum(sizes)).view(heads, sum(sizes)).split_with_sizes(sizes, dim=1)
    return torch.cat([by_head[i].flatten() for i in part])


class OlmoDeltaNet(GatedDeltaNet):
    """OLMo-Hybrid's recurrent layer: a projection for each operand, and negative eigenvalues unless switched off."""

    def __init__(
        self, weights: WeightReader, name: str, hidden: int, geometry: StateGeometry, allow_neg_eigval: bool
    ) -> None:
        self.geometry, self.allow_neg_eigval, self.norm_eps = geometry, allow_neg_eigval, OLMO_OUTPUT_NORM_EPS
        heads, values = geometry.num_value_heads, geometry.num_value_heads * geometry.head_v_dim

        def read(part: str, out: int) -> Linear:
            return Linear.read(weights, f"{name}.{part}_proj", out, hidden)

        segments = list(zip("qkv", geometry.conv_segments))
        self.qkv = Linear(torch.cat([read(part, size).weight for part, size in segments]))
        self.a, self.b, self.z = read("a", heads), read("b", heads), read("g", values)
        self.out = Linear.read(weights, f"{name}.o_proj", hidden, values)
        width = geometry.conv_width
        taps = [weights.take(f"{name}.{part}_conv1d.weight", size, 1, width) for part, size in segments]
        self.conv_weight = torch.cat(taps)[:, 0]
        self.A_log = weights.take_wide(f"{name}.A_log", heads)
        self.dt_bias = weights.take_wide(f"{name}.dt_bias", heads)
        self.norm = weights.take_wide(f"{name}.o_norm.weight", geometry.head_v_dim)


class KimiDeltaAttention(Recurrent):
    """Kimi-Linear's recurrent layer: a decay for each key channel, sigmoid output gate; softplus or safe decay gate."""

    def __init__(
        self,
        weights: WeightReader,
        name: str,
        hidden: int,
        geometry: StateGeometry,
        eps: float,
        lower_bound: float | None,
    ) -> None:
        self.geometry, self.eps, self.lower_bound = geometry, eps, lower_bound
        heads, D = geometry.num_value_heads, geometry.head_v_dim
        inner = heads * D

        def read(part: str, out: int, size: int) -> Linear:
            return Linear.read(weights, f"{name}.{part}", out, size)

        self.qkv = Linear(torch.cat([read(f"{part}_proj", inner, hidden).weight for part in "qkv"]))
        taps = [weights.take(f"{name}.{part}_conv1d.weight", inner, 1, geometry.conv_width) for part in "qkv"]
        self.conv_weight = torch.cat(taps)[:, 0]
        self.decay_down, self.decay_up = read("f_a_proj", D, hidden), read("f_b_proj", inner, D)
        self.gate_down, self.gate_up = read("g_a_proj", D, hidden), read("g_b_proj", inner, D)
        self.b = read("b_proj", heads, hidden)
        self.A_log = weights.take_heads(f"{name}.A_log", heads)
        self.dt_bias = weights.take_wide(f"{name}.dt_bias", inner).view(heads, D)
        self.norm = weights.take_wide(f"{name}.o_norm.weight", D)
        self.out = read("o_proj", hidden, inner)

    def project(self, x: Tensor) -> Projected:
        shape = (len(x), self.geometry.num_value_heads, self.geometry.head_v_dim)
        decay = self.decay_up(self.decay_down(x)).view(shape)
        gate = self.gate_up(self.gate_down(x)).view(shape)
        return Projected(self.qkv(x), decay, self.b(x), gate)

    def log_decay(self, a: Tensor, ops: DeltaRuleOps) -> Tensor:
        if self.lower_bound is None:
            return ops.softplus_gate(a, self.A_log, self.dt_bias)
        return ops.safe_gate(a, self.A_log, self.dt_bias, self.lower_bound)

    def output(self, o: Tensor, gate: Tensor) -> Tensor:
        gated = rms_norm(o, self.norm, self.eps) * gate.sigmoid()
        return self.out(gated.flatten(1))
