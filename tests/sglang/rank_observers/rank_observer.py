"""SGLang plugin for tests: each rank says what it holds and has exchanged; rank 1 may be given a plan of its own."""

import dataclasses
import os

from tests.sglang.observing import say_on_every_rank


def observe(result, scheduler, *args, **kwargs):
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.utils import rank_consensus_checker

    from dasc.sglang import plugin

    exchanges = getattr(plugin.serving.pool, "exchanges", None)
    ends = {} if exchanges is None else exchanges._asdict()
    tree, slots = scheduler.tree_cache, scheduler.req_to_token_pool
    seen = {
        "rank": get_parallel().tp_rank,
        "slot_units": plugin.serving.pool.layout.slot_units,
        "checked": rank_consensus_checker.enabled(),
        "own_units": plugin.serving.pool.layout.retained_units,
        "buffer_bytes": sum(end._away.nbytes + end._guests.nbytes for end in ends.values()),
        # sorted: the tree in Rust goes through its children in an order of each process's own
        "states": sorted(tree.all_mamba_values_flatten().tolist()),
        "kv": sorted(tree.all_values_flatten().tolist()),
        "native_free": slots.mamba_allocator.available_size(),
        "checkpoints_free": slots.mamba_ckpt_pool.available_size(),
        **{name: dataclasses.asdict(end.counters) for name, end in ends.items()},
    }
    say_on_every_rank("RANK", seen, scheduler)


def take_own_plan(result, *args, **kwargs):
    from sglang.srt.runtime_context import get_parallel

    from dasc.sglang import plugin

    if "PLAN_OF_RANK_1" in os.environ and get_parallel().tp_rank == 1:
        plugin.serving.config = dataclasses.replace(plugin.serving.config, plan=os.environ["PLAN_OF_RANK_1"])


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.get_internal_state", observe, HookType.AFTER)
    runner = "sglang.srt.model_executor.model_runner.ModelRunner"
    HookRegistry.register(f"{runner}.init_torch_distributed", take_own_plan, HookType.AFTER)
