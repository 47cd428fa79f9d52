"""Kimi-Linear as published: its retained units of every layer and rank at a 16-token cutoff."""

from __future__ import annotations

import torch

from dasc.geometry import StateGeometry
from dasc.models.gate_parameters import GateParameters
from dasc.models.synthetic.gates import GEOMETRIES, gate_with_counts, spread_counts

# fmt: off
PUBLISHED_KIMI_LINEAR_COUNTS: tuple[tuple[int, ...], tuple[int, ...]] = (
    (600, 568, 558, 933, 890, 1268, 742, 588, 793, 868, 963, 590, 893, 310, 612, 673, 907, 1058, 568, 405),
    (266, 836, 176, 1096, 870, 1019, 534, 547, 913, 261, 781, 1165, 846, 516, 703, 975, 630, 986, 847, 635),
)
# fmt: on
"""Retained units at ``W_max`` 16 of each rank (tensor-parallel degree 2) and KDA layer."""

_W_MAX = 16.0
_MIXED_PAIRS, _RETAIN_ALL_PAIRS = 389, 36  # figure 6; the other 215 of 640 omit all


def published_kimi_linear() -> tuple[StateGeometry, GateParameters]:
    """A geometry and made-up parameters that agree with all that is published of Kimi-Linear's mask at 16 tokens.

    At ``W_max`` 16, ``a_s`` -0.3, the retained units of each layer and rank are :data:`PUBLISHED_KIMI_LINEAR_COUNTS`
    (heads 0 to 15 are rank 0), and of the 640 layer-head pairs 389 are mixed, 215 omit all and 36 retain all channels
    (figure 6). Which heads and channels they are is not published.
    """
    geometry = GEOMETRIES["kimi-linear"]
    channels = geometry.head_k_dim
    heads = geometry.num_value_heads // len(PUBLISHED_KIMI_LINEAR_COUNTS)
    rng = torch.Generator().manual_seed(0)
    cells = [counts[layer] for layer in range(geometry.num_layers) for counts in PUBLISHED_KIMI_LINEAR_COUNTS]
    # One head that retains all in each of the fullest cells; what is left of a cell goes to its mixed heads.
    fullest = sorted(range(len(cells)), key=lambda cell: -cells[cell])[:_RETAIN_ALL_PAIRS]
    full = [int(cell in fullest) for cell in range(len(cells))]
    rest = [count - channels * f for count, f in zip(cells, full, strict=True)]
    mixed = [-(-count // (channels - 1)) for count in rest]  # the fewest heads that can hold them
    while sum(mixed) < _MIXED_PAIRS:
        open_cells = [cell for cell in range(len(cells)) if mixed[cell] < min(heads - full[cell], rest[cell])]
        mixed[max(open_cells, key=lambda cell: rest[cell] / mixed[cell])] += 1
    retained: list[int] = []
    for count, f, m in zip(rest, full, mixed, strict=True):
        counts = spread_counts(count, m, 1, channels - 1, rng) + [channels] * f + [0] * (heads - m - f)
        retained += [counts[i] for i in torch.randperm(heads, generator=rng).tolist()]
    per_head = torch.tensor(retained).view(geometry.num_layers, geometry.num_value_heads)
    return geometry, gate_with_counts(geometry, per_head, w_max=_W_MAX, a_s=-0.3, seed=0)
