"""Where units are computed and where they are stored over tensor-parallel ranks (appendix B.1), as data.

The algorithm that finds an order of the heads is in :mod:`dasc.reference.placement`. All else follows from that order
and the mask (:meth:`Placement.from_head_order`), so that a plan can check it. Here is also what brings a tensor's heads
into an order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dasc.geometry import StateGeometry

PlacementMode = Literal["off", "storage", "hybrid"]
PLACEMENT_MODES: tuple[PlacementMode, ...] = ("off", "storage", "hybrid")


@dataclass(frozen=True, eq=False)
class Placement:
    """The offline assignment for one mask and one tensor-parallel degree.

    Units of a rank are counted in its *local order*: layers ascending, then the rank's heads in compute order, then key
    channels; retained units only. That is the order of the rank's ragged slot before any transfer.

    Attributes:
        mode: ``off`` (heads and storage as sharded), ``storage`` (balance the stored units), ``hybrid`` (permute head
            bundles, then balance).
        ranks: ``P``.
        head_order: ``[L, HV]`` int64; ``head_order[l, i]`` is the model's value head computed at position ``i``. Rank
            ``r`` computes positions ``[r * HV / P, (r + 1) * HV / P)``. The identity unless ``hybrid``.
        local_units: ``n_r``, retained units each rank computes.
        stored_units: ``t_r``, units each rank stores in a slot; equals ``local_units`` when ``off``.
        moves: ``[M_remote, 4]`` int64 rows ``(source rank, local unit, destination rank, slot position)``, ordered by
            source rank then local unit; ranks keep their first ``min(n_r, t_r)`` units at the same positions.
        slot_units: units allocated per slot on *every* rank: ``ceil(N / P)`` when balanced, ``max(n_r)`` when ``off``.
    """

    mode: PlacementMode
    ranks: int
    head_order: Tensor
    local_units: tuple[int, ...]
    stored_units: tuple[int, ...]
    moves: Tensor
    slot_units: int

    @classmethod
    def from_head_order(
        cls, geometry: StateGeometry, mask: Tensor, ranks: int, mode: PlacementMode, head_order: Tensor
    ) -> Placement:
        """The placement that an order of the heads determines: counts, storage and moves.

        Args:
            mask: of this geometry (:func:`dasc.layout.check_mask`), true where a unit is retained.
            head_order: int64 ``[L, HV]`` on the CPU; the identity unless ``hybrid``.

        Raises:
            ValueError: for an unknown mode, bundles that ``ranks`` does not divide, or an order that is no permutation,
                takes a bundle apart, or is not the identity where it must be.
        """
        if mode not in PLACEMENT_MODES:
            raise ValueError(f"mode must be one of {', '.join(PLACEMENT_MODES)}, got {mode!r}")
        geometry.check_ranks(ranks)
        check_head_order(geometry, head_order)
        per_head = mask.reshape(geometry.num_layers, geometry.num_value_heads, geometry.units_per_head).sum(dim=2)
        per_rank = per_head.gather(1, head_order).reshape(geometry.num_layers, ranks, -1).sum(dim=(0, 2))
        local_units = tuple(per_rank.tolist())
        if mode == "off":
            stored_units, moves = local_units, torch.empty((0, 4), dtype=torch.int64)
        else:
            stored_units, moves = balance_storage(local_units, ranks)
        placement = cls(mode, ranks, head_order, local_units, stored_units, moves, slot_units=max(stored_units))
        if mode != "hybrid" and placement.permutes_heads:
            raise ValueError(f"head_order must be the identity for mode {mode!r}")
        return placement

    @property
    def moved_units(self) -> int:
        """``M_remote`` of appendix B.1 (units a checkpoint sends over the all-to-all)."""
        return int(self.moves.shape[0])

    @property
    def bottleneck_units(self) -> int:
        """Units stored by the fullest rank; it limits the capacity of all."""
        return max(self.stored_units)

    @property
    def permutes_heads(self) -> bool:
        identity = torch.arange(self.head_order.shape[1]).expand_as(self.head_order)
        return not torch.equal(self.head_order, identity)

    def rank_heads(self, rank: int) -> Tensor:
        """``[L, HV / P]``, the model's value heads that ``rank`` computes, in compute order.

        Raises:
            ValueError: for a rank outside ``[0, P)``.
        """
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank must be in [0, {self.ranks}), got {rank}")
        heads = self.head_order.shape[1] // self.ranks
        return self.head_order[:, rank * heads : (rank + 1) * heads]

    def same_as(self, other: Placement) -> bool:
        """Exact equality of every field (dataclass equality is undefined on tensors)."""
        return (
            (self.mode, self.ranks, self.local_units, self.stored_units, self.slot_units)
            == (other.mode, other.ranks, other.local_units, other.stored_units, other.slot_units)
            and torch.equal(self.head_order, other.head_order)
            and torch.equal(self.moves, other.moves)
        )


def balance_storage(local_units: Sequence[int], ranks: int) -> tuple[tuple[int, ...], Tensor]:
    """Even out what ranks store (B.1 (b)): each excess unit moves once, and no fewer can move.

    Args:
        local_units: ``n_r``, units each rank computes.
        ranks: ``P``.

    Returns:
        ``t_r``, the units each rank stores, and the moves, int64 ``[M_remote, 4]`` rows ``(source rank, local unit,
        destination rank, slot position)`` ordered by source rank then local unit.

    Raises:
        ValueError: unless there is one count, not negative, for each rank.
    """
    if ranks < 1 or len(local_units) != ranks or min(local_units) < 0:
        raise ValueError(f"local_units must be {ranks} counts that are not negative, got {list(local_units)}")
    share, more = divmod(sum(local_units), ranks)
    targets = [share] * ranks
    for r in sorted(range(ranks), key=lambda r: (-local_units[r], r))[:more]:
        targets[r] += 1
    excess = torch.cat([_rank_units(r, targets[r], local_units[r]) for r in range(ranks)])
    deficit = torch.cat([_rank_units(r, local_units[r], targets[r]) for r in range(ranks)])
    return tuple(targets), torch.cat([excess, deficit], dim=1)


def key_head_order(order: Tensor, geometry: StateGeometry) -> Tensor:
    """The order of the key heads ``[.., H]`` that goes with an order of the value heads ``[.., HV]``."""
    return order[..., :: geometry.bundle] // geometry.bundle


def inverse_order(order: Tensor) -> Tensor:
    """The order that undoes ``order``: ``x[order][inverse_order(order)]`` is ``x``. Works layer by layer."""
    return order.argsort(dim=-1)


def permute_heads(tensor: Tensor, order: Tensor, dim: int, head_size: int = 1) -> Tensor:
    """Put the heads of one layer's tensor into compute order: an exact reindexing (B.1 (a), step 7).

    For value heads this serves ``A_log``, ``dt_bias``, the v, gate and beta projections, the v channels of the
    convolution and, along its input columns, the output projection; with :func:`key_head_order` the q and k ones.

    Args:
        tensor: axis ``dim`` holds ``heads * head_size`` entries, head-major.
        order: ``[heads]`` int64, a permutation; entry ``i`` is the head that goes to position ``i``.
        dim: axis to permute.
        head_size: entries of one head along ``dim``.

    Raises:
        ValueError: when the axis does not hold ``heads * head_size`` entries.
    """
    if tensor.shape[dim] != len(order) * head_size:
        raise ValueError(
            f"axis {dim} must hold {len(order)} heads of {head_size} entries, got {tensor.shape[dim]} entries"
        )
    shape = tensor.shape
    dim = dim % len(shape)
    heads = tensor.reshape(*shape[:dim], len(order), head_size, *shape[dim + 1 :])
    return heads.index_select(dim, order).reshape(shape)


def check_head_order(geometry: StateGeometry, head_order: Tensor) -> None:
    """Raise unless ``head_order`` is int64 ``[L, HV]`` and permutes whole bundles in every layer.

    Raises:
        ValueError: with what was expected and what came.
    """
    shape = (geometry.num_layers, geometry.num_value_heads)
    if not isinstance(head_order, Tensor) or head_order.dtype != torch.int64 or tuple(head_order.shape) != shape:
        got = f"{head_order.dtype} {tuple(head_order.shape)}" if isinstance(head_order, Tensor) else type(head_order)
        raise ValueError(f"head_order must be torch.int64 {shape}, got {got}")
    if not torch.equal(head_order.sort(dim=1).values, torch.arange(geometry.num_value_heads).expand(shape)):
        raise ValueError("head_order must hold every head once in each layer")
    bundles = head_order.reshape(geometry.num_layers, geometry.num_key_heads, geometry.bundle)
    if not torch.equal(bundles, bundles[:, :, :1] + torch.arange(geometry.bundle)):
        raise ValueError("head_order must keep the heads that share a key head adjacent and ascending")


def _rank_units(rank: int, start: int, stop: int) -> Tensor:
    """Rows ``(rank, i)`` for ``start <= i < stop``; none when ``stop <= start``."""
    units = torch.arange(start, max(start, stop))
    return torch.stack([torch.full_like(units, rank), units], dim=1)
