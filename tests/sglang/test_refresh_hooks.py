"""What the hooks of DASC-WR do to SGLang's sizes and batches, one by one."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig

from dasc.sglang.config import Config
from dasc.sglang.refresh import Refresh
from dasc.sglang.serving import Serving
from dasc.sglang.targets import ONE_PASS_TARGETS, REFRESH_TARGETS, TARGETS
from dasc.sglang.windows import Scratch, Window


def refresh(window_tokens: int = 8, rows: int = 2) -> Refresh:
    serving = Serving(Config(plan="auto", load_policy="wr"))
    serving.scratch = Scratch(window_tokens, 1, rows)
    return Refresh(serving)


def hit(prefix: int, row: int = 3, **more: Any) -> SimpleNamespace:
    kv = SimpleNamespace(mamba_cow_src_index=torch.tensor([1]), req_pool_idx=row)
    ids = array("q", range(100, 100 + prefix + 5))
    plain = {"multimodal_inputs": None, "input_embeds": None}
    return SimpleNamespace(kv=kv, prefix_len=prefix, full_untruncated_fill_ids=ids, **(plain | more))


def collected(hooks: Refresh, reqs: Sequence[Any], compressed: bool = True) -> list[Window | None]:
    pool = SimpleNamespace(mamba_ckpt_pool=SimpleNamespace(is_compressed=lambda slot: compressed))
    batch = SimpleNamespace(req_to_token_pool=pool, mamba_cow_dst_indices=None)

    def original(batch: Any, reqs: Sequence[Any]) -> None:
        batch.mamba_cow_dst_indices = torch.tensor([7])

    hooks.collect_hits(original, batch, reqs)
    return hooks._windows.get(batch.mamba_cow_dst_indices, [])


def test_what_is_hooked_is_checked_at_start() -> None:
    assert set(refresh()._serving.hooks) <= {*TARGETS, *REFRESH_TARGETS, *ONE_PASS_TARGETS}


def test_scratch_is_taken_from_the_tokens_that_requests_get() -> None:
    assert refresh().token_limit(lambda configurator, capacity: capacity, None, 100) == 84


@pytest.mark.usefixtures("unwinding")
def test_too_little_kv_stops_the_server_with_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        refresh().token_limit(lambda configurator, capacity: capacity, None, 16)
    assert capfd.readouterr().err.count("\n") == 1


def test_a_resized_kv_pool_keeps_its_scratch_and_the_configuration_is_not_written_to() -> None:
    config = MemoryPoolConfig(max_total_num_tokens=50, max_running_requests=3)
    resized = refresh().resize_kv(lambda pool, config: config, None, config)
    assert resized == dataclasses.replace(config, max_total_num_tokens=66)
    assert config.max_total_num_tokens == 50


def test_scratch_rows_are_never_given_to_requests() -> None:
    def original(configurator: Any, *, max_num_reqs: int) -> ReqToTokenPool:
        return ReqToTokenPool(max_num_reqs, 10, "cpu", enable_memory_saver=False)

    pool = refresh(rows=2).make_rows(original, None, max_num_reqs=4)
    for _ in range(2):
        assert (pool.size, pool.available_size(), len(pool.req_to_token)) == (4, 4, 7)
        assert sorted(pool.alloc_rows(4)) == [1, 2, 3, 4]
        assert pool.alloc_rows(1) is None
        pool.clear()


@pytest.mark.parametrize(("prefix", "tokens"), [(20, tuple(range(112, 120))), (3, (100, 101, 102))])
def test_a_hit_replays_the_end_of_its_prefix(prefix: int, tokens: tuple[int, ...]) -> None:
    assert collected(refresh(), [hit(prefix)]) == [Window(3, prefix, tokens)]


def test_a_dense_hit_needs_no_refresh() -> None:
    hooks = refresh()
    assert collected(hooks, [hit(20)], compressed=False) == [None]
    assert hooks._serving.counters.unrefreshed_hits == 0


@pytest.mark.parametrize("field", ["multimodal_inputs", "input_embeds"])
def test_a_prefix_that_is_more_than_token_ids_is_counted_and_not_replayed(field: str) -> None:
    hooks = refresh()
    assert collected(hooks, [hit(20, **{field: object()}), hit(9, row=4)]) == [
        None,
        Window(4, 9, tuple(range(101, 109))),
    ]
    assert hooks._serving.counters.unrefreshed_hits == 1


def test_a_plan_that_keeps_everything_replays_nothing() -> None:
    hooks = refresh(window_tokens=0, rows=0)
    assert collected(hooks, [hit(20)]) == []
    batch = SimpleNamespace(mamba_cow_dst_indices=torch.tensor([7]))
    assert hooks.forward(lambda runner, forward_batch: forward_batch, None, batch) is batch
