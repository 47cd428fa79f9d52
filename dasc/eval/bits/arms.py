"""Ways to spend the bytes of a checkpoint on its units. An allocation is the bits of each unit, ``[L, U]``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dasc.eval.states import Prefixes
from dasc.geometry import StateGeometry
from dasc.reference import (
    BITS,
    RANDOM_MASK_SEEDS,
    allocate_bits,
    expected_magnitudes,
    head_shares,
    pack_bits,
    random_mask,
    state_magnitude,
    unit_bytes,
    unit_importance,
    unpack_bits,
)


@dataclass(frozen=True, eq=False)
class Units:
    """What an arm may know of a model's units.

    Attributes:
        geometry: of the model.
        by_horizon: ``[L, U]`` float64, importance from the weights alone.
        by_range: ``[L, U]`` float64, importance with magnitudes measured on calibration prefixes.
        by_share: ``[L, U]`` float64, importance with these magnitudes relative to their head's.
        seeds: Random masks.
        temporal: dtype of the state.
    """

    geometry: StateGeometry
    by_horizon: Tensor
    by_range: Tensor
    by_share: Tensor
    seeds: int = len(RANDOM_MASK_SEEDS)
    temporal: torch.dtype = torch.float32

    @classmethod
    def of(
        cls,
        geometry: StateGeometry,
        horizons: Tensor,
        calibration: Sequence[Prefixes],
        *,
        prefix_tokens: int,
        use_tokens: int,
        seeds: int,
    ) -> Units:
        """From ``[L, U]`` horizons and calibration prefixes, see :func:`~dasc.reference.unit_importance`."""
        states = torch.cat([prefixes.temporal for prefixes in calibration], dim=1)
        magnitudes = state_magnitude(states, geometry.kind).square().mean(dim=1).sqrt()
        expected = expected_magnitudes(horizons, prefix_tokens)
        return cls(
            geometry=geometry,
            by_horizon=unit_importance(horizons, expected, use_tokens),
            by_range=unit_importance(horizons, magnitudes, use_tokens),
            by_share=unit_importance(horizons, head_shares(magnitudes, geometry), use_tokens),
            seeds=seeds,
            temporal=states.dtype,
        )

    def allocate(self, importance: Tensor, budget_bytes: int, widths: Sequence[int] = BITS) -> Tensor:
        """:func:`~dasc.reference.allocate_bits` for these units."""
        return allocate_bits(importance, budget_bytes, self.geometry, widths=widths, temporal=self.temporal)

    def uniform(self, width: int) -> Tensor:
        """All units with as many bits."""
        return torch.full((self.geometry.num_layers, self.geometry.units_per_layer), width)

    def uniform_bytes(self, width: int) -> int:
        """Stored bytes of :meth:`uniform`."""
        return self.geometry.num_units * unit_bytes(self.geometry, width, self.temporal)


Allocate = Callable[[Units, int], list[Tensor]]


def _keep(width: int) -> Allocate:
    """The longest horizons that fit."""
    return lambda units, budget: [units.allocate(units.by_horizon, budget, (0, width))]


def _random(units: Units, budget: int) -> list[Tensor]:
    """As many units of each layer as :func:`_keep` of 8 bits keeps, one allocation a seed."""
    [kept] = _keep(8)(units, budget)
    drawn = [random_mask(kept == 8, seed).long() * 8 for seed in RANDOM_MASK_SEEDS[: units.seeds]]
    # with all units of a layer kept, or none, there is nothing to draw, and a mean would differ by its rounding
    return drawn[:1] if all(torch.equal(bits, drawn[0]) for bits in drawn) else drawn


def _uniform(width: int) -> Allocate:
    """Only where this is the whole budget: at a larger one it would not be of equal bytes."""
    return lambda units, budget: [units.uniform(width)] if budget == units.uniform_bytes(width) else []


ARMS: dict[str, Allocate] = {
    "keep-fp32": _keep(32),
    "keep-int8": _keep(8),
    "keep-int4": _keep(4),
    "keep-int8-range": lambda units, budget: [units.allocate(units.by_range, budget, (0, 8))],
    "bits-horizon": lambda units, budget: [units.allocate(units.by_horizon, budget)],
    "bits-range": lambda units, budget: [units.allocate(units.by_range, budget)],
    "bits-share": lambda units, budget: [units.allocate(units.by_share, budget)],
    "uniform-8": _uniform(8),
    "uniform-4": _uniform(4),
    "random-int8": _random,
}
"""By name: allocations of a byte budget, none where an arm has nothing of these bytes, several for several seeds.

``keep-*`` keep or drop by horizon, the paper's way, ``keep-int8-range`` by horizon and magnitude. ``bits-*`` give bits
by horizon, by horizon and magnitude, or by horizon and magnitude relative to the head's.
"""


def quantised(prefixes: Prefixes, bits: Tensor) -> Prefixes:
    """Store the temporal states with ``bits`` and load them again (NR). Convolution rows stay as they are.

    Args:
        prefixes: are not changed.
        bits: ``[L, U]`` int64, bits of each unit.

    Raises:
        ValueError: for other bits, or states that cannot be stored so.
    """
    geometry = prefixes.model.config.geometry
    loaded = unpack_bits(pack_bits(prefixes.temporal, bits, geometry), bits, geometry)
    return dataclasses.replace(prefixes, temporal=loaded)
