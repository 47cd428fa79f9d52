"""Which hits can be refreshed in one pass: what SGLang runs, and what a batch asks for."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
from sglang.srt.layers.attention.linear.kda_backend import KDAAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_schedule
from sglang.srt.state_capturer.indexer_topk import get_global_indexer_capturer
from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

# Full attention whose extend writes K/V and then reads all of it from the cache, by the page table. By name of
# --prefill-attention-backend: SGLang's class, and whether that is so of latent attention too. triton, flashinfer in its
# ragged part, and fa3 with latent attention take a forward's own K/V as projected. Others have not been looked at.
FROM_CACHE = {"torch_native": ("TorchNativeAttnBackend", True), "fa3": ("FlashAttentionBackend", False)}

# Of a batch: inputs that a token of the prefix would need too, and outputs or plans that count tokens.
_NOT_WIDENED = (
    "input_embeds",
    "replace_embeds",
    "token_type_ids",
    "mm_token_modalities",
    "ngram_embedding_info",
    "engram_history",
    "encoder_lens",
    "spec_info",
    "multi_item_delimiter_indices",
    "token_indices_to_pool",
    "decision_layouts",
    "global_num_tokens_cpu",
    "tbo_split_seq_index",
)


def server_obstacle(runner: Any) -> str | None:
    """Why no batch of this server can be refreshed in one pass, or ``None``."""
    backend = runner.attn_backend
    if type(backend) is not HybridLinearAttnBackend:
        return f"{type(backend).__name__} does not divide layers into full and linear attention"
    if type(backend.linear_attn_backend) not in (GDNAttnBackend, KDAAttnBackend):
        return f"{type(backend.linear_attn_backend).__name__} is not the linear attention that was looked at"
    full = backend.full_attn_backend
    if isinstance(full, HybridAttnBackend):
        full = full.prefill_backend
    name = runner.prefill_attention_backend_str
    known, latent_too = FROM_CACHE.get(name, ("", False))
    if type(full).__name__ != known or (runner.use_mla_backend and not latent_too):
        kind = "latent attention" if runner.use_mla_backend else "attention"
        return f"{kind} of the backend {name} does not read all K/V of an extend from the cache"
    if get_global_experts_capturer() is not None or get_global_indexer_capturer() is not None:
        return "what layers choose is recorded token by token"
    return None


def batch_obstacle(runner: Any, batch: Any) -> str | None:
    """Why this batch cannot be widened, or ``None``."""
    if batch.forward_mode not in (ForwardMode.EXTEND, ForwardMode.MIXED):
        return f"the forward is {batch.forward_mode.name}"
    for name in _NOT_WIDENED:
        if getattr(batch, name) is not None:
            return f"it has {name}"
    if batch.mm_inputs is not None and any(inputs is not None for inputs in batch.mm_inputs):
        return "it has images or the like"
    if batch.capture_hidden_mode.is_full():
        return "hidden states of all tokens are asked for"
    if not runner.is_generation:
        return "all tokens are pooled"
    if batch.req_pool_indices_cpu is None or batch.extend_seq_lens_cpu is None or batch.forward_metadata_ready:
        return "it was planned elsewhere"
    return None


def widened_obstacle(runner: Any, batch: Any, wide: Any) -> str | None:
    """Why a batch is not run as ``wide``, which it was widened to, or ``None``."""
    schedule = get_schedule()
    chunk = schedule.chunked_prefill_size
    most = chunk if chunk is not None and chunk > 0 else schedule.max_prefill_tokens
    if wide.extend_num_tokens > min(most, runner.max_total_num_tokens):
        return "with its windows it is larger than a forward may be"
    if runner.use_mla_backend and not any(wide.extend_prefix_lens_cpu):
        return "latent attention with nothing before it reads what it projects"
    graphs = runner.prefill_cuda_graph_runner
    if graphs is not None and (graphs.can_run_graph(batch) or graphs.can_run_graph(wide)):
        return "it is run by a prefill CUDA graph"
    return None
