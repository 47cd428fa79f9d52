"""Which hits are refreshed in one pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend, Mamba2AttnBackend
from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
from sglang.srt.layers.attention.linear.kda_backend import KDAAttnBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

from dasc.sglang import forms


class FlashAttentionBackend:
    """Under the name of SGLang's, which a CPU cannot import."""


class TritonAttnBackend:
    pass


def made(kind: type, **values: Any) -> Any:
    backend = object.__new__(kind)
    vars(backend).update(values)
    return backend


def runner(name: str, full: type, linear: type = GDNAttnBackend, mla: bool = False, split: bool = False) -> Any:
    attention = made(full)
    if split:
        attention = made(HybridAttnBackend, prefill_backend=attention, decode_backend=None)
    backend = made(HybridLinearAttnBackend, full_attn_backend=attention, linear_attn_backend=made(linear))
    return SimpleNamespace(
        attn_backend=backend,
        prefill_attention_backend_str=name,
        use_mla_backend=mla,
        is_generation=True,
        max_total_num_tokens=1000,
        prefill_cuda_graph_runner=None,
    )


@pytest.mark.parametrize(
    "served",
    [
        runner("torch_native", TorchNativeAttnBackend),
        runner("torch_native", TorchNativeAttnBackend, KDAAttnBackend, mla=True),
        runner("fa3", FlashAttentionBackend),
        runner("fa3", FlashAttentionBackend, split=True),
    ],
)
def test_attention_that_reads_all_kv_from_the_cache_takes_one_pass(served: Any) -> None:
    assert forms.server_obstacle(served) is None


@pytest.mark.parametrize(
    ("served", "why"),
    [
        (runner("triton", TritonAttnBackend), "attention of the backend triton does not read"),
        (runner("fa3", FlashAttentionBackend, KDAAttnBackend, mla=True), "latent attention of the backend fa3"),
        (runner("fa4", FlashAttentionBackend), "fa4"),
        (runner("fa3", TritonAttnBackend), "fa3"),
        (runner("fa3", FlashAttentionBackend, Mamba2AttnBackend), "Mamba2AttnBackend"),
        (SimpleNamespace(attn_backend=made(TorchNativeAttnBackend)), "TorchNativeAttnBackend does not divide"),
    ],
)
def test_another_one_takes_two(served: Any, why: str) -> None:
    assert why in str(forms.server_obstacle(served))


def test_what_is_recorded_token_by_token_takes_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "get_global_experts_capturer", object)
    assert "recorded" in str(forms.server_obstacle(runner("torch_native", TorchNativeAttnBackend)))


def batch(**more: Any) -> Any:
    values = dict.fromkeys(forms._NOT_WIDENED) | {
        "forward_mode": ForwardMode.EXTEND,
        "mm_inputs": [None, None],
        "capture_hidden_mode": CaptureHiddenMode.LAST,
        "req_pool_indices_cpu": object(),
        "extend_seq_lens_cpu": [3, 4],
        "extend_prefix_lens_cpu": [0, 7],
        "extend_num_tokens": 50,
        "forward_metadata_ready": False,
    }
    return SimpleNamespace(**values | more)


NATIVE = runner("torch_native", TorchNativeAttnBackend)


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.MIXED])
def test_a_batch_of_text_is_widened(mode: ForwardMode) -> None:
    assert forms.batch_obstacle(NATIVE, batch(forward_mode=mode)) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, object()) for name in forms._NOT_WIDENED),
        ("forward_mode", ForwardMode.SPLIT_PREFILL),
        ("mm_inputs", [None, object()]),
        ("capture_hidden_mode", CaptureHiddenMode.FULL),
        ("req_pool_indices_cpu", None),
        ("extend_seq_lens_cpu", None),
        ("forward_metadata_ready", True),
    ],
)
def test_a_batch_that_counts_tokens_or_has_more_than_ids_is_not(field: str, value: Any) -> None:
    assert forms.batch_obstacle(NATIVE, batch(**{field: value})) is not None


@pytest.mark.parametrize(
    ("tokens", "chunk", "largest", "fits"),
    [(50, 50, 99, True), (51, 50, 99, False), (50, -1, 49, False), (50, None, 50, True), (60, -1, 50, False)],
)
def test_no_forward_is_larger_than_sglangs_own_may_be(
    monkeypatch: pytest.MonkeyPatch, tokens: int, chunk: int | None, largest: int, fits: bool
) -> None:
    schedule = SimpleNamespace(chunked_prefill_size=chunk, max_prefill_tokens=largest)
    monkeypatch.setattr(forms, "get_schedule", lambda: schedule)
    obstacle = forms.widened_obstacle(NATIVE, batch(), batch(extend_num_tokens=tokens))
    assert (obstacle is None) == fits


@pytest.mark.parametrize("mla", [False, True])
def test_latent_attention_needs_something_before_the_windows(monkeypatch: pytest.MonkeyPatch, mla: bool) -> None:
    monkeypatch.setattr(forms, "get_schedule", lambda: SimpleNamespace(chunked_prefill_size=100))
    served = runner("torch_native", TorchNativeAttnBackend, KDAAttnBackend, mla)
    assert (forms.widened_obstacle(served, batch(), batch(extend_prefix_lens_cpu=[0, 0])) is not None) == mla


@pytest.mark.parametrize("graphed", [0, 1])
def test_what_a_prefill_graph_would_run_takes_two_passes(monkeypatch: pytest.MonkeyPatch, graphed: int) -> None:
    monkeypatch.setattr(forms, "get_schedule", lambda: SimpleNamespace(chunked_prefill_size=100))
    pair = batch(), batch()
    graphs = SimpleNamespace(can_run_graph=lambda asked: asked is pair[graphed])
    served = SimpleNamespace(**vars(NATIVE) | {"prefill_cuda_graph_runner": graphs})
    assert "graph" in str(forms.widened_obstacle(served, *pair))
