"""Replays where a page of KV holds several tokens, which SGLang's engine does not do for these models on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from dasc.sglang.refresh import _replay_batch
from dasc.sglang.windows import Scratch, Window

PAGE, SLOTS, ROWS = 4, 64, 3


def runner_with(use_mla: bool, scratch: Scratch) -> Any:
    """A runner's pools, filled with random K/V and a random table of whole pages."""
    generator = torch.Generator().manual_seed(3)
    latent = {"kv_lora_rank": 8, "qk_rope_head_dim": 4} if use_mla else {}
    kv = HybridLinearKVPool(
        size=SLOTS + scratch.kv_slots,
        dtype=torch.float32,
        page_size=PAGE,
        head_num=2,
        head_dim=8,
        full_attention_layer_ids=[3, 7],
        device="cpu",
        mamba_pool=None,
        use_mla=use_mla,
        **latent,
    )
    kv.full_kv_pool.use_native_move_kv_cache = True
    for buffer in kv_buffers(kv):
        buffer.copy_(torch.randn(buffer.shape, generator=generator))
    table = torch.zeros(1 + ROWS + scratch.rows, 40, dtype=torch.int32)
    pages = torch.randperm(SLOTS // PAGE, generator=generator) + 1
    for row in range(1, ROWS + 1):
        own = pages[(row - 1) * 5 : row * 5]
        table[row, : 5 * PAGE] = (own[:, None] * PAGE + torch.arange(PAGE)).flatten().int()
    pool = SimpleNamespace(
        req_to_token=table, size=ROWS, req_index_to_mamba_index_mapping=torch.zeros(len(table), dtype=torch.int32)
    )
    return SimpleNamespace(
        req_to_token_pool=pool,
        token_to_kv_pool=kv,
        spec_algorithm=SpeculativeAlgorithm.NONE,
        model_config=SimpleNamespace(model_is_mrope=False),
        kv_index_translator=SimpleNamespace(own_plan=lambda batch: SimpleNamespace(bind=lambda *args: None)),
    )


def kv_buffers(kv: HybridLinearKVPool) -> list[torch.Tensor]:
    pool = kv.full_kv_pool
    return pool.kv_buffer if hasattr(pool, "kv_buffer") else [*pool.k_buffer, *pool.v_buffer]


@pytest.mark.parametrize("use_mla", [False, True], ids=["K and V", "latent"])
def test_a_window_reads_the_stored_tokens_before_it_and_writes_its_own_slots(use_mla: bool) -> None:
    scratch = Scratch(window_tokens=6, page_size=PAGE, rows=2)
    runner = runner_with(use_mla, scratch)
    table, before = runner.req_to_token_pool.req_to_token, [b.clone() for b in kv_buffers(runner.token_to_kv_pool)]
    own_table = table.clone()
    windows = [Window(1, 20, (1, 2, 3, 4, 5, 6)), Window(3, 16, (7, 8, 9))]  # they start inside a page
    [(_, replay)] = scratch.rounds(windows, ROWS + 1, SLOTS + PAGE)
    with get_parallel().override(moe_ep_size=1):
        batch = _replay_batch(runner, replay, torch.tensor([5, 9]))

    assert table[: ROWS + 1].equal(own_table[: ROWS + 1])
    for buffer, old in zip(kv_buffers(runner.token_to_kv_pool), before):
        assert buffer[: SLOTS + PAGE].equal(old[: SLOTS + PAGE])
        for number, window in enumerate(windows):
            row = batch.req_pool_indices[number]
            stored = table[row, : window.start].long()
            assert buffer[stored].equal(buffer[own_table[window.row, : window.start].long()])
            # a backend by pages sees only the first slot of each
            by_page = (table[row, : window.prefix_tokens : PAGE, None] + torch.arange(PAGE)).flatten()
            assert by_page[: window.prefix_tokens].equal(table[row, : window.prefix_tokens].long())
    written = [table[r, w.start : w.prefix_tokens] for r, w in zip(batch.req_pool_indices, windows)]
    assert batch.out_cache_loc.equal(torch.cat(written).long())
    assert int(batch.out_cache_loc.min()) >= SLOTS + PAGE
    assert batch.positions.tolist() == [14, 15, 16, 17, 18, 19, 13, 14, 15]
    assert batch.extend_start_loc.tolist() == [0, 6]
    assert batch.seq_lens.tolist() == [20, 16]
    assert runner.req_to_token_pool.req_index_to_mamba_index_mapping[batch.req_pool_indices].tolist() == [5, 9]
