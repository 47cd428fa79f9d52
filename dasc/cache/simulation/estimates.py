"""Estimates of what the paper's models cost on eight Hopper GPUs, from published sizes and rates alone.

None of this was measured. It gives the right order of magnitude and the right proportions between a long prompt and a
short one; for times to rely on, measure a server and ``dasc calibrate``. Derivation, for ``P`` ranks:

- a prompt token takes 2 FLOP for each active parameter, a query-key pair 2 FLOP for each element of query and value
  over all heads and full-attention layers, at ``MATRIX_EFFICIENCY`` of the ranks' peak rate;
- of the active weights about half are routed experts (8 of 256 with 46B parameters are 1.4B of Kimi-Linear's 3B, 10 of
  512 with 77B are 1.5B of Qwen3-Next's 3B). A decode pass reads the other half once; each sequence reads experts of its
  own, and reads and writes its recurrent state; each context token costs its KV. All at ``MEMORY_EFFICIENCY`` of the
  ranks' peak bandwidth;
- a pass takes ``BLOCK_S`` a block besides: two all-reduces and some twenty launches;
- moving a checkpoint reads and writes it: twice its bytes at ``MEMORY_EFFICIENCY`` of the peak bandwidth, and
  ``TRANSFER_LATENCY_S`` for launches and bookkeeping; balanced storage adds one small all-to-all;
- a second forward pass for refresh costs what the method's authors measured: 61.8 ms a hit at 16 tokens, 393.3 ms at
  1,024, a straight line through both.
"""

from __future__ import annotations

from dataclasses import dataclass

from dasc.cache.simulation.cost_model import CostModel

PEAK_FLOP_PER_S = 989.4e12
"""BF16 without sparsity of one H100 SXM (data sheet)."""
PEAK_BYTES_PER_S = 3.35e12
"""HBM3 of one H100 SXM (data sheet)."""
MATRIX_EFFICIENCY = 0.3
MEMORY_EFFICIENCY = 0.6
BLOCK_S = 150e-6
TRANSFER_LATENCY_S = 50e-6
COLLECTIVE_LATENCY_S = 40e-6
TWO_PASS_MS = {16: 61.8, 1024: 393.3}
"""Published cost of a second forward pass, by window in tokens."""

_BF16 = 2


@dataclass(frozen=True)
class ModelSize:
    """Published sizes of one model.

    Attributes:
        active_parameters: used for one token.
        weight_bytes: of one parameter.
        blocks: all blocks.
        attention_layers: full-attention blocks.
        attention_heads: query heads of each.
        query_dim: elements of a query, per head.
        value_dim: elements of a value, per head.
        kv_heads: KV heads; 0 for multi-head latent attention, whose latent every rank keeps in full.
        kv_dim: elements a token keeps in each KV head (key and value), or of the latent.
        dense_state_bytes: one dense checkpoint, all ranks.
    """

    active_parameters: float
    weight_bytes: float
    blocks: int
    attention_layers: int
    attention_heads: int
    query_dim: int
    value_dim: int
    kv_heads: int
    kv_dim: int
    dense_state_bytes: int

    def kv_bytes_per_token(self, ranks: int) -> int:
        """BF16 KV of one token on one rank; a KV head that ranks share is kept on each."""
        heads = max(-(-self.kv_heads // ranks), 1)
        return self.attention_layers * heads * self.kv_dim * _BF16


MODEL_SIZES: dict[str, ModelSize] = {
    # 48B-A3B; 7 MLA layers: latent 512 + 64 rotary, heads of 128 + 64 and 128
    "kimi_linear": ModelSize(3e9, _BF16, 27, 7, 32, 192, 128, 0, 576, 43_417_600),
    # 80B-A3B; 12 gated attention layers: 16 heads and 2 KV heads of 256
    "qwen3_next": ModelSize(3e9, _BF16, 48, 12, 16, 256, 256, 2, 512, 77_266_944),
    # 2.8T in MXFP4, active share not in the paper: taken as 4 %, that of Qwen3.8-2.4T-A95B; attention as Kimi-Linear's
    "kimi_k3": ModelSize(112e9, 0.5, 93, 24, 96, 192, 128, 0, 576, 449_372_160),
}
"""By registry name of the family."""


def estimate_cost(size: ModelSize, ranks: int) -> CostModel:
    """The constants the module's derivation gives on ``ranks`` GPUs.

    Raises:
        ValueError: for no ranks.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be >= 1, got {ranks}")
    flop_per_s = ranks * PEAK_FLOP_PER_S * MATRIX_EFFICIENCY
    rank_bytes_per_s = PEAK_BYTES_PER_S * MEMORY_EFFICIENCY
    pair_flop = 2 * size.attention_layers * size.attention_heads * (size.query_dim + size.value_dim)
    half_weights_s = size.active_parameters * size.weight_bytes / 2 / (ranks * rank_bytes_per_s)
    state_s = 2 * size.dense_state_bytes / (ranks * rank_bytes_per_s)
    move_s_per_byte = 2 / rank_bytes_per_s
    (short, short_ms), (long, long_ms) = sorted(TWO_PASS_MS.items())
    replay_ms = (long_ms - short_ms) / (long - short)
    return CostModel(
        step_s=BLOCK_S * size.blocks,
        prefill_s_per_token=2 * size.active_parameters / flop_per_s,
        prefill_s_per_pair=pair_flop / flop_per_s,
        decode_step_s=half_weights_s,
        decode_s_per_sequence=half_weights_s + state_s,
        decode_s_per_context_token=size.kv_bytes_per_token(ranks) / rank_bytes_per_s,
        load_latency_s=TRANSFER_LATENCY_S,
        load_s_per_byte=move_s_per_byte,
        store_latency_s=TRANSFER_LATENCY_S,
        store_s_per_byte=move_s_per_byte,
        demote_latency_s=TRANSFER_LATENCY_S,
        demote_s_per_byte=move_s_per_byte,
        copy_latency_s=TRANSFER_LATENCY_S,
        copy_s_per_byte=move_s_per_byte,
        collective_latency_s=COLLECTIVE_LATENCY_S,
        two_pass_s=(short_ms - short * replay_ms) * 1e-3,
        two_pass_s_per_token=replay_ms * 1e-3,
    )
