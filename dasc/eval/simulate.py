"""Arms of the method under one state-memory budget, served by the simulator (section 4.4, appendix C.1)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dasc.accounting import MemorySplit, split_budget
from dasc.cache.config import CacheConfig
from dasc.cache.simulation import MODEL_SIZES, CostModel, Load, Serving, Simulation, estimate_cost, simulate
from dasc.cache.storage import scratch_bytes, staging_bytes
from dasc.geometry import DtypePolicy, Quantization, StateGeometry
from dasc.layout import Layout, LayoutKind, rank_layouts
from dasc.models import FAMILIES, read_checkpoint
from dasc.models.synthetic import GEOMETRIES, example_gate, published_kimi_linear
from dasc.placement import PlacementMode
from dasc.plan import SelectionPlan
from dasc.planner import DEFAULT_EPSILON
from dasc.reference import place, replay_window, select_units, static_horizons, unit_windows

DEFAULT_W_MAX = {"kimi_linear": 16, "qwen3_next": 64, "kimi_k3": 64}
"""By family: the operating points of section 5.4."""


@dataclass(frozen=True, eq=False)
class SimulatedModel:
    """What the simulation needs of a model: which units a checkpoint keeps, and how long a refresh replays.

    Attributes:
        name: for reports.
        geometry: of the whole model.
        mask: bool ``[L, U]``, true for retained units.
        w_max: cutoff in tokens.
        replay_tokens: what WR replays on a hit (eq. 7, before the cap by the prefix).
        dtypes: of the state; whether units are quantised is up to the arm.
    """

    name: str
    geometry: StateGeometry
    mask: Tensor
    w_max: int
    replay_tokens: int
    dtypes: DtypePolicy = DtypePolicy()  # noqa: RUF009 - frozen


def load_model(model: str, w_max: int | None = None) -> SimulatedModel:
    """A model by name, from a plan, or from a checkpoint.

    Args:
        model: ``kimi-linear`` (made-up decays with the published counts at ``W_max`` 16), ``qwen3-next`` or ``kimi-k3``
            (made-up decays), a plan file, or a folder or Hub id of a checkpoint.
        w_max: cutoff in tokens; the operating point of the paper when ``None``. A plan has its own.

    Raises:
        ValueError: for a plan with another ``w_max``, a family without a default one, or what cannot be read.
    """
    if Path(model).is_file():
        plan = SelectionPlan.load(model)
        if w_max is not None and w_max != plan.w_max:
            raise ValueError(f"w_max of the plan {model} is {plan.w_max}, got {w_max}: leave it out")
        replay = replay_window(plan.windows, plan.w_max)
        return SimulatedModel(model, plan.geometry, plan.mask, plan.w_max, replay, replace(plan.dtypes, quantized=None))
    if model == "kimi-linear":
        geometry, gate = published_kimi_linear()
    elif model in GEOMETRIES:
        geometry = GEOMETRIES[model]
        gate = example_gate(geometry)
    else:
        checkpoint = read_checkpoint(model)
        geometry, gate = checkpoint.geometry, checkpoint.gate
    if w_max is None:
        if geometry.family not in DEFAULT_W_MAX:
            raise ValueError(f"w_max must be given for models of the family {geometry.family}, which has no default")
        w_max = DEFAULT_W_MAX[geometry.family]
    horizons = static_horizons(gate, FAMILIES[geometry.family].default_gate_input, DEFAULT_EPSILON)
    mask = select_units(horizons, w_max)
    return SimulatedModel(model, geometry, mask, w_max, replay_window(unit_windows(horizons, mask, w_max), w_max))


def model_cost(model: SimulatedModel, ranks: int, changes: Mapping[str, object]) -> CostModel:
    """The estimate for the model's family with ``changes``; ``changes`` alone for a family without an estimate.

    Raises:
        ValueError: for a name or value that no constant can have, or constants missing for such a family.
    """
    family = model.geometry.family
    if family in MODEL_SIZES:
        return estimate_cost(MODEL_SIZES[family], ranks).replaced(changes)
    missing = [field.name for field in fields(CostModel) if field.name not in changes]
    if missing:
        raise ValueError(f"there is no estimate of costs for the family {family}: also give {', '.join(missing)}")
    return CostModel(**dict.fromkeys(changes, 0.0)).replaced(changes)


def kv_bytes(model: SimulatedModel, ranks: int) -> int:
    """Bytes of KV a token takes on one rank.

    Raises:
        ValueError: for a family whose attention layers are not known here.
    """
    family = model.geometry.family
    if family not in MODEL_SIZES:
        raise ValueError(f"KV bytes of a token must be given for the family {family}")
    return MODEL_SIZES[family].kv_bytes_per_token(ranks)


@dataclass(frozen=True)
class Arm:
    """One way to store checkpoints.

    Attributes:
        layout: of the compressed pool; ``None`` for no such pool.
        quantized: store retained units as INT8 or INT4.
        mode: placement of what ranks store.
        refresh: replay the window on a compressed hit (WR instead of NR).
    """

    layout: LayoutKind | None
    quantized: Quantization | None = None
    mode: PlacementMode = "off"
    refresh: bool = False


ARMS = {
    "dense": Arm(None),
    "padded": Arm("padded"),
    "ragged": Arm("ragged"),
    "int8": Arm("ragged", quantized="int8"),
    "int4": Arm("ragged", quantized="int4"),
    "storage": Arm("ragged", mode="storage"),
    "wr": Arm("ragged", refresh=True),
}
"""By name. All but ``dense`` are two-tier; all but ``wr`` load by NR."""


@dataclass(frozen=True)
class Memory:
    """What one rank has, and how it is to be divided.

    Attributes:
        ranks: tensor-parallel degree; every rank has as much.
        state_bytes: running states, checkpoints of both tiers and buffers.
        kv_bytes: KV cache.
        kv_bytes_per_token: of one rank.
        native_slots: running states and dense checkpoints of the arms with a compressed pool.
    """

    ranks: int
    state_bytes: int
    kv_bytes: int
    kv_bytes_per_token: int
    native_slots: int


def default_native_slots(server_limit: int) -> int:
    """A slot for every running request, and a quarter more for dense checkpoints on their way to the other pool."""
    return server_limit + -(-server_limit // 4)


def watermark(native_slots: int, server_limit: int) -> int:
    """Native slots to keep free beside a compressed pool: demotions start before a request needs the slot (B.2)."""
    return min(max(native_slots - server_limit, 0), native_slots - 1)


def fullest_layout(model: SimulatedModel, arm: Arm, ranks: int) -> Layout | None:
    """How the rank with the largest slots stores a checkpoint; ``None`` without a compressed pool."""
    if arm.layout is None:
        return None
    placement = place(model.geometry, model.mask, ranks, arm.mode)
    dtypes = replace(model.dtypes, quantized=arm.quantized)
    layouts = rank_layouts(model.geometry, model.mask, ranks, kind=arm.layout, placement=placement, dtypes=dtypes)
    return max(layouts, key=lambda layout: layout.slot_bytes)


def divide_memory(model: SimulatedModel, arm: Arm, memory: Memory, serving: Serving) -> MemorySplit:
    """Slots of the arm's pools within ``memory.state_bytes`` (C.1), by the rule of ``dasc replay``.

    Charged besides the pools: buffers of one pack and one load under way, and what a refresh computes in. In the
    request's own prefill that is the replayed state of a layer for every running request; in a second pass, one whole
    state.

    Raises:
        ValueError: when the budget is too small, saying how many bytes it takes.
    """
    shard = model.geometry.shard(memory.ranks)
    dense = shard.dense_bytes(model.dtypes)
    layout = fullest_layout(model, arm, memory.ranks)
    if layout is None:
        return split_budget(memory.state_bytes, dense_slot_bytes=dense)
    scratch = 0
    if arm.refresh:
        layer_of_each = scratch_bytes(shard, model.dtypes, serving.server_limit)
        scratch = dense if serving.two_pass_refresh else layer_of_each
    return split_budget(
        memory.state_bytes,
        dense_slot_bytes=dense,
        compressed_slot_bytes=layout.slot_bytes,
        native_slots=memory.native_slots,
        tmp_bytes=staging_bytes(layout) + scratch,
    )


@dataclass(frozen=True)
class ArmResult:
    """One arm under one budget. Seconds are simulated, but for ``wall_s``; hit rates and times are of all requests.

    Attributes:
        arm: name.
        memory_bytes: state memory of a rank.
        native_slots: usable slots for running states and dense checkpoints.
        compressed_slots: usable compressed slots.
        slot_bytes: one checkpoint on the fullest rank: compressed, or dense in an arm without a compressed pool.
        token_hit_rate: prompt tokens served from the cache, of all.
        request_hit_rate: requests that hit at all.
        evictions: states dropped, by cause.
        moved_bytes: checkpoint bytes moved on the fullest rank, by kind.
        forced_waits: allocations that could only be served by waiting for a pack.
        stall_s: waiting for packs.
        refresh_tokens: replayed.
        seconds: from the first arrival to the last answer.
        wall_s: what simulating took.
    """

    arm: str
    memory_bytes: int
    native_slots: int
    compressed_slots: int
    slot_bytes: int
    requests: int
    token_hit_rate: float
    request_hit_rate: float
    ttft_mean_s: float
    ttft_p95_s: float
    e2e_mean_s: float
    e2e_p95_s: float
    evictions: dict[str, int]
    demotions: int
    spills: int
    moved_bytes: dict[str, int]
    forced_waits: int
    stall_s: float
    refresh_tokens: int
    seconds: float
    wall_s: float

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def arm_config(model: SimulatedModel, name: str, memory: Memory, load: Load, serving: Serving) -> CacheConfig:
    """The cache of the arm ``name`` of :data:`ARMS`.

    Raises:
        ValueError: for an unknown arm, ranks that cannot share the model, or memory too small for the arm, saying how
            much it takes.
    """
    if name not in ARMS:
        raise ValueError(f"arms must be of {', '.join(ARMS)}, got {name!r}")
    arm = ARMS[name]
    model.geometry.check_ranks(memory.ranks)
    try:
        split = divide_memory(model, arm, memory, serving)
    except ValueError as error:
        raise ValueError(f"arm {name}: {error} on each of {memory.ranks} ranks") from error
    kv_pages = memory.kv_bytes // (memory.kv_bytes_per_token * load.tokens_per_id)
    if not kv_pages:
        needed = memory.kv_bytes_per_token * load.tokens_per_id
        raise ValueError(f"KV memory must hold {load.tokens_per_id} tokens, which take {needed}, got {memory.kv_bytes}")
    return CacheConfig(
        native_slots=split.native_slots,
        compressed_slots=split.compressed_slots,
        kv_pages=kv_pages,
        watermark=0 if arm.layout is None else watermark(split.native_slots, serving.server_limit),
        native_slot_bytes=split.native_bytes // (split.native_slots + 1),
        compressed_slot_bytes=max(split.compressed_bytes // (split.compressed_slots + 1), 1),
        refresh_window_tokens=model.replay_tokens if arm.refresh else 0,
    )


def _summary(name: str, memory: Memory, config: CacheConfig, result: Simulation, wall_s: float) -> ArmResult:
    requests = result.requests
    ttft = np.array([r.ttft_s for r in requests])
    e2e = np.array([r.e2e_s for r in requests])
    return ArmResult(
        arm=name,
        memory_bytes=memory.state_bytes,
        native_slots=config.native_slots,
        compressed_slots=config.compressed_slots,
        slot_bytes=config.compressed_slot_bytes if config.compressed_slots else config.native_slot_bytes,
        requests=len(requests),
        token_hit_rate=sum(r.hit_tokens for r in requests) / sum(r.prompt_tokens for r in requests),
        request_hit_rate=sum(r.tier != "miss" for r in requests) / len(requests),
        ttft_mean_s=float(ttft.mean()),
        ttft_p95_s=float(np.percentile(ttft, 95)),
        e2e_mean_s=float(e2e.mean()),
        e2e_p95_s=float(np.percentile(e2e, 95)),
        evictions=result.counters["evictions"],
        demotions=result.counters["demotions"],
        spills=result.counters["spills"],
        moved_bytes=result.moved_bytes,
        forced_waits=result.counters["forced_waits"],
        stall_s=result.counters["stall_s"],
        refresh_tokens=result.refresh_tokens,
        seconds=result.seconds,
        wall_s=wall_s,
    )


def run_arms(
    model: SimulatedModel,
    names: Sequence[str],
    load: Load,
    memories: Sequence[Memory],
    cost: CostModel,
    serving: Serving,
    progress: Callable[[str, int], None] = lambda what, done: None,
) -> list[ArmResult]:
    """Serve ``load`` with every arm under every budget, budgets in the outer order.

    Args:
        names: of :data:`ARMS`.
        progress: called with what runs and how many requests it has finished.

    Raises:
        ValueError: before anything is served, for an unknown arm or memory too small for one, saying how much it takes;
            and as :func:`~dasc.cache.simulation.simulate`.
    """
    runs = [(name, memory, arm_config(model, name, memory, load, serving)) for memory in memories for name in names]
    results = []
    for name, memory, config in runs:
        report = partial(progress, f"{name}, {memory.state_bytes / 2**30:.4g} GiB")
        report(0)
        started = time.perf_counter()
        how = replace(serving, collective=ARMS[name].mode != "off")
        result = simulate(load, config, cost, how, progress=report)
        results.append(_summary(name, memory, config, result, time.perf_counter() - started))
    return results
