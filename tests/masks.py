"""Geometries and masks that the tests of layouts, placement and plans draw from."""

from functools import cache

import torch
from torch import Tensor

from dasc.geometry import StateGeometry
from dasc.magnitudes import UnitMagnitudes
from dasc.models import Checkpoint
from dasc.models.families import family_of_name
from dasc.models.synthetic import GEOMETRIES, example_gate, published_kimi_linear
from dasc.reference import select_units, static_horizons

KIMI_LINEAR = StateGeometry(
    family="kimi_linear",
    kind="kda",
    num_blocks=27,
    recurrent_layers=tuple(b for b in range(27) if b % 4 != 3 and b != 26),
    num_value_heads=32,
    num_key_heads=32,
    head_v_dim=128,
    head_k_dim=128,
)

# Retained units a layer at W_max = 16 on each of two ranks, as published.
KIMI_LINEAR_COUNTS = (
    (600, 568, 558, 933, 890, 1268, 742, 588, 793, 868, 963, 590, 893, 310, 612, 673, 907, 1058, 568, 405),
    (266, 836, 176, 1096, 870, 1019, 534, 547, 913, 261, 781, 1165, 846, 516, 703, 975, 630, 986, 847, 635),
)


def kimi_linear_mask() -> Tensor:
    """A mask with the published counts; which units of a rank are retained is made up."""
    gen = torch.Generator().manual_seed(0)
    mask = torch.zeros(20, 2, 2048, dtype=torch.bool)
    for rank, counts in enumerate(KIMI_LINEAR_COUNTS):
        for layer, count in enumerate(counts):
            mask[layer, rank, torch.randperm(2048, generator=gen)[:count]] = True
    return mask.flatten(1)


def gdn(layers: int = 2, key_heads: int = 2, bundle: int = 2, v_dim: int = 3, k_dim: int = 5) -> StateGeometry:
    """A small GDN geometry, full-attention blocks between the recurrent ones."""
    blocks = tuple(range(0, 2 * layers, 2))
    return StateGeometry("small_gdn", "gdn", 2 * layers, blocks, key_heads * bundle, key_heads, v_dim, k_dim)


def kda(layers: int = 2, heads: int = 4, v_dim: int = 3, k_dim: int = 5) -> StateGeometry:
    """A small KDA geometry."""
    return StateGeometry("small_kda", "kda", layers, tuple(range(layers)), heads, heads, v_dim, k_dim)


def seeded_mask(geometry: StateGeometry, seed: int, kept: float = 0.5) -> Tensor:
    """Each unit is retained with probability ``kept``: 0 and 1 give none and all."""
    gen = torch.Generator().manual_seed(seed)
    return torch.rand(geometry.num_layers, geometry.units_per_layer, generator=gen) < kept


@cache
def model_mask(model: str, w_max: int) -> tuple[StateGeometry, Tensor]:
    """Geometry and mask of a published model, from made-up parameters; Kimi-Linear's has the published counts at 16."""
    if model == "kimi-linear":
        geometry, gate = published_kimi_linear()
    else:
        geometry = GEOMETRIES[model]
        gate = example_gate(geometry)
    return geometry, select_units(static_horizons(gate, family_of_name(geometry.family).default_gate_input), w_max)


def seeded_magnitudes(checkpoint: Checkpoint, seed: int = 0) -> UnitMagnitudes:
    """Magnitudes of a model that was never run."""
    shape = (checkpoint.geometry.num_layers, checkpoint.geometry.units_per_layer)
    values = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return UnitMagnitudes(values, checkpoint.gate.fingerprint(), {"prefixes": "none"})
