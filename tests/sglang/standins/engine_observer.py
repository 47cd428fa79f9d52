"""SGLang plugin for tests: when asked for its internal state, each rank writes what its pools and its tree hold."""

import hashlib
from typing import Any

from tests.sglang.observing import say_on_every_rank


def observe(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    from sglang.srt.runtime_context import get_parallel

    pool, tree = scheduler.req_to_token_pool, scheduler.tree_cache
    checkpoints = pool.mamba_ckpt_pool
    states = tree.all_mamba_values_flatten().tolist()
    kv = tree.all_values_flatten().tolist()
    seen = {
        "rank": get_parallel().tp_rank,
        "native_slots": pool.mamba_allocator.size,
        "native_free": pool.mamba_allocator.available_size(),
        "checkpoint_slots": None if checkpoints is None else checkpoints.num_slots,
        "checkpoint_free": None if checkpoints is None else checkpoints.available_size(),
        "states": states,
        "kv": hashlib.sha256(repr(kv).encode()).hexdigest(),
        "kv_tokens": len(kv),
    }
    say_on_every_rank("ENGINE", seen, scheduler)


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.get_internal_state", observe, HookType.AFTER)
