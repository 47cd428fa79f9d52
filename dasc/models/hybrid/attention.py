"""Full attention over a cache of single tokens: grouped (Qwen3-Next, OLMo-Hybrid) and latent (Kimi-Linear)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from dasc.models.hybrid.batch import PackedBatch
from dasc.models.hybrid.weights import Linear, WeightReader, rms_norm

# transformers builds the norms inside latent attention with its default epsilon, whatever the configuration says
LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True)
class GroupedAttentionConfig:
    """Grouped attention with norms of queries and keys, and rotary positions or none.

    Attributes:
        num_heads: query heads.
        num_kv_heads: KV heads, a divisor of ``num_heads``.
        head_dim: of queries, keys and values.
        rotary_dim: leading channels of a head that are rotated, even; 0 for no positions.
        rope_theta: base of the rotation frequencies.
        bias: the projections have one.
        gated: with an output gate, and a norm for each head by itself (Qwen3-Next); without a gate, all heads are
            normalised together (OLMo-Hybrid).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    bias: bool = False
    gated: bool = True

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"attention heads must be a multiple of {self.num_kv_heads} KV heads, got {self.num_heads}"
            )
        if self.rotary_dim % 2 or not 0 <= self.rotary_dim <= self.head_dim:
            raise ValueError(f"rotary channels must be even and at most {self.head_dim}, got {self.rotary_dim}")

    @property
    def kv_width(self) -> int:
        """Elements of a KV row, ``k | v``."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class LatentAttentionConfig:
    """Multi-head latent attention without positions (Kimi-Linear).

    Attributes:
        num_heads: heads.
        kv_rank: ``kv_lora_rank``, size of the latent.
        q_rank: ``q_lora_rank``; ``None`` for a plain query projection.
        qk_nope_dim: key channels of a head that come from the latent.
        qk_rope_dim: key channels that all heads share; named for rotary positions, which this model does not use.
        v_dim: value channels of a head.
        bias: the projections into latents and the output have one.
    """

    num_heads: int
    kv_rank: int
    q_rank: int | None
    qk_nope_dim: int
    qk_rope_dim: int
    v_dim: int
    bias: bool = False

    @property
    def kv_width(self) -> int:
        """Elements of a KV row, latent and shared key channels."""
        return self.kv_rank + self.qk_rope_dim


AttentionConfig = GroupedAttentionConfig | LatentAttentionConfig


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Softmax attention of ``n`` sequences: ``q`` ``[n, t, H, D]``, ``k`` and ``v`` ``[n, s, Hkv, ..]``.

    ``mask`` ``[n, 1, t, s]`` is true where a query sees a key. Returns ``[n, t, H, Dv]``.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return o.transpose(1, 2)


class Attention(ABC):
    """A full-attention layer; subclasses say what a query, a KV row and the output are."""

    scale: float
    v_dim: int

    @abstractmethod
    def project_q(self, x: Tensor, positions: Tensor) -> Tensor:
        """Queries ``[T, H, D]`` of tokens ``[T, hidden]`` at ``positions`` ``[T]``."""

    @abstractmethod
    def project_kv(self, x: Tensor, positions: Tensor) -> Tensor:
        """KV rows ``[T, kv_width]``."""

    @abstractmethod
    def split_kv(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """``k`` ``[.., Hkv, D]`` and ``v`` ``[.., Hkv, Dv]`` of rows ``[.., kv_width]``."""

    @abstractmethod
    def output(self, x: Tensor, o: Tensor) -> Tensor:
        """``[T, hidden]`` from attended values ``[T, H, Dv]`` and the layer's input."""

    def __call__(self, x: Tensor, packed: PackedBatch, kv: Tensor) -> Tensor:
        """Attend for all rows of the batch and write the new tokens' rows to ``kv``, ``[slots, kv_width]``.

        Rows projected for a replay window serve the window alone and are dropped.
        """
        first = packed.kv_first_row
        # rounded to the cache's dtype at once: a token must see the same row whether it came now or a forward ago
        own = self.project_kv(x[first:], packed.positions[first:]).to(kv.dtype)
        kv[packed.kv_written] = own[packed.window_rows - first :]
        q = self.project_q(x, packed.positions)
        o = q.new_empty(*q.shape[:2], self.v_dim)
        for group in packed.groups:
            run = own[group.rows - first] if group.own_slots is None else kv[group.own_slots]
            k, v = self.split_kv(torch.cat([kv[group.prefix_slots], run], dim=1).to(x.dtype))
            o[group.rows] = attend(q[group.rows], k, v, group.mask, self.scale)
        return self.output(x, o)


class GroupedAttention(Attention):
    """Grouped attention; its KV row is ``k | v``, keys normalised and rotated."""

    def __init__(
        self, weights: WeightReader, name: str, hidden: int, config: GroupedAttentionConfig, eps: float
    ) -> None:
        self.config, self.eps = config, eps
        heads, kv_heads, D, bias = config.num_heads, config.num_kv_heads, config.head_dim, config.bias
        self.scale, self.v_dim = D**-0.5, D
        parts = 2 if config.gated else 1
        q = Linear.read(weights, f"{name}.q_proj", heads * parts * D, hidden, bias=bias)
        row = torch.arange(heads * parts * D).view(heads, parts, D)  # each head's query, then its gate
        self.q, self.gate = q.rows(row[:, 0].flatten()), q.rows(row[:, 1].flatten()) if config.gated else None
        self.k = Linear.read(weights, f"{name}.k_proj", kv_heads * D, hidden, bias=bias)
        self.v = Linear.read(weights, f"{name}.v_proj", kv_heads * D, hidden, bias=bias)
        self.o = Linear.read(weights, f"{name}.o_proj", hidden, heads * D, bias=bias)
        self.q_norm = self._read_norm(weights, f"{name}.q_norm.weight", heads)
        self.k_norm = self._read_norm(weights, f"{name}.k_norm.weight", kv_heads)

    def project_q(self, x: Tensor, positions: Tensor) -> Tensor:
        return self._rotate(self._norm(self.q(x), self.q_norm), positions)

    def project_kv(self, x: Tensor, positions: Tensor) -> Tensor:
        k = self._rotate(self._norm(self.k(x), self.k_norm), positions)
        return torch.cat([k.flatten(1), self.v(x)], dim=-1)

    def split_kv(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        k, v = rows.view(*rows.shape[:-1], 2, self.config.num_kv_heads, self.config.head_dim).unbind(-3)
        return k, v

    def output(self, x: Tensor, o: Tensor) -> Tensor:
        o = o.flatten(1)
        return self.o(o if self.gate is None else o * self.gate(x).sigmoid())

    def _read_norm(self, weights: WeightReader, name: str, heads: int) -> Tensor:
        """``[head_dim]``, stored as the difference to 1, or for all heads together ``[heads * head_dim]``."""
        D = self.config.head_dim
        return 1 + weights.take_wide(name, D) if self.config.gated else weights.take_wide(name, heads * D)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """``[T, heads, D]`` of ``[T, heads * D]``."""
        by_head = (*x.shape[:1], x.shape[1] // self.config.head_dim, self.config.head_dim)
        return rms_norm(x.view(by_head) if self.config.gated else x, weight, self.eps).view(by_head)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Turn the first ``rotary_dim`` channels of ``[T, heads, D]`` by the angle of the position."""
        dim, dtype = self.config.rotary_dim, self.q_norm.dtype
        if not dim:
            return x
        frequency = self.config.rope_theta ** (-torch.arange(0, dim, 2, device=x.device, dtype=dtype) / dim)
        angle = (positions[:, None].to(dtype) * frequency)[:, None]
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b, rest = x[..., : dim // 2], x[..., dim // 2 : dim], x[..., dim:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


class LatentAttention(Attention):
    """Latent attention in its absorbed form: all heads read one key, the cached row, and one value, its latent.

    The up-projection of keys is applied to the queries and that of values to the result, so that keys and values of
    single heads are never built.
    """

    def __init__(self, weights: WeightReader, name: str, hidden: int, config: LatentAttentionConfig) -> None:
        self.config = config
        heads, rank, nope, rope = config.num_heads, config.kv_rank, config.qk_nope_dim, config.qk_rope_dim
        self.scale, self.v_dim = (nope + rope) ** -0.5, rank
        self.q_down: Linear | None = None
        if config.q_rank is not None:
            self.q_down = Linear.read(weights, f"{name}.q_a_proj", config.q_rank, hidden, bias=config.bias)
            self.q_norm = weights.take_wide(f"{name}.q_a_layernorm.weight", config.q_rank)
            self.q = Linear.read(weights, f"{name}.q_b_proj", heads * (nope + rope), config.q_rank)
        else:
            self.q = Linear.read(weights, f"{name}.q_proj", heads * (nope + rope), hidden)
        self.kv_down = Linear.read(weights, f"{name}.kv_a_proj_with_mqa", rank + rope, hidden, bias=config.bias)
        self.kv_norm = weights.take_wide(f"{name}.kv_a_layernorm.weight", rank)
        up = weights.take(f"{name}.kv_b_proj.weight", heads * (nope + config.v_dim), rank)
        up = up.view(heads, nope + config.v_dim, rank)
        self.k_up, self.v_up = up[:, :nope], up[:, nope:]
        self.o = Linear.read(weights, f"{name}.o_proj", hidden, heads * config.v_dim, bias=config.bias)

    def project_q(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.q_down is not None:
            x = rms_norm(self.q_down(x), self.q_norm, LATENT_NORM_EPS)
        q = self.q(x).view(len(x), self.config.num_heads, -1)
        nope, rope = q[..., : self.config.qk_nope_dim], q[..., self.config.qk_nope_dim :]
        return torch.cat([torch.einsum("thd,hdr->thr", nope, self.k_up), rope], dim=-1)

    def project_kv(self, x: Tensor, positions: Tensor) -> Tensor:
        down = self.kv_down(x)
        latent, rope = down[:, : self.config.kv_rank], down[:, self.config.kv_rank :]
        return torch.cat([rms_norm(latent, self.kv_norm, LATENT_NORM_EPS), rope], dim=-1)

    def split_kv(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows.unsqueeze(-2), rows[..., : self.config.kv_rank].unsqueeze(-2)

    def output(self, x: Tensor, o: Tensor) -> Tensor:
        return self.o(torch.einsum("thr,hvr->thv", o, self.v_up).flatten(1))
