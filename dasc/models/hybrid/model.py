"""A readable hybrid language model for serving: packed requests, state and KV pools of the caller, one-pass refresh."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dasc.geometry import DtypePolicy
from dasc.layout import check_mask
from dasc.models.hybrid.attention import (
    Attention,
    GroupedAttention,
    GroupedAttentionConfig,
    LatentAttention,
)
from dasc.models.hybrid.batch import Batch, KVPool, PackedBatch, StatePool, pack
from dasc.models.hybrid.config import HybridConfig
from dasc.models.hybrid.feed_forward import GatedMLP, MixtureOfExperts
from dasc.models.hybrid.ops import DeltaRuleOps
from dasc.models.hybrid.recurrent import KimiDeltaAttention, OlmoDeltaNet, QwenDeltaNet, Recurrent
from dasc.models.hybrid.weights import WeightReader, rms_norm


@dataclass(frozen=True, eq=False)
class Block:
    """Mixer and MLP, each with a norm and added to the residual stream.

    Attributes:
        mixer: recurrent or full-attention layer.
        index: number of the layer among those of its sort: into ``StatePool`` or ``KVPool``.
        mixer_norm: ``[hidden]``.
        mlp: dense or experts.
        mlp_norm: ``[hidden]``.
        eps: of both norms.
        norms_last: mixer and MLP read the stream as it is, and what they give is normalised (OLMo-Hybrid's attention).
    """

    mixer: Recurrent | Attention
    index: int
    mixer_norm: Tensor
    mlp: GatedMLP | MixtureOfExperts
    mlp_norm: Tensor
    eps: float
    norms_last: bool = False

    def mixer_input(self, x: Tensor) -> Tensor:
        """What the mixer reads of the residual stream."""
        return x if self.norms_last else rms_norm(x, self.mixer_norm, self.eps)

    def add_mixed(self, x: Tensor, mixed: Tensor) -> Tensor:
        """``x`` plus what the mixer gave."""
        return x + (rms_norm(mixed, self.mixer_norm, self.eps) if self.norms_last else mixed)

    def mix(
        self,
        x: Tensor,
        packed: PackedBatch,
        states: StatePool,
        kv: KVPool,
        global_units: Tensor | None,
        ops: DeltaRuleOps,
    ) -> Tensor:
        """``x`` plus the mixer's output; writes this layer's part of ``states`` or of ``kv``."""
        read = self.mixer_input(x)
        if isinstance(self.mixer, Attention):
            return self.add_mixed(x, self.mixer(read, packed, kv.rows[self.index]))
        units = None if global_units is None else global_units[self.index]
        temporal, conv = states.temporal[self.index], states.conv[self.index]
        return self.add_mixed(x, self.mixer(read, packed, temporal, conv, units, ops))

    def feed(self, x: Tensor) -> Tensor:
        """``x`` plus the MLP's output."""
        if self.norms_last:
            return x + rms_norm(self.mlp(x), self.mlp_norm, self.eps)
        return x + self.mlp(rms_norm(x, self.mlp_norm, self.eps))


class HybridModel:
    """Runs the model of ``config``. It owns its weights and nothing else: states and KV live in the caller's pools.

    Args:
        config: of the model.
        weights: by the names that transformers writes (:func:`~dasc.models.hybrid.files.load_hybrid`).
        ops: the recurrent operators, e.g. :mod:`dasc.reference`.
        dtype: to compute in. Norms, routers and gates compute in FP32 or better, recurrences as ``ops`` say.
        device: to compute on.

    Raises:
        ValueError: for weights that are missing, misshapen or left over.
    """

    def __init__(
        self,
        config: HybridConfig,
        weights: Mapping[str, Tensor],
        ops: DeltaRuleOps,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        reader = WeightReader(weights, dtype, torch.device(device))
        self.config, self.ops = config, ops
        self.dtype, self.device = dtype, reader.device
        self.blocks, self.embedding, self.final_norm, self.head = read_layers(config, reader)
        # Qwen3-Next's weights may come with a head for speculation
        reader.check_all_taken(ignored_prefix="mtp." if config.geometry.family == "qwen3_next" else None)

    def with_ops(self, ops: DeltaRuleOps) -> HybridModel:
        """The same model, with the same weights in memory, that computes its recurrent layers with ``ops``."""
        model = copy.copy(self)
        model.ops = ops
        return model

    def new_states(
        self,
        slots: int,
        dtypes: DtypePolicy = DtypePolicy(),  # noqa: B008 - frozen
    ) -> StatePool:
        """A zero pool of ``slots`` states."""
        layers, *state = self.config.geometry.state_shape
        _, *conv = self.config.geometry.conv_shape
        return StatePool(
            temporal=torch.zeros(layers, slots, *state, dtype=dtypes.temporal, device=self.device),
            conv=torch.zeros(layers, slots, *conv, dtype=dtypes.conv, device=self.device),
        )

    def new_kv(self, slots: int) -> KVPool:
        """A zero pool of ``slots`` tokens' K/V, in the model's dtype."""
        shape = (len(self.config.attention_blocks), slots, self.config.attention.kv_width)
        return KVPool(torch.zeros(shape, dtype=self.dtype, device=self.device))

    @torch.no_grad()
    def forward(self, batch: Batch, states: StatePool, kv: KVPool, *, all_tokens: bool = False) -> Tensor:
        """Advance every sequence of the batch by its new tokens, after refreshing those that have a window.

        What a sequence yields depends neither on the others in the batch nor on how its tokens are split over forwards.

        Args:
            batch: the sequences.
            states: read at the sequences' source slots, written at their state slots.
            kv: read at the sequences' first ``start`` KV slots, written at the others.
            all_tokens: logits of all new tokens rather than of each sequence's last.

        Returns:
            Logits ``[N, vocab]``, or ``[new tokens, vocab]`` in the order of the sequences. Replay tokens have none.

        Raises:
            ValueError: for pools of another shape, slots or token ids out of range, a mask of another shape, or last
                logits wanted of a sequence without new tokens.
        """
        self._check(batch, states, kv)
        if not all_tokens and not all(len(s.tokens) for s in batch.sequences):
            raise ValueError("all_tokens must be true when a sequence has no new token: it has no last logits")
        packed = pack(batch, self.device)
        units = None if batch.global_units is None else batch.global_units.to(self.device)
        x = self.embedding[packed.tokens]
        last_recurrent = self.config.geometry.recurrent_layers[-1]
        for number, block in enumerate(self.blocks):
            x = block.mix(x, packed, states, kv, units, self.ops)
            if number == last_recurrent and packed.window_rows:
                # windows are run for the recurrent states alone
                x = x[packed.window_rows :]
                if not len(x):
                    break
                packed = pack(batch, self.device, windows=False)
            x = block.feed(x)
        if not all_tokens:
            x = x[packed.new_cu[1:] - 1]
        return rms_norm(x, self.final_norm, self.config.norm_eps) @ self.head.T

    def _check(self, batch: Batch, states: StatePool, kv: KVPool) -> None:
        config = self.config
        layers, *state = config.geometry.state_shape
        _, *conv = config.geometry.conv_shape
        kv_layers = len(config.attention_blocks)
        for name, pool, expected in (
            ("states.temporal", states.temporal, [layers, states.temporal.shape[1], *state]),
            ("states.conv", states.conv, [layers, states.temporal.shape[1], *conv]),
            ("kv.rows", kv.rows, [kv_layers, kv.rows.shape[1], config.attention.kv_width]),
        ):
            if list(pool.shape) != expected:
                raise ValueError(f"{name} must be {expected}, got {list(pool.shape)}")
        if batch.global_units is not None:
            check_mask(config.geometry, batch.global_units)
        slots = torch.tensor([slot for s in batch.sequences for slot in (s.state_slot, s.read_slot)])
        windows = [s.window for s in batch.sequences if s.window is not None]
        for name, values, end in (
            ("state slots", slots, states.temporal.shape[1]),
            ("kv_slots", torch.cat([s.kv_slots for s in batch.sequences]), kv.rows.shape[1]),
            ("tokens", torch.cat([s.tokens for s in batch.sequences] + windows), config.vocab_size),
        ):
            low, high = int(values.min()), int(values.max())
            if low < 0 or high >= end:
                raise ValueError(f"{name} must be in [0, {end}), got {low} to {high}")


def read_layers(config: HybridConfig, weights: WeightReader) -> tuple[list[Block], Tensor, Tensor, Tensor]:
    """Blocks, embedding ``[vocab, hidden]``, final norm ``[hidden]`` and output projection ``[vocab, hidden]``."""
    prefix, hidden = config.tensor_prefix, config.hidden_size
    blocks = [_read_block(config, weights, number) for number in range(config.geometry.num_blocks)]
    embedding = weights.take(f"{prefix}model.embed_tokens.weight", config.vocab_size, hidden)
    head_name = f"{prefix}lm_head.weight"
    # transformers never ties Kimi's head, whatever the configuration says, and stores it: what is stored counts
    tied = config.tied_embeddings and head_name not in weights
    head = embedding if tied else weights.take(head_name, config.vocab_size, hidden)
    return blocks, embedding, _norm(config, weights, f"{prefix}model.norm"), head


def _norm(config: HybridConfig, weights: WeightReader, name: str) -> Tensor:
    weight = weights.take_wide(f"{name}.weight", config.hidden_size)
    return 1 + weight if config.stores_norm_difference else weight


def _read_block(config: HybridConfig, weights: WeightReader, number: int) -> Block:
    name = f"{config.tensor_prefix}model.layers.{number}"
    geometry, hidden, eps, attention = config.geometry, config.hidden_size, config.norm_eps, config.attention
    recurrent = number in geometry.recurrent_layers
    mixer: Recurrent | Attention
    if recurrent and geometry.family == "qwen3_next":
        mixer = QwenDeltaNet(weights, f"{name}.linear_attn", hidden, geometry, eps)
    elif recurrent and geometry.family == "olmo_hybrid":
        mixer = OlmoDeltaNet(weights, f"{name}.linear_attn", hidden, geometry, config.allow_neg_eigval)
    elif recurrent:
        mixer = KimiDeltaAttention(weights, f"{name}.self_attn", hidden, geometry, eps, config.lower_bound)
    elif isinstance(attention, GroupedAttentionConfig):
        mixer = GroupedAttention(weights, f"{name}.self_attn", hidden, attention, eps)
    else:
        mixer = LatentAttention(weights, f"{name}.self_attn", hidden, attention)
    same_sort = geometry.recurrent_layers if recurrent else config.attention_blocks
    mixer_norm, mlp_norm = _norm_names(geometry.family, recurrent, name, weights)
    return Block(
        mixer=mixer,
        index=same_sort.index(number),
        mixer_norm=_norm(config, weights, f"{name}.{mixer_norm}"),
        mlp=_read_mlp(config, weights, number, name),
        mlp_norm=_norm(config, weights, f"{name}.{mlp_norm}"),
        eps=eps,
        norms_last=geometry.family == "olmo_hybrid" and not recurrent,
    )


def _norm_names(family: str, recurrent: bool, block: str, weights: WeightReader) -> tuple[str, str]:
    """Of the mixer's norm and the MLP's."""
    if family != "olmo_hybrid":
        return "input_layernorm", "post_attention_layernorm"
    if recurrent:
        return "attention_layer_norm", "feedforward_layer_norm"
    # transformers saves the first of these under the name that another norm has in recurrent blocks
    saved = f"{block}.feedforward_layer_norm.weight" in weights
    return "feedforward_layer_norm" if saved else "post_attention_layernorm", "post_feedforward_layernorm"


def _read_mlp(config: HybridConfig, weights: WeightReader, number: int, block: str) -> GatedMLP | MixtureOfExperts:
    name, moe = f"{block}.mlp", f"{block}.mlp" if config.geometry.kind == "gdn" else f"{block}.block_sparse_moe"
    if config.experts is not None and number in config.expert_blocks:
        return MixtureOfExperts(weights, moe, config.hidden_size, config.experts)
    # transformers saves Kimi's dense MLPs under the name of the experts
    dense = moe if f"{moe}.up_proj.weight" in weights else name
    return GatedMLP(weights, dense, config.hidden_size, config.mlp_size)
