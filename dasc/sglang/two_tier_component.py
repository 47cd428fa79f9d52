"""SGLang's component for recurrent states, over two tiers: what the tree and the store tell each other."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from sglang.srt.mem_cache.unified_cache.components.base import EvictLayer, LRURefreshPhase
from sglang.srt.mem_cache.unified_cache.components.mamba import MambaComponent
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import BaseEvictionResult
from torch import Tensor

from dasc.cache.entries import StateEntry
from dasc.sglang.two_tier_pool import NativeSlots, TwoTierPool, TwoTierSettings


class TwoTierComponent(MambaComponent):  # type: ignore[misc]
    """A node's value is the handle of a checkpoint, whose ``owner`` is the node as long as the node has it.

    SGLang's order of recency and the store's are the same: each change of one is made in the other. A checkpoint is
    locked in the store while the node's count of locks is not 0.

    Args:
        cache: SGLang's.
        params: SGLang's; the native pool and the compressed one are its ``req_to_token_pool``'s.
        settings: of the store.
    """

    def __init__(self, cache: Any, params: Any, *, settings: TwoTierSettings) -> None:
        super().__init__(cache, params)
        slots = params.req_to_token_pool
        assert slots.mamba_allocator.available_size() == slots.mamba_pool.size, "nothing runs yet"
        self._pool = TwoTierPool(slots.mamba_pool, slots.mamba_ckpt_pool, settings, self._drop_from_tree)
        slots.mamba_ckpt_pool = self._pool
        slots.mamba_allocator = NativeSlots(self._pool)

    # -- a request's checkpoints --------------------------------------------------------------------------------------

    def prepare_for_caching_req(
        self, req: Any, insert_params: Any, token_ids_len: int, is_finished: bool
    ) -> int | None:
        """Make a checkpoint: of a slot given up without a copy, of one still in use with one.

        Returns:
            Tokens of the checkpoint; 0 when there is none.
        """
        if not self.cache.enable_mamba_extra_buffer:
            position = token_ids_len
            store = self._pool.adopt if is_finished else self._pool.checkpoint
            handle = store(req.kv.mamba_pool_idx, position) if position else None
        elif is_finished:
            selected = self._select_finished_checkpoint(req, token_ids_len)
            position, keep = (0, None) if selected is None else selected
            handle = None
            if position:
                handle = self._pool.adopt(req.kv.mamba_ping_pong_track_buffer[keep], position)
                insert_params.mamba_keep_idx = keep
        else:
            position = req.kv.mamba_last_track_seqlen
            handle = self._adopt_tracked(req, position) if position else None
        insert_params.mamba_value = handle
        return 0 if handle is None else position

    def _adopt_tracked(self, req: Any, position: int) -> Tensor | None:
        """Take over the slot that holds the tracked state; the request goes on tracking in another."""
        slots = self.cache.req_to_token_pool
        another = slots.mamba_allocator.alloc(1)
        if another is None:
            self._pool.counters.not_cached["no_room"] += 1
            return None
        tracked = slots.donate_mamba_ping_pong_slot(req, another)
        handle = self._pool.adopt(tracked, position)
        if handle is None:
            slots.mamba_allocator.free(tracked)
        return handle

    def cleanup_after_caching_req(
        self, req: Any, is_finished: bool, insert_result: Any = None, insert_params: Any = None
    ) -> None:
        """After the insertion: free what the request still has, and what the tree had already."""
        handle = None if insert_params is None else insert_params.mamba_value
        if is_finished:
            self._free_slots_of(req, None if handle is None else insert_params)
        else:
            req.kv.mamba_last_track_seqlen = None
            req.kv.mamba_prev_track_seqlen = None
        if handle is None:
            return
        adopted = is_finished or self.cache.enable_mamba_extra_buffer  # else it is a copy, where it belongs
        if insert_result is None or insert_result.mamba_exist:
            self._pool.withdraw(handle, copied=not adopted)
        elif adopted:
            self._pool.compress(handle)

    def _free_slots_of(self, req: Any, handed_over: Any) -> None:
        """Free a finished request's slots but for the one that became a checkpoint."""
        slots = self.cache.req_to_token_pool
        if self.cache.enable_mamba_extra_buffer:
            keep = None if handed_over is None else handed_over.mamba_keep_idx
            slots.free_mamba_cache(req, mamba_ping_pong_track_buffer_to_keep=keep)
        elif handed_over is None:
            slots.free_mamba_cache(req)
        else:
            req.kv.mamba_pool_idx = None

    def _free_mamba_value(self, mamba_value: Tensor) -> None:
        self._pool.free(mamba_value)

    # -- the tree tells the store -------------------------------------------------------------------------------------

    def commit_insert_component_data(
        self, node: Any, is_new_leaf: bool, params: Any, result: Any, cache_actions: list[Any]
    ) -> None:
        """A node takes a checkpoint, or has one already, which was used then."""
        super().commit_insert_component_data(node, is_new_leaf, params, result, cache_actions)
        entry = self._entry(node)
        if result.mamba_exist:
            self._pool.store.touch(entry)
            return
        entry.owner = node
        if node.component_data[self.component_type].lock_ref:
            self._pool.lock(entry)

    def refresh_lru(self, phase: LRURefreshPhase, node: Any, root_node: Any) -> None:
        """A match uses the state of its last node, and no other."""
        super().refresh_lru(phase, node, root_node)
        if phase is LRURefreshPhase.MATCH_END and self._has_state(node):
            self._pool.store.touch(self._entry(node))

    def acquire_component_lock(self, node: Any, result: Any, lock_host: bool = False) -> Any:
        """The first lock of a node locks its checkpoint."""
        result = super().acquire_component_lock(node, result, lock_host)
        if self._has_state(node) and node.component_data[self.component_type].lock_ref == 1:
            self._pool.lock(self._entry(node))
        return result

    def release_component_lock(self, node: Any, params: Any, lock_host: bool = False) -> None:
        """The last one unlocks it."""
        super().release_component_lock(node, params, lock_host)
        if self._has_state(node) and node.component_data[self.component_type].lock_ref == 0:
            self._pool.unlock(self._entry(node))

    def evict_component(
        self,
        node: Any,
        device_frees: dict[Any, list[Tensor]],
        host_frees: dict[Any, list[Tensor]],
        cache_actions: list[Any],
        target: EvictLayer = EvictLayer.DEVICE,
    ) -> tuple[int, int]:
        """The tree lets a checkpoint go; SGLang frees its handle next."""
        if EvictLayer.DEVICE in target and self._has_state(node):
            self._entry(node).owner = None
        freed: tuple[int, int] = super().evict_component(node, device_frees, host_frees, cache_actions, target)
        return freed

    def finalize_match_result_in_cache(self, params: Any, result: Any) -> Any:
        """A hit takes an active slot, but not that of the state that it is about to load.

        Without one it is no hit: the request has to wait, and is asked for again.
        """
        node = self.tree_core.node_by_id(result.best_match_node)
        if not params.cow_mamba or not self._has_state(node) or params.req.kv.holds_mamba:
            return super().finalize_match_result_in_cache(params, result)
        entry = self._entry(node)
        self._pool.lock(entry)
        slot = self.cache.req_to_token_pool.mamba_allocator.alloc(1)
        self._pool.unlock(entry)
        if slot is None:
            return self.tree_core.empty_match_result
        params.req.kv.mamba_pool_idx = slot[0]
        return super().finalize_match_result_in_cache(params, result)

    # -- the store tells the tree -------------------------------------------------------------------------------------

    def _drop_from_tree(self, entry: StateEntry, cause: str) -> None:
        """Take a checkpoint that the store has dropped off its node. A leaf goes as a whole, as when SGLang evicts."""
        node: Any = entry.owner
        if node is None:
            return
        if node in self.tree_core.evictable_device_leaves:
            self.cache._evict_device_leaf(node.id, defaultdict(int))
            return
        result = BaseEvictionResult()
        freed = (result.device_frees, result.host_frees, result.cache_actions)
        self.tree_core._evict_component_and_detach_lru(node, self, *freed)
        self.tree_core._cascade_evict(node, self, result.tracker, *freed)
        self.cache._apply_eviction_result(result)

    def _has_state(self, node: Any) -> bool:
        return node is not self.tree_core.root_node and node.component_data[self.component_type].value is not None

    def _entry(self, node: Any) -> StateEntry:
        return self._pool.entry(node.component_data[self.component_type].value)
