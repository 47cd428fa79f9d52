"""From a checkpoint to a selection plan, and to the table that says what it would gain.

This is the one place where reading, horizons, selection, placement and layout are strung together; the commands and the
serving plugin call it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dasc.accounting import (
    bottleneck_compression,
    checkpoint_compression,
    temporal_compression,
    usable_slots,
)
from dasc.geometry import DtypePolicy, StateGeometry
from dasc.layout import LayoutKind, rank_layouts
from dasc.magnitudes import UnitMagnitudes
from dasc.models import Checkpoint
from dasc.placement import PLACEMENT_MODES, Placement, PlacementMode
from dasc.plan import SelectionPlan
from dasc.reference import (
    layer_fractions,
    mixed_pairs,
    place,
    random_mask,
    replay_window,
    retained_fractions,
    select_largest,
    select_units,
    static_horizons,
    unit_windows,
)

DEFAULT_EPSILON = 1e-3
DEFAULT_W_MAX = (16, 64, 128, 512)


@dataclass(frozen=True)
class RankSummary:
    """One tensor-parallel degree under one placement mode.

    Attributes:
        ranks: ``P``.
        mode: placement mode.
        unavailable: why this mode cannot be had, or ``None``; then the other fields hold.
        slot_bytes: bytes of a checkpoint on the fullest rank, which limits all.
        compression: dense bytes of a rank over ``slot_bytes`` (``C_ckpt`` by the bottleneck rank).
        moved_units: units a checkpoint sends to other ranks at each store and load.
        slots: usable checkpoints in the budget of a rank.
    """

    ranks: int
    mode: PlacementMode
    unavailable: str | None = None
    slot_bytes: int = 0
    compression: float = 0.0
    moved_units: int = 0
    slots: int = 0


@dataclass(frozen=True)
class WindowSummary:
    """What one ``W_max`` would keep and save, whole model unless said otherwise.

    Attributes:
        w_max: tokens.
        units_kept: retained units, of ``units``.
        mixed_pairs: layer-head pairs that hold both kept and omitted channels, of ``pairs``; ``None`` for GDN, whose
            unit is the head.
        layer_fraction: least and largest retained fraction of a layer.
        c_temp_ragged: eq. 6, temporal payload only.
        c_temp_padded: the same for the padded layout.
        c_ckpt: eq. 6 for the chosen layout, convolution rows counted.
        checkpoint_bytes: one checkpoint in the chosen layout on one rank that holds the whole model.
        replay_tokens: the longest window that WR would replay (eq. 7, before the cap by the prefix).
        ranks: one entry for each degree and mode, in the order asked for.
    """

    w_max: int
    units_kept: int
    units: int
    mixed_pairs: int | None
    pairs: int
    layer_fraction: tuple[float, float]
    c_temp_ragged: float
    c_temp_padded: float
    c_ckpt: float
    checkpoint_bytes: int
    replay_tokens: int
    ranks: tuple[RankSummary, ...]


@dataclass(frozen=True)
class ModelSummary:
    """The table behind ``dasc plan``.

    Attributes:
        budget_bytes: state memory of one rank's checkpoint pool.
        dense_bytes: one dense checkpoint, all ranks together.
        dense_slots: usable dense checkpoints in the budget, by tensor-parallel degree.
        magnitudes_sha256: of the observed magnitudes that units were chosen by; ``None`` for horizons.
    """

    checkpoint: Checkpoint
    gate_input: float
    epsilon: float
    layout: LayoutKind
    dtypes: DtypePolicy
    budget_bytes: int
    dense_bytes: int
    dense_slots: dict[int, int]
    windows: tuple[WindowSummary, ...]
    magnitudes_sha256: str | None = None


def build_plan(
    checkpoint: Checkpoint,
    w_max: int,
    *,
    gate_input: float | None = None,
    epsilon: float = DEFAULT_EPSILON,
    ranks: Sequence[int] = (1,),
    mode: PlacementMode = "off",
    layout: LayoutKind = "ragged",
    dtypes: DtypePolicy = DtypePolicy(),  # noqa: B008 - frozen
    mask_seed: int | None = None,
    magnitudes: UnitMagnitudes | None = None,
) -> SelectionPlan:
    """Select the units of ``checkpoint`` at ``w_max`` and fix their placement on each degree of ``ranks``.

    Args:
        w_max: cutoff in tokens, at least 4 (section 4.2).
        gate_input: representative gate input ``a_s``; the family's own when ``None``.
        mask_seed: for comparison (section 5.2): keep as many units of each layer, drawn by this seed.
        magnitudes: keep as many units in all, those that were observed to be the largest.

    Raises:
        ValueError: for values outside their range, heads that a degree cannot share, a mode the weights rule out, a
            balanced placement with the padded layout, magnitudes of another model, or both a seed and magnitudes.
    """
    if mask_seed is not None and magnitudes is not None:
        raise ValueError("mask_seed and magnitudes must not both be given")
    gate_input = checkpoint.gate_input(gate_input)
    horizons = static_horizons(checkpoint.gate, gate_input, epsilon)
    mask = _selected(checkpoint, horizons, w_max, magnitudes)
    if mask_seed is not None:
        mask = random_mask(mask, mask_seed)
    placements = {p: _place(checkpoint, mask, p, mode) for p in ranks}
    if layout == "padded" and mode != "off":
        raise ValueError(f"storage balancing needs the ragged layout, got layout 'padded' with placement {mode!r}")
    return SelectionPlan(
        family=checkpoint.family.name,
        geometry=checkpoint.geometry,
        epsilon=epsilon,
        gate_input=gate_input,
        w_max=w_max,
        mask=mask,
        windows=unit_windows(horizons, mask, w_max),
        placements=placements,
        dtypes=dtypes,
        layout=layout,
        fingerprint=checkpoint.gate.fingerprint(),
    )


def _selected(checkpoint: Checkpoint, horizons: Tensor, w_max: int, magnitudes: UnitMagnitudes | None) -> Tensor:
    mask = select_units(horizons, w_max)
    if magnitudes is None:
        return mask
    magnitudes.check(checkpoint)
    return select_largest(magnitudes.values, int(mask.sum()))


def _place(checkpoint: Checkpoint, mask: Tensor, ranks: int, mode: PlacementMode) -> Placement:
    return place(checkpoint.geometry, mask, ranks, mode, packed_weights=checkpoint.quantization is not None)


def summarise(
    checkpoint: Checkpoint,
    w_max: Sequence[int] = DEFAULT_W_MAX,
    *,
    gate_input: float | None = None,
    epsilon: float = DEFAULT_EPSILON,
    ranks: Sequence[int] = (1, 2, 4, 8),
    budget_bytes: int = 8 << 30,
    layout: LayoutKind = "ragged",
    dtypes: DtypePolicy = DtypePolicy(),  # noqa: B008 - frozen
    magnitudes: UnitMagnitudes | None = None,
) -> ModelSummary:
    """Say for each ``w_max`` what a compressed checkpoint of this model keeps, takes and saves.

    Args:
        budget_bytes: state memory of *one rank's* checkpoint pool; slot 0 is reserved (appendix C.1).
        magnitudes: as for :func:`build_plan`.

    Raises:
        ValueError: for values outside their range, heads that a degree cannot share, or magnitudes of another model.
    """
    if layout not in ("ragged", "padded"):
        raise ValueError(f"layout must be 'ragged' or 'padded', got {layout!r}")
    gate_input = checkpoint.gate_input(gate_input)
    geometry = checkpoint.geometry
    horizons = static_horizons(checkpoint.gate, gate_input, epsilon)
    return ModelSummary(
        checkpoint=checkpoint,
        gate_input=gate_input,
        epsilon=epsilon,
        layout=layout,
        dtypes=dtypes,
        budget_bytes=budget_bytes,
        dense_bytes=geometry.dense_bytes(dtypes),
        dense_slots={p: usable_slots(budget_bytes, [geometry.shard(p).dense_bytes(dtypes)]) for p in ranks},
        windows=tuple(
            _summarise_window(checkpoint, horizons, w, ranks, budget_bytes, layout, dtypes, magnitudes) for w in w_max
        ),
        magnitudes_sha256=None if magnitudes is None else magnitudes.sha256(),
    )


def _summarise_window(
    checkpoint: Checkpoint,
    horizons: Tensor,
    w_max: int,
    ranks: Sequence[int],
    budget_bytes: int,
    layout: LayoutKind,
    dtypes: DtypePolicy,
    magnitudes: UnitMagnitudes | None,
) -> WindowSummary:
    geometry = checkpoint.geometry
    mask = _selected(checkpoint, horizons, w_max, magnitudes)
    windows = unit_windows(horizons, mask, w_max)
    by_kind = {kind: rank_layouts(geometry, mask, kind=kind, dtypes=dtypes) for kind in ("ragged", "padded")}
    fractions = retained_fractions(mask, geometry)
    layers = layer_fractions(fractions)
    return WindowSummary(
        w_max=w_max,
        units_kept=int(mask.sum()),
        units=geometry.num_units,
        mixed_pairs=mixed_pairs(fractions).mixed if geometry.kind == "kda" else None,
        pairs=geometry.num_layers * geometry.num_value_heads,
        layer_fraction=(layers.lowest, layers.highest),
        c_temp_ragged=temporal_compression(geometry, by_kind["ragged"]),
        c_temp_padded=temporal_compression(geometry, by_kind["padded"]),
        c_ckpt=checkpoint_compression(geometry, by_kind[layout]),
        checkpoint_bytes=sum(x.slot_bytes for x in by_kind[layout]),
        replay_tokens=replay_window(windows, w_max),
        ranks=tuple(
            _summarise_ranks(checkpoint, mask, p, mode, budget_bytes, layout, dtypes)
            for p in ranks
            for mode in PLACEMENT_MODES
        ),
    )


def _summarise_ranks(
    checkpoint: Checkpoint,
    mask: Tensor,
    ranks: int,
    mode: PlacementMode,
    budget_bytes: int,
    layout: LayoutKind,
    dtypes: DtypePolicy,
) -> RankSummary:
    geometry: StateGeometry = checkpoint.geometry
    geometry.check_ranks(ranks)
    if layout == "padded" and mode != "off":
        return RankSummary(ranks, mode, unavailable="needs the ragged layout")
    if mode == "hybrid" and checkpoint.quantization is not None:
        return RankSummary(ranks, mode, unavailable=f"weights are packed ({checkpoint.quantization})")
    placement = _place(checkpoint, mask, ranks, mode)
    layouts = rank_layouts(geometry, mask, ranks, kind=layout, placement=placement, dtypes=dtypes)
    slot_bytes = max(x.slot_bytes for x in layouts)
    return RankSummary(
        ranks=ranks,
        mode=mode,
        slot_bytes=slot_bytes,
        compression=bottleneck_compression(layouts),
        moved_units=placement.moved_units,
        slots=usable_slots(budget_bytes, [slot_bytes]),
    )
