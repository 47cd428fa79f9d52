"""What the plugin hooks or calls in SGLang, and what each must look like. Checked before anything is served."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from importlib.metadata import version

SUPPORTED = ("0.5.23",)

_POOL = "sglang.srt.mem_cache.mamba_checkpoint_pool"
_SIZES = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_COMPONENT = "sglang.srt.mem_cache.unified_cache.components.mamba.MambaComponent"
_ALLOCATOR = "sglang.srt.mem_cache.allocator.mamba.MambaSlotAllocator"
_CONTEXT = "sglang.srt.runtime_context"
_MEMORY = "sglang.srt.mem_cache.memory_pool"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_BATCH = "sglang.srt.model_executor.forward_batch_info"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_UPDATES = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_EXPORTER = "sglang.srt.model_executor.model_runner_components.weight_exporter.WeightExporter"

LOAD_MODEL = f"{_RUNNER}.load_model"
INIT_MODEL = "sglang.srt.model_loader.loader._initialize_model"
LAUNCH = "sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes"
MAKE_POOL = f"{_POOL}.maybe_init_int8_mamba_checkpoint_pool"
SIZE_POOL = f"{_SIZES}._handle_max_mamba_cache"
SLOTS_PER_REQUEST = f"{_SIZES}._calculate_mamba_ratio"
RUNNING_LIMIT = f"{_SIZES}.resolve_max_num_reqs"
PREPARE = f"{_COMPONENT}.prepare_for_caching_req"
CLEAN_UP = f"{_COMPONENT}.cleanup_after_caching_req"
UPDATE_FROM_TENSOR = f"{_UPDATER}.update_weights_from_tensor"
AFTER_UPDATE = f"{_UPDATES}.flush_cache_after_weight_update"
TOKEN_LIMIT = f"{_SIZES}._apply_token_constraints"
MAKE_ROWS = f"{_SIZES}._build_hybrid_req_pool"
MAKE_KV = f"{_SIZES}._build_hybrid_linear_kv_pool"
RESIZE_KV = f"{_MEMORY}.HybridLinearKVPool.finalize_backing"
COLLECT_HITS = "sglang.srt.managers.schedule_batch.ScheduleBatch._collect_deferred_mamba_cow_and_clear"
FORWARD = f"{_RUNNER}._forward_raw"
MAKE_TREE = "sglang.srt.mem_cache.registry.create_unified_radix_cache"
STEP = "sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run"
ADMIT = "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req"

# Dotted path to the names of its parameters, ``None`` for what is not called.
TARGETS: Mapping[str, tuple[str, ...] | None] = {
    # hooked
    LAUNCH: ("server_args", "port_args", "run_scheduler_process_func", "placement_group"),
    LOAD_MODEL: ("self",),
    INIT_MODEL: ("model_config", "load_config", "quant_config"),
    MAKE_POOL: ("mamba_size", "cache_params", "mamba_layer_ids", "device"),
    SIZE_POOL: ("self", "total_rest_memory"),
    SLOTS_PER_REQUEST: ("self",),
    RUNNING_LIMIT: ("self", "token_capacity"),
    PREPARE: ("self", "req", "insert_params", "token_ids_len", "is_finished"),
    CLEAN_UP: ("self", "req", "is_finished", "insert_result", "insert_params"),
    UPDATE_FROM_TENSOR: ("self", "named_tensors", "load_format"),
    AFTER_UPDATE: ("self", "recv_req", "success", "message"),
    # it reads the attribute that we set on a permuted model
    f"{_EXPORTER}._weight_export_unsupported_reason": ("self",),
    # SGLang calls these of our pool's, at the places that it calls its own
    f"{_POOL}.MambaCheckpointPool.alloc": ("self", "n"),
    f"{_POOL}.MambaCheckpointPool.free": ("self", "slots"),
    f"{_POOL}.MambaCheckpointPool.available_size": ("self",),
    f"{_POOL}.MambaCheckpointPool.clear": ("self",),
    f"{_POOL}.MambaCheckpointPool.store_from_active": ("self", "active_mamba_pool", "active_slots", "ckpt_slots"),
    f"{_POOL}.MambaCheckpointPool.load_to_active": ("self", "active_mamba_pool", "ckpt_slots", "active_slots"),
    f"{_COMPONENT}._commit_int8_checkpoint": ("self", "active_slots"),
    f"{_COMPONENT}._free_mamba_value": ("self", "mamba_value"),
    f"{_COMPONENT}.int8_ckpt_pool": None,
    f"{_RUNNER}._maybe_execute_deferred_mamba_cow_and_clear": ("self", "forward_batch"),
    # called
    f"{_COMPONENT}._select_finished_checkpoint": ("self", "req", "token_ids_len"),
    _ALLOCATOR: ("size", "device"),
    f"{_ALLOCATOR}.alloc": ("self", "need_size"),
    f"{_ALLOCATOR}.free": ("self", "free_index"),
    f"{_ALLOCATOR}.available_size": ("self",),
    f"{_ALLOCATOR}.clear": ("self",),
    "sglang.srt.mem_cache.allocation_sizing.get_mamba_tracking_slots": ("extra_buffer", "overlap", "lazy"),
    "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len": (),
    "sglang.srt.mem_cache.base_prefix_cache.EvictParams": None,
    "sglang.srt.configs.hybrid_arch.mambaish_config": ("model_config",),
    "sglang.srt.constants.GPU_MEMORY_TYPE_KV_CACHE": None,
    "sglang.srt.utils.torch_memory_saver_adapter.TorchMemorySaverAdapter.create": ("enable",),
    "sglang.srt.arg_groups.model_override_base.resolving_view": ("server_args",),
    "sglang.srt.arg_groups.model_override_base.model_config_of": ("server_args",),
    f"{_CONTEXT}.RuntimeContext.override": ("self", "source", "fields"),
    f"{_CONTEXT}.get_context": (),
    f"{_CONTEXT}.get_exec": (),
    f"{_CONTEXT}.get_observability": (),
    f"{_CONTEXT}.get_parallel": (),
    f"{_CONTEXT}.get_schedule": (),
    "sglang.srt.plugins.hook_registry.HookRegistry.register": ("target", "hook", "hook_type", "source"),
}

# What DASC_LOAD_POLICY=wr needs besides.
REFRESH_TARGETS: Mapping[str, tuple[str, ...] | None] = {
    # hooked
    TOKEN_LIMIT: ("self", "token_capacity"),
    MAKE_ROWS: ("self", "max_num_reqs", "extra_max_context_len"),
    MAKE_KV: (
        "self",
        "max_total_num_tokens",
        "req_to_token_pool",
        "mha_pool_class",
        "mla_pool_class",
        "dsa_pool_class",
    ),
    RESIZE_KV: ("self", "config"),
    COLLECT_HITS: ("self", "reqs"),
    FORWARD: ("self", "forward_batch", "pp_proxy_tensors", "reinit_attn_backend", "split_forward_count"),
    # called
    f"{_MEMORY}.HybridLinearKVPool.move_kv_cache": ("self", "tgt_loc", "src_loc"),
    f"{_MEMORY}.HybridLinearKVPool.get_kv_size_bytes": ("self",),
    f"{_MEMORY}.ReqToTokenPool.clear": ("self",),
    f"{_MEMORY}.MambaPool.clear_slots": ("self", "indices"),
    "sglang.srt.utils.common.async_h2d": ("args", "dtype", "device"),
    f"{_BATCH}.CaptureHiddenMode.NULL": None,
    f"{_BATCH}.ForwardMode.EXTEND": None,
    f"{_BATCH}.ForwardBatch._init_num_token_non_padded": ("self", "device", "is_draft_worker"),
    "sglang.srt.mem_cache.kv_index_translator.KVIndexTranslator.own_plan": ("self", "forward_batch", "runner_slots"),
    "sglang.srt.mem_cache.kv_loc_plan.KVLocPlan.bind": ("self", "batch", "reader", "cols"),
}

_LINEAR = "sglang.srt.layers.attention.linear"
_BACKENDS = (f"{_LINEAR}.gdn_backend.GDNAttnBackend", f"{_LINEAR}.kda_backend.KDAAttnBackend")
_HYBRID = "sglang.srt.layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend"
PLAN_LINEAR = tuple(f"{backend}.init_forward_metadata" for backend in _BACKENDS)
EXTEND_LINEAR = tuple(f"{backend}.forward_extend" for backend in _BACKENDS)

# What a refresh in one pass needs besides.
ONE_PASS_TARGETS: Mapping[str, tuple[str, ...] | None] = {
    # hooked
    **dict.fromkeys(PLAN_LINEAR, ("self", "forward_batch")),
    **dict.fromkeys(EXTEND_LINEAR, ("self", "layer", "forward_batch", "mixed_qkv", "a", "b", "kwargs")),
    # called or looked at
    _HYBRID: ("full_attn_backend", "linear_attn_backend", "full_attn_layers"),
    "sglang.srt.layers.attention.hybrid_attn_backend.HybridAttnBackend": (
        "model_runner",
        "prefill_backend",
        "decode_backend",
    ),
    "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend": ("model_runner",),
    f"{_MEMORY}.HybridReqToTokenPool.mamba2_layer_cache": ("self", "layer_id"),
    f"{_BATCH}.ForwardMode.MIXED": None,
    "sglang.srt.state_capturer.routed_experts.get_global_experts_capturer": (),
    "sglang.srt.state_capturer.indexer_topk.get_global_indexer_capturer": (),
}


_CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_CORE = "sglang.srt.mem_cache.unified_cache.unified_tree_core.UnifiedTreeCore"
_PARTS = "sglang.srt.mem_cache.unified_cache.components.base"

# What DASC_MODE=two-tier needs besides.
TWO_TIER_TARGETS: Mapping[str, tuple[str, ...] | None] = {
    # hooked
    MAKE_TREE: ("ctx", "cache_class"),
    STEP: ("self", "running_batch", "last_batch"),
    ADMIT: ("self", "req", "has_chunked_req", "truncation_align_size"),
    # overridden
    _COMPONENT: ("cache", "params"),
    f"{_COMPONENT}.commit_insert_component_data": (
        "self",
        "node",
        "is_new_leaf",
        "params",
        "result",
        "cache_actions",
    ),
    f"{_COMPONENT}.refresh_lru": ("self", "phase", "node", "root_node"),
    f"{_COMPONENT}.acquire_component_lock": ("self", "node", "result", "lock_host"),
    f"{_COMPONENT}.release_component_lock": ("self", "node", "params", "lock_host"),
    f"{_COMPONENT}.evict_component": ("self", "node", "device_frees", "host_frees", "cache_actions", "target"),
    f"{_COMPONENT}.finalize_match_result_in_cache": ("self", "params", "result"),
    # SGLang calls these of our allocator of native slots, at the places that it calls its own
    f"{_ALLOCATOR}.schedulable_available_size": ("self",),
    f"{_ALLOCATOR}.alloc_group_begin": ("self", "num_reqs"),
    f"{_ALLOCATOR}.alloc_group_end": ("self",),
    # called
    f"{_CORE}._evict_component_and_detach_lru": (
        "self",
        "node",
        "comp",
        "device_frees",
        "host_frees",
        "cache_actions",
        "target",
        "tracker",
    ),
    f"{_CORE}._cascade_evict": (
        "self",
        "node",
        "trigger",
        "tracker",
        "device_frees",
        "host_frees",
        "cache_actions",
        "target",
    ),
    f"{_CORE}.node_by_id": ("self", "node_id"),
    f"{_CORE}.empty_match_result": None,
    f"{_CACHE}._evict_device_leaf": ("self", "node_id", "tracker"),
    f"{_CACHE}._apply_eviction_result": ("self", "result"),
    f"{_MEMORY}.MambaPool.copy_from": ("self", "src_indices", "dst_indices"),
    f"{_MEMORY}.HybridReqToTokenPool.donate_mamba_ping_pong_slot": ("self", "req", "new_slot"),
    f"{_MEMORY}.HybridReqToTokenPool.free_mamba_cache": ("self", "req", "mamba_ping_pong_track_buffer_to_keep"),
    "sglang.srt.mem_cache.cache_init_params.CacheInitParams.component_registry_override": None,
    "sglang.srt.environ.Envs.SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK": None,
    "sglang.srt.managers.schedule_policy.AddReqResult.OTHER": None,
    f"{_PARTS}.LRURefreshPhase.MATCH_END": None,
    f"{_PARTS}.EvictLayer.DEVICE": None,
}


def check_targets(targets: Mapping[str, tuple[str, ...] | None] = TARGETS) -> None:
    """Raise unless SGLang has every target as expected.

    Raises:
        ValueError: naming what is missing or different, the installed version and the supported ones.
    """
    problems = [problem for target, expected in targets.items() if (problem := _problem(target, expected))]
    if problems:
        raise ValueError(
            f"this is SGLang {version('sglang')}, dasc supports {', '.join(SUPPORTED)}; "
            f"what it builds on has changed: {'; '.join(problems)}"
        )


def _problem(target: str, expected: tuple[str, ...] | None) -> str | None:
    try:
        found = pkgutil.resolve_name(target)
    except (ImportError, AttributeError) as error:
        return f"{target} is missing ({error})"
    if expected is None:
        return None
    names = tuple(inspect.signature(found).parameters)
    return None if names == expected else f"{target} takes ({', '.join(names)}), not ({', '.join(expected)})"


def check_hooks(hooks: Mapping[str, Callable[..., object]]) -> None:
    """Raise unless every hook is in place: SGLang only logs one that it cannot apply.

    Raises:
        ValueError: naming the targets without their hook.
    """
    missing = [target for target, hook in hooks.items() if not _is_hooked(pkgutil.resolve_name(target), hook)]
    if missing:
        raise ValueError(f"SGLang did not apply the hooks on {', '.join(missing)}: its log says why")


def _is_hooked(function: object, hook: Callable[..., object]) -> bool:
    """Whether SGLang's wrappers around ``function`` hold ``hook``."""
    while function is not None:
        cells = getattr(function, "__closure__", None) or ()
        if any(type(cell.cell_contents) is type(hook) and cell.cell_contents == hook for cell in cells):
            return True
        function = getattr(function, "__wrapped__", None)
    return False
