"""The plugin inside one SGLang process: its hooks, and what they have settled so far."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.allocation_sizing import get_mamba_tracking_slots, get_req_to_token_extra_context_len
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.runtime_context import get_context, get_exec, get_observability, get_parallel, get_schedule
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

from dasc.cache.counters import Counters
from dasc.fast.distributed import ExchangeError, agree_on
from dasc.layout import storage_label
from dasc.plan import SelectionPlan
from dasc.sglang import targets
from dasc.sglang.arguments import check_arguments, check_hybrid_arguments
from dasc.sglang.budget import NativeDemand, StateBudget, divide
from dasc.sglang.config import Config
from dasc.sglang.metrics import Exporter, Reporter
from dasc.sglang.permutation import HeadPermutation
from dasc.sglang.placements import BalancedPool, Exchanges, buffer_bytes, moves_units, permute_as_loaded
from dasc.sglang.plans import load_plan, placement_mode, plan_summary
from dasc.sglang.pool import CompressedPool
from dasc.sglang.refusing import EXIT_STATUS, refuse, stop
from dasc.sglang.served import ServedState
from dasc.sglang.windows import Scratch, merge_bytes
from dasc.units import format_bytes

if TYPE_CHECKING:
    from dasc.sglang.two_tier_pool import TwoTierPool

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
_GIVEN_WRONG = (ValueError, OSError, ExchangeError)


def stopping(hook: Callable[P, T]) -> Callable[P, T]:
    """Make a scheduler's hook stop the server with one line when it raises for what it was given."""

    @functools.wraps(hook)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return hook(*args, **kwargs)
        except _GIVEN_WRONG as error:
            stop(error)

    return guarded


class Serving:
    """The plugin of one process. In SGLang's main process it only checks; in a scheduler it serves.

    Attributes:
        config: what the plugin was told.
        hooks: target to hook, of type AROUND each.
        counters: what was stored, loaded and dropped.
        plan: once read.
        budget: once the pools' sizes are settled.
        scratch: once they are, when hits are refreshed.
        pool: once made.
        permutation: once the plan is read, when heads are computed in another order than the model's.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.counters = Counters()
        self.plan: SelectionPlan | None = None
        self.budget: StateBudget | None = None
        self.scratch: Scratch | None = None
        self.pool: CompressedPool | None = None
        self.permutation: HeadPermutation | None = None
        self._exchanges: Exchanges | None = None
        self._demand: NativeDemand | None = None
        self.hooks: dict[str, Callable[..., Any]] = {
            targets.LAUNCH: self.launch,
            targets.LOAD_MODEL: self.load_model,
            targets.INIT_MODEL: self.init_model,
            targets.SIZE_POOL: self.size_pool,
            targets.SLOTS_PER_REQUEST: self.slots_per_request,
            targets.RUNNING_LIMIT: self.running_limit,
            targets.MAKE_POOL: self.make_pool,
            targets.PREPARE: self.prepare,
            targets.CLEAN_UP: self.clean_up,
        }

    # -- main process -------------------------------------------------------------------------------------------------

    def launch(self, original: Callable[..., Any], engine: type, server_args: Any, *args: Any, **kwargs: Any) -> Any:
        """Before SGLang starts its schedulers, and so before weights load: check all that can be checked."""
        try:
            self._check(server_args)
        except _GIVEN_WRONG as error:
            refuse(error)
        launched = original(engine, server_args, *args, **kwargs)
        result = launched[0]
        result.wait_for_ready = functools.partial(_wait_for_ready, result.wait_for_ready)
        return launched

    def _check(self, server_args: Any) -> None:
        targets.check_hooks(self.hooks)
        check_arguments(resolving_view(server_args), self.config.load_policy)
        model = mambaish_config(model_config_of(server_args))
        if model is None:
            raise ValueError(f"DASC_PLAN is set, but {resolving_view(server_args).model_path} has no recurrent state")
        self._read_plan(server_args, model.mamba2_cache_params)

    def _read_plan(self, server_args: Any, cache_params: Any) -> tuple[SelectionPlan, ServedState]:
        parallel, arguments = get_parallel(), resolving_view(server_args)
        served = ServedState.of(cache_params, cache_params.layers, parallel.attn_tp_size)
        plan = load_plan(self.config, arguments.model_path, arguments.revision, served.ranks, served.dtypes)
        served.check(plan)
        if placement_mode(plan, served.ranks) == "hybrid":
            check_hybrid_arguments(arguments)
        return plan, served

    # -- scheduler processes ------------------------------------------------------------------------------------------

    def load_model(self, original: Callable[..., None], runner: Any) -> None:
        """Before weights load, and before SGLang looks what memory is left: the plan, and what its placement takes."""
        self._settle_plan(runner)
        original(runner)

    @stopping
    def _settle_plan(self, runner: Any) -> None:
        targets.check_hooks(self.hooks)
        assert self.plan is None, "one scheduler loads one model"
        parallel, arguments = get_parallel(), resolving_view(runner.server_args)
        check_arguments(arguments, self.config.load_policy)
        plan, served = self._read_plan(runner.server_args, mambaish_config(runner.model_config).mamba2_cache_params)
        if served.ranks > 1:
            agree_on(self.config.decisive() | plan_summary(plan, served.ranks), parallel.attn_tp_group.cpu_group)
        if moves_units(plan, served.ranks):
            self._exchanges = Exchanges.over(plan, parallel.attn_tp_group, runner.device, parallel.dist_timeout)
        if placement_mode(plan, served.ranks) == "hybrid":
            self.permutation = HeadPermutation(plan.geometry, plan.placements[served.ranks].head_order)
        self.plan = plan

    def init_model(self, original: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """A model whose weights are brought into the placement's order of heads as they load."""
        model = original(*args, **kwargs)
        if self.permutation is not None:
            permute_as_loaded(model, self.permutation, started=lambda: self.budget is not None)
        return model

    @stopping
    def size_pool(self, original: Callable[..., float], configurator: Any, total_rest_memory: float) -> float:
        """After SGLang has settled the size of its state pool: divide it. The KV budget is as it would have been."""
        targets.check_hooks(self.hooks)
        plan, ranks = self.plan, get_parallel().attn_tp_size
        assert plan is not None, "the model is loaded first"
        assert self.budget is None, "one scheduler sizes its pools once"
        if self.permutation is not None:
            self.permutation.check_complete()
        rest = original(configurator, total_rest_memory)
        params = configurator.mambaish_config.mamba2_cache_params
        dense_slots = get_schedule().max_mamba_cache_size
        limit = dense_slots // configurator._calculate_mamba_ratio()
        asked = get_schedule().max_running_requests
        mamba = get_exec().mamba
        tracking = get_mamba_tracking_slots(
            extra_buffer=mamba.enable_mamba_extra_buffer, overlap=not get_schedule().disable_overlap_schedule
        )
        demand = NativeDemand(
            requests=limit if asked is None else min(limit, asked),
            slots_per_request=1 + tracking,
        )
        scratch, tmp_bytes = None, buffer_bytes(plan, ranks)
        if self.config.load_policy == "wr":
            scratch = Scratch.of(int(plan.windows.max()), get_schedule().page_size, demand.requests)
            tmp_bytes += scratch.rows * _row_bytes(configurator)
            if self.config.refresh == "auto":
                tmp_bytes += merge_bytes(params.mamba_cache_per_req, plan.geometry.num_layers, scratch.rows)
        budget = divide(
            self.config.pool,
            demand,
            dense_slots=dense_slots,
            dense_slot_bytes=params.mamba_cache_per_req,
            compressed_slot_bytes=max(layout.slot_bytes for layout in plan.layouts(ranks)),
            tmp_bytes=tmp_bytes,
        )
        get_context().override("dasc", max_mamba_cache_size=budget.split.native_slots)
        self.budget, self.scratch, self._demand = budget, scratch, demand
        if get_parallel().tp_rank == 0:
            logger.info("%s", self._announcement(plan, ranks))
            logger.info("%s", budget.table())
        return rest

    def slots_per_request(self, original: Callable[..., int], configurator: Any) -> int:
        """Running requests alone hold native slots, so each takes fewer than SGLang reserves for cached states too."""
        return original(configurator) if self._demand is None else self._demand.slots_per_request

    def running_limit(self, original: Callable[..., int], configurator: Any, token_capacity: int) -> int:
        """No more requests at once than the native pool always has slots for."""
        limit = original(configurator, token_capacity)
        return limit if self.budget is None else min(limit, self.budget.running_limit)

    @stopping
    def make_pool(
        self, original: Callable[..., object], *, mamba_size: int, cache_params: Any, mamba_layer_ids: Any, device: str
    ) -> CompressedPool:
        """In place of SGLang's INT8 pool: ours."""
        targets.check_hooks(self.hooks)
        if self.plan is None or self.budget is None or mamba_size != self.budget.split.native_slots:
            raise ValueError(f"SGLang made a state pool of {mamba_size} slots that dasc did not size")
        parallel = get_parallel()
        served = ServedState.of(cache_params, mamba_layer_ids, parallel.attn_tp_size)
        served.check(self.plan)
        layout = self.plan.layouts(served.ranks)[parallel.attn_tp_rank]
        make = CompressedPool if self._exchanges is None else functools.partial(BalancedPool, exchanges=self._exchanges)
        self.pool = make(
            layout,
            self.budget.split.compressed_slots,
            torch.device(device),
            self.counters,
            omitted="zero" if self.scratch is None else "leave",
            memory=_released_with_kv(),
        )
        if self.config.mode == "compressed-only":
            self.report(self.pool)
        return self.pool

    def prepare(
        self,
        original: Callable[..., int | None],
        component: Any,
        req: Any,
        insert_params: Any,
        token_ids_len: int,
        is_finished: bool,
    ) -> int | None:
        """Nothing is stored for a request that has no state at a place to cache: SGLang would store, and drop it.

        Nor is a checkpoint that finds no slot, and none that could be evicted: SGLang would assert.
        """
        if _position(component, req, token_ids_len, is_finished) == 0:
            return 0
        pool = component.int8_ckpt_pool
        if pool.available_size() == 0:
            component.cache.evict(EvictParams(num_tokens=0, mamba_num=1))
            if pool.available_size() == 0:
                self.counters.not_cached["no_room"] += 1
                return 0
        return original(component, req, insert_params, token_ids_len, is_finished)

    def clean_up(
        self,
        original: Callable[..., None],
        component: Any,
        req: Any,
        is_finished: bool,
        insert_result: Any = None,
        insert_params: Any = None,
    ) -> None:
        """A checkpoint is stored when the tree has taken it. Slots freed here held what was there already."""
        pool: CompressedPool = component.int8_ckpt_pool
        made = insert_params is not None and insert_params.mamba_value is not None
        if made and insert_result is not None and not insert_result.mamba_exist:
            self.counters.stored["compressed"] += 1
        pool.being_dropped = True
        try:
            original(component, req, is_finished, insert_result=insert_result, insert_params=insert_params)
        finally:
            pool.being_dropped = False

    # -- what it says -------------------------------------------------------------------------------------------------

    def _announcement(self, plan: SelectionPlan, ranks: int) -> str:
        kept = int(plan.mask.sum())
        moved = plan.placements[ranks].moved_units if ranks in plan.placements else 0
        return (
            f"dasc: {self.config.mode}, {self.config.load_policy}, W_max {plan.w_max}, "
            f"{storage_label(plan.layout, plan.dtypes)}, placement {placement_mode(plan, ranks)}: "
            f"{kept:,} of {plan.geometry.num_units:,} units kept, {moved:,} of them on another rank"
        )

    def report(self, pool: CompressedPool | TwoTierPool) -> None:
        """Begin to export metrics and to log summaries."""
        rank, replica, exporter = get_parallel().tp_rank, get_parallel().dp_rank, None
        if get_observability().enable_metrics:
            labels = {"tp_rank": str(rank)} | ({} if replica is None else {"dp_rank": str(replica)})
            exporter = Exporter(self.counters, pool.occupancy, labels)
        Reporter(lambda: summary(self.counters, pool), self.config.log_interval if rank == 0 else 0, exporter).start()


def _released_with_kv() -> AbstractContextManager[object]:
    """What is allocated here goes when SGLang is told to release the memory of its caches, which empties them first."""
    adapter = TorchMemorySaverAdapter.create(enable=get_exec().features.enable_memory_saver)
    region: AbstractContextManager[object] = adapter.region(GPU_MEMORY_TYPE_KV_CACHE)
    return region


def _position(component: Any, req: Any, token_ids_len: int, is_finished: bool) -> int:
    """Tokens that the state has seen which SGLang is about to cache; 0 when there is none."""
    if not component.cache.enable_mamba_extra_buffer:
        return token_ids_len
    if not is_finished:
        return int(req.kv.mamba_last_track_seqlen or 0)
    selected = component._select_finished_checkpoint(req, token_ids_len)
    return 0 if selected is None else int(selected[0])


def _row_bytes(configurator: Any) -> int:
    """Of one row of SGLang's table of KV slots, int32."""
    return 4 * int(configurator.model_config.context_len + get_req_to_token_extra_context_len())


def _wait_for_ready(original: Callable[[], None]) -> None:
    """What SGLang makes of a scheduler that stopped with a line of ours is a traceback that tells less."""
    try:
        original()
    except RuntimeError as error:
        if f"(exit code: {EXIT_STATUS})" in str(error):
            raise SystemExit(EXIT_STATUS) from None
        raise


def summary(counters: Counters, pool: CompressedPool | TwoTierPool) -> str:
    """One line for the log."""
    held = pool.occupancy()
    tokens = counters.refresh_tokens
    apart = f", {counters.refresh_s:.1f} s of it in passes of their own" if counters.refresh_s else ""
    refreshed = f", {tokens:,} tokens replayed{apart}" if tokens else ""
    dense = f", {held['dense_checkpoints']:,} dense checkpoints" if "dense_checkpoints" in held else ""
    hits = f" ({counters.hits['dense']:,} from dense checkpoints)" if dense else ""
    return (
        f"dasc: {held['compressed_slots_held']:,} of {held['compressed_slots']:,} compressed slots held "
        f"({format_bytes(pool.mem_usage_bytes())}){dense}; since the start {counters.stored.total():,} stored, "
        f"{counters.hits.total():,} loaded{hits}, {counters.evictions.total():,} evicted, "
        f"{counters.not_cached.total():,} not cached{refreshed}"
    )
