"""``DASC_MODE=two-tier``: what makes SGLang's server keep dense checkpoints beside compressed ones (appendix B.2)."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from sglang.srt.environ import envs
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.runtime_context import get_parallel

from dasc.fast.distributed import outcome_agreement
from dasc.sglang import targets
from dasc.sglang.serving import Serving, stopping
from dasc.sglang.two_tier_component import TwoTierComponent
from dasc.sglang.two_tier_pool import TwoTierSettings

logger = logging.getLogger(__name__)
T = TypeVar("T")


class TwoTier:
    """The hooks of one process, all of type AROUND, which it adds to those of ``serving``.

    Args:
        serving: of this process, in mode ``two-tier``.
    """

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        serving.hooks |= {
            targets.MAKE_TREE: self.make_tree,
            targets.STEP: self.step,
            targets.ADMIT: self.admit,
        }

    @stopping
    def make_tree(self, original: Callable[..., T], ctx: Any, **kwargs: Any) -> T:
        """A tree whose component for recurrent states is ours; our pool takes the place of the compressed one."""
        config, counters, parallel = self._serving.config, self._serving.counters, get_parallel()
        native_slots = ctx.params.req_to_token_pool.mamba_pool.size
        if config.watermark > native_slots:
            raise ValueError(f"DASC_WATERMARK must be at most the {native_slots} native slots, got {config.watermark}")
        several = parallel.attn_tp_size > 1
        settings = TwoTierSettings(
            counters,
            dense_limit=None if config.spill else 0,
            watermark=config.watermark,
            agree=outcome_agreement(parallel.attn_tp_group.cpu_group) if several else lambda ok: ok,
            forward_stream=ctx.tp_worker.model_runner.forward_stream,
        )
        component = functools.partial(TwoTierComponent, settings=settings)
        ctx.params.component_registry_override = {
            **(ctx.params.component_registry_override or {}),
            ComponentType.MAMBA: component,
        }
        # A request has its own copy of the state that it hit. Locked to its end, dense ones would keep others waiting.
        envs.SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK.set(True)
        cache: Any = original(ctx, **kwargs)
        self._serving.report(cache.req_to_token_pool.mamba_ckpt_pool)
        if parallel.tp_rank == 0:
            logger.info("dasc: two tiers need SGLang's tree core in Python, in place of the one in Rust")
        return cache  # type: ignore[no-any-return]

    def step(self, original: Callable[..., T], scheduler: Any, *args: Any, **kwargs: Any) -> T:
        """Begin a scheduler step: commit packs, reclaim down to the watermark."""
        scheduler.req_to_token_pool.mamba_ckpt_pool.store.step()
        return original(scheduler, *args, **kwargs)

    def admit(self, original: Callable[..., object], adder: Any, req: Any, *args: Any, **kwargs: Any) -> object:
        """A request waits until native slots for it can be reclaimed: SGLang takes them after it has admitted it.

        One more is left, since the dense checkpoint that the request itself has hit is about to be locked.
        """
        pool = adder.tree_cache.req_to_token_pool
        needed = sum(_slots_needed(pool, each) for each in [*adder.can_run_list, req])
        if needed >= pool.mamba_allocator.schedulable_available_size():
            self._serving.counters.backpressure["native"] += 1
            return AddReqResult.OTHER
        return original(adder, req, *args, **kwargs)


def _slots_needed(pool: Any, req: Any) -> int:
    """Native slots that SGLang's ``HybridReqToTokenPool.alloc`` will take for a request."""
    tracking = pool.mamba_initial_tracking_slots if req.kv.mamba_ping_pong_track_buffer is None else 0
    return (0 if req.kv.holds_mamba else 1) + int(tracking)
