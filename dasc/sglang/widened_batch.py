"""SGLang's batches for a refresh in one pass: the widened one, and those of its parts for linear attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.utils.common import async_h2d
from torch import Tensor

from dasc.sglang.widening import Widening
from dasc.sglang.windows import Window

UNREAD_SLOT = 0
"""KV slot that SGLang writes for padding, and never reads."""


def widened_batch(runner: Any, batch: Any, widening: Widening) -> ForwardBatch:
    """A copy of ``batch`` with window tokens in it. Lengths of whole sequences are what they were.

    What is projected for window tokens goes to a slot that nobody reads: the table names the slots of the cached K/V.

    Args:
        batch: an extend of text, with its lengths on the CPU.
        widening: of it.
    """
    device = batch.input_ids.device
    new_rows, window_rows = (rows_of(rows, device) for rows in (widening.new_rows, widening.window_rows))

    def widen(values: Tensor, of_windows: Tensor | int) -> Tensor:
        wide = values.new_empty((*values.shape[:-1], widening.total))
        wide[..., new_rows] = values
        wide[..., window_rows] = of_windows
        return wide

    positions = async_h2d(widening.window_positions, dtype=batch.positions.dtype, device=device)
    tokens = async_h2d(widening.window_tokens, dtype=batch.input_ids.dtype, device=device)
    added = async_h2d(widening.added, dtype=torch.int32, device=device)
    lengths = batch.extend_seq_lens + added
    wide = dataclasses.replace(
        batch,
        input_ids=widen(batch.input_ids, tokens),
        positions=widen(batch.positions, positions),
        mrope_positions=None if batch.mrope_positions is None else widen(batch.mrope_positions, positions),
        out_cache_loc=widen(batch.out_cache_loc, UNREAD_SLOT),
        extend_num_tokens=widening.total,
        extend_seq_lens=lengths,
        extend_prefix_lens=batch.extend_prefix_lens - added,
        extend_start_loc=lengths.cumsum(0, dtype=torch.int32) - lengths,
        extend_seq_lens_cpu=_plus(batch.extend_seq_lens_cpu, widening.added),
        extend_prefix_lens_cpu=_plus(batch.extend_prefix_lens_cpu, [-n for n in widening.added]),
        extend_logprob_start_lens_cpu=_plus(batch.extend_logprob_start_lens_cpu, widening.added),
    )
    wide._init_num_token_non_padded(device=device, is_draft_worker=False)
    translator = runner.kv_index_translator
    translator.own_plan(wide).bind(wide, translator)
    return wide


def windows_batch(windows: Sequence[Window], device: torch.device) -> ForwardBatch:
    """Windows as linear attention sees them: sequences that begin with nothing, in their requests' own state slots."""
    lengths = [len(window.tokens) for window in windows]
    rows = [window.row for window in windows]
    seq_lens = async_h2d(lengths, dtype=torch.int32, device=device)
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(windows),
        input_ids=rows_of([token for window in windows for token in window.tokens], device),
        req_pool_indices=rows_of(rows, device),
        req_pool_indices_cpu=torch.tensor(rows),
        seq_lens=seq_lens.long(),
        seq_lens_cpu=torch.tensor(lengths),
        seq_lens_sum=sum(lengths),
        out_cache_loc=None,
        extend_num_tokens=sum(lengths),
        extend_seq_lens=seq_lens,
        extend_prefix_lens=torch.zeros_like(seq_lens),
        extend_start_loc=seq_lens.cumsum(0, dtype=torch.int32) - seq_lens,
        extend_seq_lens_cpu=lengths,
        extend_prefix_lens_cpu=[0] * len(windows),
    )


def rows_of(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Numbers on the device, int64."""
    tensor: Tensor = async_h2d(list(numbers), dtype=torch.int64, device=device)
    return tensor


def _plus(values: Sequence[int], more: Sequence[int]) -> list[int]:
    return [value + one_more for value, one_more in zip(values, more, strict=True)]
