"""How a model forgets, from its weights alone: the numbers behind figures 1 and 5 to 8 (section 3.3, appendix A.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dasc.geometry import StateGeometry
from dasc.models import Checkpoint
from dasc.reference import (
    layer_fractions,
    mixed_pairs,
    one_step_decay,
    retained_fractions,
    select_units,
    static_horizons,
)

DECAY_BINS = 50
"""Of the histogram of one-step decays, from 0 to 1."""
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


@dataclass(frozen=True)
class CutoffProfile:
    """Retention at one cutoff ``w_max`` (tokens).

    ``mixed``, ``omit_all`` and ``retain_all`` count layer-head pairs (appendix A.1); for GDN none is mixed.
    """

    w_max: int
    retained: int
    retained_fraction: float
    layer_counts: tuple[int, ...]
    layer_fraction_min: float
    layer_fraction_max: float
    mixed: int
    omit_all: int
    retain_all: int


@dataclass(frozen=True, eq=False)
class ModelProfile:
    """Decays, horizons and retention of one model.

    Attributes:
        alpha: ``[L, U]`` one-step decay ``exp(g_s)``.
        horizons: ``[L, U]`` static horizons in tokens.
        fractions: ``[L, HV]`` retained-channel fractions at ``w_max``.
        median_layer: index (of ``L``) of the layer whose mean retained fraction is nearest to the median over layers;
            the first of equals.
    """

    source: str
    geometry: StateGeometry
    gate: str
    gate_input: float
    epsilon: float
    w_max: int
    alpha: Tensor
    horizons: Tensor
    fractions: Tensor
    median_layer: int
    cutoffs: tuple[CutoffProfile, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values: all that the figures show. An infinite horizon becomes ``None``."""
        geometry = self.geometry
        median_channels = self.horizons[self.median_layer].reshape(geometry.num_value_heads, -1)
        return {
            "model": self.source,
            "geometry": asdict(self.geometry),
            "gate": self.gate,
            "gate_input": self.gate_input,
            "epsilon": self.epsilon,
            "quantiles": list(QUANTILES),
            "alpha_quantiles": quantiles(self.alpha),
            "alpha_histogram": torch.histc(self.alpha, bins=DECAY_BINS, min=0, max=1).long().tolist(),
            "horizon_quantiles_tokens": _finite(quantiles(self.horizons)),
            "head_horizons_tokens": [_finite(row) for row in self.horizons.tolist()]
            if geometry.kind == "gdn"
            else None,
            "median_block_horizons_tokens": [_finite(row) for row in median_channels.tolist()],
            "map_w_max": self.w_max,
            "median_block": self.geometry.recurrent_layers[self.median_layer],
            "layer_head_fractions": self.fractions.tolist(),
            "cutoffs": [asdict(cutoff) for cutoff in self.cutoffs],
        }


def _finite(values: list[float]) -> list[float | None]:
    return [None if value == float("inf") else value for value in values]


def quantiles(values: Tensor) -> list[float]:
    """:data:`QUANTILES` over all units, each an observed value (so that infinite horizons do not spread)."""
    ordered = values.flatten().sort().values
    return [float(ordered[round(q * (len(ordered) - 1))]) for q in QUANTILES]


def profile_model(
    checkpoint: Checkpoint,
    *,
    w_max: int | None = None,
    w_grid: Sequence[int] = (16, 64, 128, 512),
    gate_input: float | None = None,
    epsilon: float = 1e-3,
) -> ModelProfile:
    """Compute the profile of ``checkpoint``.

    Args:
        w_max: cutoff of the maps; 16 tokens, or 64 for a safe gate, as the paper draws them.

    Raises:
        ValueError: for values outside their range.
    """
    geometry, gate = checkpoint.geometry, checkpoint.gate
    gate_input = checkpoint.gate_input(gate_input)
    w_max = (64 if gate.gate == "safe" else 16) if w_max is None else w_max
    horizons = static_horizons(gate, gate_input, epsilon)
    fractions = retained_fractions(select_units(horizons, w_max), geometry)
    layer_means = layer_fractions(fractions).mean
    median = layer_means.quantile(0.5)
    return ModelProfile(
        source=checkpoint.source,
        geometry=geometry,
        gate=gate.gate,
        gate_input=gate_input,
        epsilon=epsilon,
        w_max=w_max,
        alpha=one_step_decay(gate, gate_input),
        horizons=horizons,
        fractions=fractions,
        median_layer=int(torch.argmin((layer_means - median).abs())),
        cutoffs=tuple(_cutoff(horizons, geometry, w) for w in w_grid),
    )


def _cutoff(horizons: Tensor, geometry: StateGeometry, w_max: int) -> CutoffProfile:
    mask = select_units(horizons, w_max)
    fractions = retained_fractions(mask, geometry)
    layers = layer_fractions(fractions)
    pairs = mixed_pairs(fractions)
    return CutoffProfile(
        w_max=w_max,
        retained=int(mask.sum()),
        retained_fraction=float(mask.double().mean()),
        layer_counts=tuple(mask.sum(dim=1).tolist()),
        layer_fraction_min=layers.lowest,
        layer_fraction_max=layers.highest,
        mixed=pairs.mixed,
        omit_all=pairs.omit_all,
        retain_all=pairs.retain_all,
    )
