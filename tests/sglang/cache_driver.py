"""SGLang's own cache, as its unit-test fixtures build it, under requests that are played as its scheduler plays them.

What runs is SGLang's code: matching, allocation, the deferred copy-on-write, checkpoints, release. Only the forward is
replaced: a request's state is a function of its tokens alone, so that whatever a hit restores can be told right or
wrong.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from sglang.srt.configs.mamba_utils import KimiLinearCacheParams
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req, ScheduleBatch
from sglang.srt.mem_cache import allocation, mamba_checkpoint_pool
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.mem_cache.unified_cache.components.mamba import MambaComponent
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import get_exec
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.mixins import UnifiedRadixCacheFixtures
from torch import Tensor

import dasc.reference
from dasc.cache.counters import Counters
from dasc.sglang.config import Config
from dasc.sglang.pool import CompressedPool
from dasc.sglang.serving import Serving
from tests.sglang.cache_settings import DTYPES, KimiShape, Setting, geometry, layout

COMPRESSED_SLOTS = 24


@dataclass(eq=False)
class Running:
    """A request in the batch.

    Attributes:
        req: SGLang's.
        hit_tokens: of its prompt, found in the cache.
    """

    req: Req
    hit_tokens: int

    @property
    def tokens(self) -> list[int]:
        """All known ones."""
        return [*self.req.origin_input_ids, *self.req.output_ids]

    @property
    def slot(self) -> int:
        """Native slot of its state."""
        return int(self.req.kv.mamba_pool_idx)


class Driver(UnifiedRadixCacheFixtures):
    """A cache and the requests on it.

    Attributes:
        cache: SGLang's ``UnifiedRadixCache``.
        pool: its ``HybridReqToTokenPool``.
        running: requests in the batch.
        counters: of our pool.
    """

    def __init__(self, setting: Setting, compressed_slots: int = COMPRESSED_SLOTS) -> None:
        self.setting, self.cfg = setting, setting.cfg
        self.running: list[Running] = []
        self.counters = Counters()
        self._next_token = 1
        self._patches = contextlib.ExitStack()
        self._patch(fixtures, "get_device", lambda: "cpu")
        if setting.kind == "kda":
            self._patch(fixtures, "Mamba2StateShape", KimiShape)
            self._patch(fixtures, "Mamba2CacheParams", KimiLinearCacheParams)
        if setting.arm == "compressed-only":
            self._serve_with_our_pool(compressed_slots)
        self.cache, self.allocator, self.pool = fixtures.build_fixture(self.cfg)
        self._patches.enter_context(
            get_exec().mamba.override(enable_mamba_extra_buffer=self.cfg.enable_mamba_extra_buffer)
        )
        # the fixtures' allocators hand out single tokens, whatever the tree's page
        self._patch(allocation, "_alloc_page_size", lambda batch: 1)
        self._patch(allocation, "alloc_token_slots", self._alloc_tokens)
        for part in self._views():
            part.fill_(float("nan"))  # whoever reads what was never written shows it

    def _patch(self, target: object, name: str, value: object) -> None:
        self._patches.enter_context(mock.patch.object(target, name, value))

    def _serve_with_our_pool(self, slots: int) -> None:
        serving = Serving(Config(plan="unread"))
        serving.counters = self.counters
        made = CompressedPool(layout(self.setting), slots, "cpu", self.counters)
        self._patch(mamba_checkpoint_pool, "maybe_init_int8_mamba_checkpoint_pool", lambda **sizes: made)
        for name, hook in (
            ("prepare_for_caching_req", serving.prepare),
            ("cleanup_after_caching_req", serving.clean_up),
        ):
            self._patch(MambaComponent, name, _around(getattr(MambaComponent, name), hook))

    def close(self) -> None:
        """Undo what building it changed in SGLang."""
        self._patches.close()

    def _alloc_tokens(self, cache: object, count: int) -> Tensor:
        allocation.evict_from_tree_cache(cache, count)
        slots = self._alloc(self.allocator, count)
        assert slots is not None, "the test asks for more KV than there is"
        return slots

    @property
    def grid(self) -> int:
        """Tokens between the places where states can be cached; 8 where they can be anywhere."""
        return max(64, self.cfg.page_size) if self.cfg.enable_mamba_extra_buffer else 8

    def new_tokens(self, grids: int) -> list[int]:
        """Tokens that no prompt has had yet, as many as fill some grids."""
        start = self._next_token
        self._next_token += grids * self.grid
        return list(range(start, self._next_token))

    @property
    def capacity(self) -> int:
        """States cached after many requests, one at a time; in the dense pool they leave room for one's tracking."""
        checkpoints = self.pool.mamba_ckpt_pool
        if checkpoints is None:
            return int(self.pool.mamba_allocator.size - self.pool.mamba_initial_tracking_slots)
        return int(checkpoints.num_slots)

    # -- requests -----------------------------------------------------------------------------------------------------

    def start(self, tokens: Sequence[int], *, first: int | None = None) -> Running:
        """Admit a request and run its first chunk: match, lock, allocate, load, forward.

        Args:
            tokens: prompt.
            first: tokens of the first chunk; all by default.
        """
        req = Req(
            rid=f"request-{self._rid}",
            origin_input_text="",
            origin_input_ids=array("q", tokens),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=64),
        )
        self._rid += 1
        req.init_next_round_input(self.cache)
        running = Running(req, req.prefix_len)
        req.lock = self.cache.lock(req.last_node)
        self.running.append(running)
        self._extend(running, first)
        return running

    def go_on(self, running: Running, tokens: int | None = None) -> None:
        """Checkpoint what is computed and run the next chunk of the prompt."""
        checkpoint_kv_cache(running.req, self.cache)
        running.req.init_next_round_input()
        self._extend(running, tokens)

    def _extend(self, running: Running, tokens: int | None) -> None:
        req = running.req
        end = len(req.full_untruncated_fill_ids)
        req.extend_end = end if tokens is None else min(req.prefix_len + tokens, end)
        batch = ScheduleBatch.init_new(
            reqs=[req],
            req_to_token_pool=self.pool,
            token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.cache,
            model_config=SimpleNamespace(
                vocab_size=1 << 16, is_encoder_decoder=False, hf_text_config=SimpleNamespace(mamba_chunk_size=64)
            ),
            enable_overlap=False,
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )
        loads = req.kv.mamba_cow_src_index is not None
        batch.prepare_for_extend()
        runner = SimpleNamespace(req_to_token_pool=self.pool, is_draft_worker=False)
        ModelRunner._maybe_execute_deferred_mamba_cow_and_clear(runner, batch)
        if loads:
            self.check_restored(running)
        elif req.prefix_len == 0:
            assert not any(part.any() for part in self._read(running.slot)), (
                "a fresh request starts from zero (fault 11)"
            )
        self._write(running.slot, running.tokens[: req.extend_end])
        if self.cfg.enable_mamba_extra_buffer and batch.mamba_track_mask[0]:
            self._write(int(batch.mamba_track_indices[0]), running.tokens[: req.kv.mamba_last_track_seqlen])

    def prefilled(self, running: Running) -> None:
        """Checkpoint after the whole prompt, as SGLang does before it decodes."""
        checkpoint_kv_cache(running.req, self.cache)

    def decode(self, running: Running, token: int) -> None:
        """Compute the last known token's state and KV, and add the token that it gave."""
        req = running.req
        row, length = self.pool.req_to_token[req.kv.req_pool_idx], req.kv.kv_allocated_len
        if self.cfg.has_swa and length % self.cfg.page_size:
            row[length] = row[length - 1] + 1  # whole pages were allocated
        else:
            row[length] = allocation.alloc_token_slots(self.cache, 1)[0]
        req.output_ids.append(token)
        req.kv.kv_allocated_len += 1
        req.kv.kv_committed_len += 1
        self._write(running.slot, running.tokens)

    def finish(self, running: Running) -> None:
        """End a request and keep its state."""
        running.req.finished_reason = FINISH_LENGTH(length=len(running.req.output_ids))
        self._release(running, checkpoint=True)

    def abort(self, running: Running) -> None:
        """End a request and keep nothing but what it has already left."""
        self._release(running, checkpoint=False)

    def _release(self, running: Running, *, checkpoint: bool) -> None:
        self.running.remove(running)
        release_kv_cache(running.req, self.cache, checkpoint=checkpoint)

    def serve(self, tokens: Sequence[int], outputs: Sequence[int] = ()) -> int:
        """One request from start to finish. Returns the tokens found in the cache."""
        running = self.start(tokens)
        if outputs:
            self.prefilled(running)
        for token in outputs:
            self.decode(running, token)
        self.finish(running)
        self.check()
        return running.hit_tokens

    def matched(self, tokens: Sequence[int]) -> int:
        """Tokens of a prompt that a request would find, without one."""
        return int(fixtures.match_prefix(self.cache, list(tokens)).device_prefix_len)

    def evict(self, states: int) -> int:
        """Evict cached states, the least recently used first. Returns how many went."""
        return int(self.cache.evict(EvictParams(num_tokens=0, mamba_num=states)).mamba_num_evicted)

    def reset(self) -> None:
        """What SGLang does on ``flush_cache``."""
        self.cache.reset()
        self.pool.clear()
        self.allocator.clear()

    def play_any(self, choose: random.Random, starts: Sequence[list[int]]) -> None:
        """One step of one request, or a new one, or an eviction."""
        step = choose.choice(("start", "start", "go_on", "go_on", "decode", "finish", "finish", "abort", "evict"))
        running = choose.choice(self.running) if self.running else None
        if step == "start" and len(self.running) < 4:
            prompt = choose.choice(starts)[: choose.randint(1, 3) * self.grid] + self.new_tokens(choose.randint(1, 2))
            self.start(prompt, first=choose.choice((self.grid, None)))
        elif step == "evict":
            self.evict(choose.randint(1, 3))
        elif running is not None:
            self._step(running, step, choose.choice((self.grid, None)))

    def _step(self, running: Running, step: str, tokens: int | None) -> None:
        req = running.req
        complete = req.extend_end == len(req.origin_input_ids)
        if step == "abort":
            self.abort(running)
        elif not complete:
            self.go_on(running, tokens)
        elif step == "finish":
            self.finish(running)
        elif step == "decode":
            if not req.output_ids:
                self.prefilled(running)
            [token] = self.new_tokens(1)[:1]
            self.decode(running, token)

    # -- states -------------------------------------------------------------------------------------------------------

    def state_of(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The state after these tokens: ``[L, HV, V, K]`` BF16 and ``[L, channels, width - 1]`` FP32."""
        shape = geometry(self.setting)
        digest = hashlib.sha256(array("q", tokens).tobytes()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        temporal = torch.randn(shape.state_shape, generator=generator).to(DTYPES.temporal)
        return temporal, torch.randn(shape.conv_shape, generator=generator)

    def restored(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """What a hit on these tokens must find in its active slot."""
        temporal, conv = self.state_of(tokens)
        if self.setting.arm == "int8":
            quantised = mamba_checkpoint_pool.Int8CheckpointStore.quantize(temporal)
            temporal = mamba_checkpoint_pool.Int8CheckpointStore.dequantize(*quantised, DTYPES.temporal)
        elif self.setting.arm == "compressed-only":
            packed = dasc.reference.pack(temporal.unsqueeze(1), conv.unsqueeze(1), layout(self.setting))
            temporal = dasc.reference.unpack(packed, layout(self.setting)).temporal[:, 0]
        return temporal, conv

    def check_restored(self, running: Running) -> None:
        """Assert that a request's active slot holds the state that its hit stands for, all parts of it (fault 13)."""
        expected = self.restored(running.tokens[: running.hit_tokens])
        for name, found, wanted in zip(("temporal", "conv"), self._read(running.slot), expected):
            assert torch.equal(found, wanted), f"{name} state of a hit on {running.hit_tokens} tokens"

    def _views(self) -> tuple[Tensor, Tensor]:
        cache = self.pool.mamba_pool.mamba_cache
        [conv] = cache.conv
        return cache.temporal, conv.mT if self.setting.kind == "kda" else conv

    def _read(self, slot: int) -> tuple[Tensor, Tensor]:
        temporal, conv = self._views()
        return temporal[:, slot].clone(), conv[:, slot].clone()

    def _write(self, slot: int, tokens: Sequence[int]) -> None:
        temporal, conv = self._views()
        temporal[:, slot], conv[:, slot] = self.state_of(tokens)

    # -- invariants ---------------------------------------------------------------------------------------------------

    @property
    def states_cached(self) -> int:
        """States in the tree."""
        core = self.cache.tree_core
        sizes = core.component_evictable_size(ComponentType.MAMBA), core.component_protected_size(ComponentType.MAMBA)
        return int(sum(sizes))

    def check(self) -> None:
        """Assert that every slot of every pool is free, cached or held by a running request, once (fault 8)."""
        if not self.running:
            self.cache.sanity_check()  # it takes every lock for a leak
        held = sum(1 for running in self.running for _ in self._native_slots(running.req))
        native, cached = self.pool.mamba_allocator, self.states_cached
        free = native.available_size()
        checkpoints = self.pool.mamba_ckpt_pool
        if checkpoints is None:
            assert free + held + cached == native.size, f"{free} free, {held} held, {cached} cached of {native.size}"
        else:
            assert free + held == native.size, f"{free} free, {held} held of {native.size} native slots"
            left = checkpoints.available_size()
            assert left + cached == checkpoints.num_slots, f"{left} free, {cached} cached of {checkpoints.num_slots}"
        slots = self.cache.all_mamba_values_flatten().tolist()
        assert len(set(slots)) == len(slots) == cached, f"cached states share slots: {sorted(slots)}"
        assert 0 not in slots, "slot 0 is reserved"

    def _native_slots(self, req: Req) -> Iterator[Any]:
        if req.kv.holds_mamba:
            yield req.kv.mamba_pool_idx
        if req.kv.mamba_ping_pong_track_buffer is not None:
            yield from (slot for slot in req.kv.mamba_ping_pong_track_buffer.tolist() if slot != -1)


def _around(original: Any, hook: Any) -> Any:
    """``hook(original, ...)`` as a method, as SGLang applies hooks of type AROUND."""

    def hooked(self: object, *args: Any, **kwargs: Any) -> Any:
        return hook(original, self, *args, **kwargs)

    return hooked
