"""DASC-WR in SGLang: a compressed hit replays the end of its cached prefix to refresh the omitted units (section 4.2).

In one pass where that can be (:mod:`dasc.sglang.forms`): the windows join the batch (:mod:`dasc.sglang.one_pass`). Else
in two passes: before the forward of a batch with compressed hits, the model runs over the windows of these hits, from
empty states in the requests' own state slots. What the replay projects goes to scratch KV slots; the cached K/V are
read, never written. Then SGLang loads the checkpoints over the refreshed states, which leaves the omitted units as they
are, and runs the batch.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, TypeVar

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils.common import async_h2d
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from dasc.sglang import targets
from dasc.sglang.forms import batch_obstacle, server_obstacle, widened_obstacle
from dasc.sglang.one_pass import OnePass
from dasc.sglang.serving import Serving, stopping
from dasc.sglang.stopwatch import Stopwatch
from dasc.sglang.widened_batch import widened_batch
from dasc.sglang.widening import Widening
from dasc.sglang.windows import Replay, Scratch, Window
from dasc.units import format_bytes

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Refresh:
    """The hooks of one process, all of type AROUND, which it adds to those of ``serving``.

    Args:
        serving: of this process, with load policy ``wr``.
    """

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        # By the destinations of a batch's loads, which SGLang hands from the scheduler's batch to the forward.
        self._windows: MutableMapping[Tensor, list[Window | None]] = WeakTensorKeyDictionary()
        self._stopwatch: Stopwatch | None = None
        self._one_pass = OnePass(serving) if serving.config.refresh == "auto" else None
        self._said: set[str] = set()
        serving.hooks |= {
            targets.TOKEN_LIMIT: self.token_limit,
            targets.MAKE_ROWS: self.make_rows,
            targets.MAKE_KV: self.make_kv,
            targets.RESIZE_KV: self.resize_kv,
            targets.COLLECT_HITS: self.collect_hits,
            targets.FORWARD: self.forward,
        }

    @property
    def _scratch(self) -> Scratch:
        scratch = self._serving.scratch
        assert scratch is not None, "the state pools are sized first"
        return scratch

    # -- memory -------------------------------------------------------------------------------------------------------

    @stopping
    def token_limit(self, original: Callable[..., int], configurator: Any, token_capacity: int) -> int:
        """The scratch KV slots are part of the KV memory, but not of what requests get."""
        tokens = original(configurator, token_capacity)
        if tokens <= self._scratch.kv_slots:
            raise ValueError(
                f"DASC_LOAD_POLICY=wr takes KV of {self._scratch.kv_slots} tokens for windows of up to "
                f"{self._scratch.window_tokens}, but there is KV for {tokens} in all: give it more, or lower DASC_W_MAX"
            )
        return tokens - self._scratch.kv_slots

    def make_kv(self, original: Callable[..., T], configurator: Any, *, max_total_num_tokens: int, **kwargs: Any) -> T:
        """A KV pool whose last slots SGLang's allocator does not know."""
        scratch = self._scratch
        pool: Any = original(configurator, max_total_num_tokens=max_total_num_tokens + scratch.kv_slots, **kwargs)
        if scratch.page_size > 1:
            # the other way of moving K/V is set up for speculative decoding alone
            pool.full_kv_pool.use_native_move_kv_cache = True
        if get_parallel().tp_rank == 0:
            sizes = pool.get_kv_size_bytes()
            pool_bytes = sum(sizes) if isinstance(sizes, tuple) else sizes
            slots = max_total_num_tokens + scratch.kv_slots + scratch.page_size
            logger.info(
                "dasc: scratch for %d windows of up to %d tokens, where a refresh takes two passes, takes %d tokens "
                "(%s) of this rank's KV",
                scratch.rows,
                scratch.window_tokens,
                scratch.kv_slots,
                format_bytes(scratch.kv_slots * pool_bytes // slots),
            )
        return pool  # type: ignore[no-any-return]

    def resize_kv(self, original: Callable[..., T], pool: Any, config: Any) -> T:
        """When SGLang settles the size of its KV pool after graphs are captured, the scratch slots stay."""
        tokens = config.max_total_num_tokens + self._scratch.kv_slots
        return original(pool, dataclasses.replace(config, max_total_num_tokens=tokens))

    def make_rows(self, original: Callable[..., T], configurator: Any, *, max_num_reqs: int, **kwargs: Any) -> T:
        """A table of KV slots whose last rows SGLang does not give to requests."""
        rows = self._scratch.rows
        pool: Any = original(configurator, max_num_reqs=max_num_reqs + rows, **kwargs)
        pool.size -= rows
        pool._alloc_size -= rows
        pool.clear()
        return pool  # type: ignore[no-any-return]

    # -- scheduling ---------------------------------------------------------------------------------------------------

    def collect_hits(self, original: Callable[..., None], batch: Any, reqs: Sequence[Any]) -> None:
        """Note the windows of the hits whose states this batch loads."""
        pool = batch.req_to_token_pool.mamba_ckpt_pool
        windows = [self._window(req, pool) for req in reqs if req.kv.mamba_cow_src_index is not None]
        original(batch, reqs)
        if windows and self._scratch.rows:
            self._windows[batch.mamba_cow_dst_indices] = windows

    def _window(self, req: Any, pool: Any) -> Window | None:
        """The window of a hit, or ``None``: for a dense state, and for a prefix that is more than token ids."""
        if not pool.is_compressed(req.kv.mamba_cow_src_index):
            return None
        if req.multimodal_inputs is not None or req.input_embeds is not None:
            self._serving.counters.unrefreshed_hits += 1
            return None
        end = req.prefix_len
        tokens = req.full_untruncated_fill_ids[max(end - self._scratch.window_tokens, 0) : end]
        return Window(req.kv.req_pool_idx, end, tuple(tokens))

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(self, original: Callable[..., T], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> T:
        """A forward that loads checkpoints refreshes the slots that they are loaded into."""
        slots = forward_batch.mamba_cow_dst_indices
        if slots is None or not self._scratch.rows:
            return original(runner, forward_batch, *args, **kwargs)
        windows, counters = self._windows.pop(slots), self._serving.counters
        known = [window for window in windows if window is not None]
        runner.req_to_token_pool.mamba_pool.clear_slots(slots)
        if not known:
            return original(runner, forward_batch, *args, **kwargs)
        widened = self._widened(runner, forward_batch, known)
        counters.refresh_tokens += sum(len(window.tokens) for window in known)
        counters.refreshed_hits["two_pass" if widened is None else "one_pass"] += len(known)
        if widened is not None:
            assert self._one_pass is not None
            return self._one_pass.forward(original, runner, forward_batch, *widened, *args, **kwargs)
        self._replay(original, runner, slots, windows)
        return original(runner, forward_batch, *args, **kwargs)

    def _widened(self, runner: Any, batch: Any, windows: Sequence[Window]) -> tuple[ForwardBatch, Widening] | None:
        """The batch that takes one pass over ``windows`` too, or ``None`` when that cannot be. The log says why."""
        never = "DASC_REFRESH asks for it" if self._one_pass is None else server_obstacle(runner)
        if never is not None:
            self._say(f"compressed hits are refreshed in two passes: {never}")
            return None
        self._say("compressed hits are refreshed in one pass, by the batch that they are in")
        obstacle = batch_obstacle(runner, batch)
        if obstacle is None:
            widening = Widening.of(batch.req_pool_indices_cpu.tolist(), batch.extend_seq_lens_cpu, windows)
            wide = widened_batch(runner, batch, widening)
            obstacle = widened_obstacle(runner, batch, wide)
            if obstacle is None:
                return wide, widening
        self._say(f"two passes for a batch with compressed hits: {obstacle}")
        return None

    def _say(self, line: str) -> None:
        """In the log, once."""
        if line not in self._said and get_parallel().tp_rank == 0:
            logger.info("dasc: %s", line)
        self._said.add(line)

    def _replay(
        self, model_forward: Callable[..., Any], runner: Any, slots: Tensor, windows: Sequence[Window | None]
    ) -> None:
        """The first of two passes."""
        if self._stopwatch is None:
            self._stopwatch = Stopwatch(self._count_seconds, slots.device)
        table = runner.req_to_token_pool
        places = [place for place, window in enumerate(windows) if window is not None]
        known = [window for window in windows if window is not None]
        first_slot = runner.token_to_kv_pool_allocator.size + self._scratch.page_size
        with self._stopwatch.timed():
            for part, replay in self._scratch.rounds(known, table.size + 1, first_slot):
                own = slots[async_h2d(places[part], dtype=torch.int64, device=slots.device)]
                batch = _replay_batch(runner, replay, own)
                model_forward(runner, batch, None)
                # else the scheduler took the end of the replay's reads for that of the batch's
                runner.shared_read_done_event = None

    def _count_seconds(self, seconds: float) -> None:
        self._serving.counters.refresh_s += seconds


def _replay_batch(runner: Any, replay: Replay, state_slots: Tensor) -> ForwardBatch:
    """The forward over ``replay``, its rows of the table filled in."""
    device = state_slots.device

    def on_device(values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        tensor: Tensor = async_h2d(values, dtype=dtype, device=device)
        return tensor

    pool, table = runner.req_to_token_pool, runner.req_to_token_pool.req_to_token
    rows, own_rows = on_device(replay.rows), on_device(replay.own_rows)
    positions, slots = on_device(replay.positions), on_device(replay.slots)
    stored = max(replay.starts)
    table[rows, :stored] = table[own_rows, :stored]
    table[on_device(replay.token_rows), positions] = slots.to(table.dtype)
    if replay.copy_slots:
        copy_positions, copies = on_device(replay.copy_positions), on_device(replay.copy_slots)
        originals = table[on_device(replay.copy_rows), copy_positions]
        runner.token_to_kv_pool.move_kv_cache(copies, originals.to(copies.dtype))
        table[on_device(replay.copy_token_rows), copy_positions] = copies.to(table.dtype)
    mamba_indices = pool.req_index_to_mamba_index_mapping
    mamba_indices[rows] = state_slots.to(mamba_indices.dtype)

    ends = replay.ends
    lengths = on_device(replay.lengths, torch.int32)
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(replay.rows),
        input_ids=on_device(replay.tokens),
        req_pool_indices=rows,
        req_pool_indices_cpu=torch.tensor(replay.rows),
        seq_lens=on_device(ends),
        seq_lens_cpu=torch.tensor(ends),
        seq_lens_sum=sum(ends),
        orig_seq_lens=on_device(ends, torch.int32),
        out_cache_loc=slots,
        positions=positions,
        extend_num_tokens=len(replay.tokens),
        extend_seq_lens=lengths,
        extend_prefix_lens=on_device(replay.starts, torch.int32),
        extend_start_loc=lengths.cumsum(0, dtype=torch.int32) - lengths,
        extend_seq_lens_cpu=list(replay.lengths),
        extend_prefix_lens_cpu=list(replay.starts),
        extend_logprob_start_lens_cpu=list(replay.lengths),
        capture_hidden_mode=CaptureHiddenMode.NULL,
        spec_algorithm=runner.spec_algorithm,
        is_extend_in_batch=True,
        global_forward_mode=ForwardMode.EXTEND,
    )
    if runner.model_config.model_is_mrope:
        batch.mrope_positions = positions.expand(3, -1)  # of text
    batch._init_num_token_non_padded(device=device, is_draft_worker=False)
    translator = runner.kv_index_translator
    translator.own_plan(batch).bind(batch, translator)
    return batch
