"""Balancing retained units over tensor-parallel ranks: the algorithms of appendix B.1.

Compute side (a): head bundles are permuted so that ranks retain about as many units. Storage side (b): what is still
uneven is stored on other ranks, by :func:`balance_storage`. Both are exact and deterministic, ties included.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dasc.geometry import StateGeometry
from dasc.layout import check_mask
from dasc.placement import (
    Placement,
    PlacementMode,
    balance_storage,
    inverse_order,
    key_head_order,
    permute_heads,
)

__all__ = [
    "assign_bundles",
    "assign_bundles_literal",
    "balance_storage",
    "bundle_costs",
    "head_order",
    "inverse_order",
    "key_head_order",
    "permute_heads",
    "place",
]

_MAX_TOTAL_COST = 2**30  # keeps sums of squared loads, and their changes, inside int64


def bundle_costs(geometry: StateGeometry, mask: Tensor) -> Tensor:
    """``C_{l,b}``: retained units of each bundle, int64 ``[L, HV / B]``.

    Args:
        mask: boolean ``[L, units_per_layer]``, true where a unit is retained.

    Raises:
        ValueError: for a mask of another shape or dtype.
    """
    check_mask(geometry, mask)
    return mask.reshape(geometry.num_layers, geometry.num_key_heads, -1).sum(dim=2)


def _check_costs(costs: Tensor, ranks: int) -> None:
    if costs.ndim != 2 or costs.dtype != torch.int64 or costs.numel() == 0:
        raise ValueError(f"costs must be a non-empty int64 [L, bundles] tensor, got {costs.dtype} {list(costs.shape)}")
    if ranks < 1 or costs.shape[1] % ranks:
        raise ValueError(f"{costs.shape[1]} bundles cannot be shared equally by {ranks} ranks")
    if int(costs.min()) < 0 or int(costs.max()) > _MAX_TOTAL_COST or int(costs.sum()) > _MAX_TOTAL_COST:
        raise ValueError(f"costs must not be negative and sum to at most {_MAX_TOTAL_COST}")


def assign_bundles_literal(costs: Tensor, ranks: int) -> Tensor:
    """Bundle owners by the letter of B.1 (a), in plain Python: the oracle of :func:`assign_bundles`.

    Args:
        costs: ``C_{l,b}``, int64 ``[L, bundles]``, not negative.
        ranks: ``P``; divides the bundles, and each rank gets ``bundles / P`` in every layer.

    Returns:
        Owning rank of each bundle, int64 ``[L, bundles]``. No swap of two bundles in one layer improves
        ``Phi = (max load, sum of squared loads)``.

    Raises:
        ValueError: for costs of another shape, dtype or sign, or bundles that ``ranks`` does not divide.
    """
    _check_costs(costs, ranks)
    table: list[list[int]] = costs.tolist()
    bundles = len(table[0])
    quota = bundles // ranks

    # Steps 1 and 2: greedy, heaviest bundle first.
    load = [0] * ranks
    owners = [[-1] * bundles for _ in table]
    for layer, cost in enumerate(table):
        used = [0] * ranks
        for b in sorted(range(bundles), key=lambda b: (-cost[b], b)):
            open_ranks = [r for r in range(ranks) if used[r] < quota]
            _, _, _, r = min((load[r] + cost[b], load[r], used[r], r) for r in open_ranks)
            owners[layer][b] = r
            used[r] += 1
            load[r] += cost[b]

    # Steps 3 to 6: the best strictly improving swap, the first of equals, until there is none.
    while True:
        best = (max(load), sum(x * x for x in load))
        swap = None
        for layer, cost in enumerate(table):
            for b1 in range(bundles):
                for b2 in range(b1 + 1, bundles):
                    r1, r2 = owners[layer][b1], owners[layer][b2]
                    if r1 == r2:
                        continue
                    after = list(load)
                    after[r1] += cost[b2] - cost[b1]
                    after[r2] += cost[b1] - cost[b2]
                    phi = (max(after), sum(x * x for x in after))
                    if phi < best:
                        best, swap = phi, (layer, b1, b2, after)
        if swap is None:
            return torch.tensor(owners)
        layer, b1, b2, load = swap
        row = owners[layer]
        row[b1], row[b2] = row[b2], row[b1]


def assign_bundles(costs: Tensor, ranks: int) -> Tensor:
    """Bundle owners by B.1 (a): the same as :func:`assign_bundles_literal`, to the last tie, and fast.

    Args:
        costs: ``C_{l,b}``, int64 ``[L, bundles]``, not negative.
        ranks: ``P``; divides the bundles.

    Returns:
        Owning rank of each bundle, int64 ``[L, bundles]``.

    Raises:
        ValueError: as :func:`assign_bundles_literal`.
    """
    _check_costs(costs, ranks)
    table = costs.numpy(force=True)
    owners, load = _greedy(table, ranks)
    _refine(table, owners, load)
    return torch.from_numpy(owners)


def _greedy(costs: npt.NDArray[np.int64], ranks: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Steps 1 and 2 of B.1 (a): owners ``[L, bundles]`` and loads ``[P]``."""
    quota = costs.shape[1] // ranks
    load = [0] * ranks
    owners = np.empty(costs.shape, dtype=np.int64)
    for layer, row in enumerate(costs):
        # C is the same for every candidate rank, so (L_r + C, L_r, u_r, r) orders as (L_r, u_r, r): a heap.
        heap = [(load[r], 0, r) for r in range(ranks)]
        heapq.heapify(heap)
        for b in np.argsort(-row, kind="stable"):
            total, used, r = heapq.heappop(heap)
            owners[layer, b] = r
            load[r] = total + int(row[b])
            if used + 1 < quota:
                heapq.heappush(heap, (load[r], used + 1, r))
    return owners, np.array(load, dtype=np.int64)


def _refine(costs: npt.NDArray[np.int64], owners: npt.NDArray[np.int64], load: npt.NDArray[np.int64]) -> None:
    """Steps 3 to 6 of B.1 (a); ``owners`` and ``load`` are changed in place.

    A candidate swap moves ``d > 0`` units from the owner of its heavier bundle, ``source``, to that of the lighter,
    ``target``. With ``gap = L_source - L_target`` the sum of squares falls by ``2 d (gap - d)``, so only ``d < gap``
    can improve; both new loads are then below ``L_source``, and the maximum cannot rise.
    """
    ranks = len(load)
    b1, b2 = np.triu_indices(costs.shape[1], k=1)  # row-major: the fixed scan order
    moved = costs[:, b1] - costs[:, b2]
    # No gap exceeds the first spread of loads: a swap that improves never widens it.
    layer, pair = np.nonzero((moved != 0) & (np.abs(moved) < np.ptp(load)))
    if not len(layer):
        return
    moved = moved[layer, pair]
    heavy = np.where(moved > 0, b1[pair], b2[pair])
    light = np.where(moved > 0, b2[pair], b1[pair])
    moved = np.abs(moved)
    bounds = np.searchsorted(layer, np.arange(len(costs) + 1))
    source, target = owners[layer, heavy], owners[layer, light]
    route = source * ranks + target
    while True:
        gap = (load[:, None] - load[None, :]).ravel()
        gain = moved * (gap[route] - moved)
        top = int(load.argmax())
        # The maximum falls only by a swap that relieves its rank; ranks that tie with it are among the others.
        relief = np.flatnonzero(source == top)
        maximum = np.maximum(load[top] - moved[relief], load[target[relief]] + moved[relief])
        maximum = np.maximum(maximum, np.delete(load, top).max(initial=0))
        lowest = maximum.min(initial=load[top])
        if lowest < load[top]:
            relief = relief[maximum == lowest]
            best = int(relief[gain[relief].argmax()])  # argmax takes the first of equals
        else:
            best = int(gain.argmax())
            if gain[best] <= 0:
                return
        at, i, j = layer[best], heavy[best], light[best]
        load[source[best]] -= moved[best]
        load[target[best]] += moved[best]
        owners[at, [i, j]] = owners[at, [j, i]]
        same = slice(bounds[at], bounds[at + 1])
        source[same] = owners[at, heavy[same]]
        target[same] = owners[at, light[same]]
        route[same] = source[same] * ranks + target[same]


def head_order(owners: Tensor, geometry: StateGeometry) -> Tensor:
    """Compute order of the value heads, int64 ``[L, HV]``: ``order[l, i]`` is the head computed at position ``i``.

    Blocks of ranks in rank order, bundles ascending inside a rank, the heads of a bundle adjacent and ascending.

    Args:
        owners: rank of each bundle, int64 ``[L, HV / B]``; every rank owns as many in every layer.

    Raises:
        ValueError: for owners of another shape or dtype, or unequal shares.
    """
    shape = (geometry.num_layers, geometry.num_key_heads)
    if owners.dtype != torch.int64 or tuple(owners.shape) != shape:
        raise ValueError(f"owners must be torch.int64 {shape}, got {owners.dtype} {tuple(owners.shape)}")
    by_rank = owners.sort(dim=1, stable=True)
    ranks = int(owners.max()) + 1
    geometry.check_ranks(ranks)
    blocks = torch.arange(geometry.num_key_heads) // (geometry.num_key_heads // ranks)
    if not torch.equal(by_rank.values, blocks.expand(shape)):
        raise ValueError(f"owners must give each of {ranks} ranks the same number of bundles in every layer")
    heads = by_rank.indices[:, :, None] * geometry.bundle + torch.arange(geometry.bundle)
    return heads.flatten(1)


def place(
    geometry: StateGeometry, mask: Tensor, ranks: int, mode: PlacementMode = "off", *, packed_weights: bool = False
) -> Placement:
    """Assign the units of a mask to tensor-parallel ranks (B.1).

    Args:
        mask: boolean ``[L, units_per_layer]``, true where a unit is retained.
        ranks: ``P``; divides the bundles.
        mode: ``off`` leaves heads and storage as they are, ``storage`` balances what ranks store, ``hybrid`` permutes
            head bundles first.
        packed_weights: the model's linear weights are quantised and packed, so heads cannot be permuted.

    Raises:
        ValueError: for an unknown mode, bundles that ``ranks`` does not divide, a mask of another shape, or ``hybrid``
            with packed weights.
    """
    check_mask(geometry, mask)
    geometry.check_ranks(ranks)
    if mode != "hybrid":
        order = torch.arange(geometry.num_value_heads).repeat(geometry.num_layers, 1)
    elif packed_weights:
        raise ValueError(
            "mode 'hybrid' permutes the heads of the linear weights, which packed quantised weights do not allow; "
            "use 'storage' (or 'off')"
        )
    else:
        order = head_order(assign_bundles(bundle_costs(geometry, mask), ranks), geometry)
    return Placement.from_head_order(geometry, mask, ranks, mode, order)
