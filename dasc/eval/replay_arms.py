"""The ways to store checkpoints that a replay compares, all in the same state memory (appendix C.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dasc.accounting import MemorySplit, checkpoint_compression, split_budget
from dasc.cache.checkpoints import AfterPrompt, AtJunctions
from dasc.cache.config import CacheConfig
from dasc.cache.engine import Engine
from dasc.cache.storage import TensorStorage, scratch_bytes, staging_bytes
from dasc.cache.transfers import ThreadMover
from dasc.eval.served_model import ServedModel, state_dtypes
from dasc.eval.simulate import default_native_slots
from dasc.geometry import DtypePolicy, Quantization
from dasc.layout import Layout, LayoutKind, rank_layouts
from dasc.models.hybrid import WindowKV
from dasc.planner import build_plan
from dasc.reference import RANDOM_MASK_SEEDS, replay_window, settle_tokens, static_horizons

MIN_JUNCTION_TOKENS = 8
"""A shared start shorter than this, such as a role's header, is not worth a checkpoint."""

DEFAULT_TOLERANCE = 0.1


@dataclass(frozen=True)
class Arm:
    """One way to store checkpoints.

    Attributes:
        compressed: there is a compressed pool; the only one is dense otherwise.
        selected: units are selected by their horizons; all of them are stored otherwise.
        padded: in the padded layout whatever the others have.
        quantized: retained units as INT8 or INT4.
        random: units chosen at random, as many of each layer.
        observed: units chosen by their observed magnitudes, as many in all.
        refresh: replay the window on a compressed hit (WR instead of NR).
        auto: but not on a hit that settles by itself before its answer begins.
        spill: keep dense checkpoints too.
        cached: without, nothing is stored or looked up.
    """

    compressed: bool = True
    selected: bool = True
    padded: bool = False
    quantized: Quantization | None = None
    random: bool = False
    observed: bool = False
    refresh: bool = False
    auto: bool = False
    spill: bool = True
    cached: bool = True


ARMS = {
    "dense": Arm(compressed=False),
    "nr": Arm(),
    "wr": Arm(refresh=True),
    "auto": Arm(refresh=True, auto=True),
    "padded": Arm(padded=True),
    "int8": Arm(quantized="int8"),
    "int4": Arm(quantized="int4"),
    "random": Arm(random=True),
    "compressed-only": Arm(spill=False),
    "off": Arm(compressed=False, cached=False),
}
"""By name. All loads are by NR but those of ``wr`` and some of ``auto``."""


@dataclass(frozen=True)
class Serving:
    """What all arms of a replay have in common.

    Attributes:
        memory_bytes: state memory: running states, checkpoints of both tiers and buffers.
        kv_tokens: tokens that KV holds, accounted apart.
        server_limit: most running requests.
        prefill_tokens: most prompt tokens of a step.
        layout: of compressed checkpoints, but for ``padded``.
        window_kv: what replay tokens attend to.
        tolerance: of ``auto``: share of an omission that may be left when the answer begins
            (:func:`~dasc.reference.settle_tokens`).
    """

    memory_bytes: int
    kv_tokens: int
    server_limit: int
    prefill_tokens: int
    layout: LayoutKind = "ragged"
    window_kv: WindowKV = "replayed"
    tolerance: float = DEFAULT_TOLERANCE


@dataclass(frozen=True, eq=False)
class PreparedArm:
    """An arm with its memory divided.

    Attributes:
        name: for reports.
        arm: what it is.
        layout: of a compressed checkpoint; ``None`` without a compressed pool.
        replay_tokens: the longest window that a compressed hit replays (eq. 7); 0 for NR.
        refresh_below_tokens: hits with at least so many new prompt tokens replay nothing; ``None`` but for ``auto``.
        split: how the budget is divided.
        compression: dense bytes of a checkpoint over those of a compressed one.
    """

    name: str
    arm: Arm
    layout: Layout | None
    replay_tokens: int
    refresh_below_tokens: int | None
    split: MemorySplit
    compression: float


def prepare_arm(name: str, w_max: int, served: ServedModel, serving: Serving, *, seed: int = 0) -> PreparedArm:
    """Plan an arm and divide its memory.

    Charged besides the pools: buffers of one pack and one load under way, and for ``wr`` and ``auto`` the scratch
    state of a layer for every request that may be refreshed in one forward.

    Args:
        name: of :data:`ARMS`.
        w_max: cutoff in tokens; arms without a compressed pool have no use for it.
        served: the model.
        serving: what all arms have in common.
        seed: number of the run, which chooses the random mask.

    Raises:
        ValueError: for an unknown arm, or memory too small for it, saying how much it takes.
    """
    if name not in ARMS:
        raise ValueError(f"arms must be of {', '.join(ARMS)}, got {name!r}")
    arm, geometry = ARMS[name], served.model.config.geometry
    dtypes = state_dtypes(served.model, quantized=arm.quantized)
    dense_bytes = geometry.dense_bytes(dtypes)
    layout, replay_tokens, refresh_below = None, 0, None
    try:
        if arm.compressed:
            mask_seed = RANDOM_MASK_SEEDS[seed % len(RANDOM_MASK_SEEDS)]
            layout, replay_tokens = plan_arm(arm, w_max, served, dtypes, layout=serving.layout, mask_seed=mask_seed)
            if arm.auto:
                horizons = static_horizons(served.checkpoint.gate, served.checkpoint.family.default_gate_input)
                refresh_below = settle_tokens(horizons, layout.mask, serving.tolerance)
            scratch = scratch_bytes(geometry, dtypes, serving.server_limit) if replay_tokens else 0
            split = split_budget(
                serving.memory_bytes,
                dense_slot_bytes=dense_bytes,
                compressed_slot_bytes=layout.slot_bytes,
                native_slots=default_native_slots(serving.server_limit),
                tmp_bytes=staging_bytes(layout) + scratch,
            )
        else:
            split = split_budget(serving.memory_bytes, dense_slot_bytes=dense_bytes)
    except ValueError as error:
        raise ValueError(f"arm {name}: {error}") from error
    compression = 1.0 if layout is None else checkpoint_compression(geometry, [layout])
    return PreparedArm(name, arm, layout, replay_tokens, refresh_below, split, compression)


def plan_arm(
    arm: Arm,
    w_max: int,
    served: ServedModel,
    dtypes: DtypePolicy,
    *,
    layout: LayoutKind = "ragged",
    mask_seed: int = RANDOM_MASK_SEEDS[0],
) -> tuple[Layout, int]:
    """Layout of a compressed checkpoint, and the longest window of a refresh (eq. 7), 0 for NR.

    Args:
        arm: with a compressed pool.
        w_max: cutoff in tokens.
        served: the model.
        dtypes: of checkpoints.
        layout: unless the arm is padded.
        mask_seed: of a random mask.

    Raises:
        ValueError: for an arm of observed units and a model without magnitudes.
    """
    seed = mask_seed if arm.random else None
    magnitudes = served.magnitudes if arm.observed else None
    if arm.observed and magnitudes is None:
        raise ValueError("magnitudes must be given for units chosen by them: dasc observe measures them")
    plan = build_plan(served.checkpoint, w_max, ranks=(), dtypes=dtypes, mask_seed=seed, magnitudes=magnitudes)
    mask = plan.mask if arm.selected else torch.ones_like(plan.mask)
    [rank_layout] = rank_layouts(plan.geometry, mask, kind="padded" if arm.padded else layout, dtypes=dtypes)
    return rank_layout, replay_window(plan.windows, w_max) if arm.refresh else 0


def build_engine(prepared: PreparedArm, served: ServedModel, serving: Serving) -> Engine:
    """An empty engine with the pools of a prepared arm. Demotions run in the background.

    As in SGLang, states are stored after each prompt, which is where frozen conversations go on from, and after each
    answer; and at junctions besides.

    Raises:
        ValueError: when the machine has not enough memory for the pools or for KV.
    """
    try:
        return _allocate(prepared, served, serving)
    except (MemoryError, RuntimeError) as error:  # torch knows no more particular error on the CPU
        raise ValueError(
            f"arm {prepared.name}: no memory for its pools and {serving.kv_tokens} tokens of KV"
        ) from error


def _allocate(prepared: PreparedArm, served: ServedModel, serving: Serving) -> Engine:
    model, split, arm = served.model, prepared.split, prepared.arm
    storage = TensorStorage(
        model.config.geometry,
        split.native_slots,
        state_dtypes(model, quantized=arm.quantized),
        layout=prepared.layout,
        compressed_slots=split.compressed_slots,
        codec=served.codec,
        device=model.device,
    )
    assert storage.native_bytes + storage.compressed_bytes + split.tmp_bytes <= serving.memory_bytes
    config = CacheConfig(
        native_slots=split.native_slots,
        compressed_slots=split.compressed_slots,
        kv_pages=serving.kv_tokens,
        spill=arm.spill,
        policies=(AfterPrompt(), AtJunctions(MIN_JUNCTION_TOKENS)),
        # spare slots are freed before a request needs one (B.2); the dense arm has no tier to demote to
        watermark=0 if prepared.layout is None else max(split.native_slots - serving.server_limit, 0),
        native_slot_bytes=storage.native_slot_bytes,
        compressed_slot_bytes=max(storage.compressed_slot_bytes, 1),
        refresh_window_tokens=prepared.replay_tokens,
        refresh_below_tokens=prepared.refresh_below_tokens,
    )
    return Engine(
        model,
        config,
        storage,
        server_limit=serving.server_limit,
        prefill_tokens=serving.prefill_tokens,
        window_kv=serving.window_kv,
        mover_type=ThreadMover,
    )
