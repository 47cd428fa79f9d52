"""Padded (Scheme 1) and ragged (Scheme 2) layouts of a compressed checkpoint (section 4.1, appendix B).

A layout says where each retained unit of *one rank* lies in a slot and how many bytes a slot takes. Both the reference
and the fast path pack by it, and the cache sizes its pools by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from dasc.geometry import DtypePolicy, StateGeometry
from dasc.placement import Placement

LayoutKind = Literal["ragged", "padded"]


def storage_label(kind: LayoutKind, dtypes: DtypePolicy) -> str:
    """How units are stored, for people: ``ragged`` or ``padded, INT4``."""
    return f"{kind}, {dtypes.quantized.upper()}" if dtypes.quantized else kind


def check_mask(geometry: StateGeometry, mask: Tensor) -> None:
    """Raise unless ``mask`` is a boolean ``[L, units_per_layer]`` tensor of this geometry.

    Raises:
        ValueError: with the expected and the given shape or dtype.
    """
    expected = (geometry.num_layers, geometry.units_per_layer)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or tuple(mask.shape) != expected:
        got = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(type(mask))
        raise ValueError(f"mask must be torch.bool {expected} (layers, units a layer), got {got}")


@dataclass(frozen=True, eq=False)
class _Layout:
    """What both schemes share. ``geometry`` is the rank's own (already sharded)."""

    geometry: StateGeometry
    dtypes: DtypePolicy
    mask: Tensor
    counts: tuple[int, ...]
    slot_units: int

    def __post_init__(self) -> None:
        self.geometry.stored_unit_shape(self.dtypes)  # raises for what cannot be stored so

    @cached_property
    def unit_index(self) -> Tensor:
        """``[R]`` int64, ascending: flat index ``l * units_per_layer + u`` of each retained unit."""
        return self.mask.flatten().nonzero().flatten()

    @property
    def retained_units(self) -> int:
        """Units that hold values (``sum_l r_l``); the rest of ``slot_units`` is padding."""
        return sum(self.counts)

    @property
    def max_count(self) -> int:
        """``R_max``."""
        return max(self.counts)

    @property
    def temporal_slot_bytes(self) -> int:
        """Stored units of one slot, without scales."""
        return self.slot_units * self.geometry.stored_unit_bytes(self.dtypes)

    @property
    def scale_slot_bytes(self) -> int:
        """Scales of one slot; 0 unless units are quantised."""
        return self.slot_units * self.geometry.unit_scale_bytes(self.dtypes)

    @property
    def conv_slot_bytes(self) -> int:
        return self.geometry.conv_bytes(self.dtypes)

    @property
    def slot_bytes(self) -> int:
        """``b_r^full``: everything one slot takes on this rank."""
        return self.temporal_slot_bytes + self.scale_slot_bytes + self.conv_slot_bytes


@dataclass(frozen=True, eq=False)
class RaggedLayout(_Layout):
    """Scheme 2: the layers' retained units one after another, ``offsets[l] : offsets[l + 1]``.

    Attributes:
        offsets: ``L + 1`` unit offsets, ``o_0 = 0``.
        slot_units: units allocated a slot, at least ``R``; more only when storage balancing sets a common width.
    """

    offsets: tuple[int, ...]

    @classmethod
    def from_mask(
        cls,
        geometry: StateGeometry,
        mask: Tensor,
        dtypes: DtypePolicy = DtypePolicy(),  # noqa: B008 - frozen
        *,
        slot_units: int | None = None,
    ) -> RaggedLayout:
        """Build from a boolean mask ``[L, units_per_layer]``.

        Args:
            slot_units: units to allocate a slot; the retained units when ``None``. With storage balancing this is the
                stored width, which may be below what the rank computes.

        Raises:
            ValueError: for a mask of another shape or dtype, a negative width, or INT4 and an odd ``V``.
        """
        check_mask(geometry, mask)
        counts = tuple(int(c) for c in mask.sum(dim=1))
        offsets = [0]
        for count in counts:
            offsets.append(offsets[-1] + count)
        width = offsets[-1] if slot_units is None else slot_units
        if width < 0:
            raise ValueError(f"slot_units must not be negative, got {width}")
        return cls(
            geometry=geometry,
            dtypes=dtypes,
            mask=mask.clone(),
            counts=counts,
            slot_units=width,
            offsets=tuple(offsets),
        )

    @property
    def slot_shape(self) -> tuple[int, ...]:
        """Temporal shape of one slot, ``[slot_units, V, K]`` (GDN) or ``[slot_units, V]`` (KDA); in INT4 ``V / 2``."""
        return (self.slot_units, *self.geometry.stored_unit_shape(self.dtypes))


@dataclass(frozen=True, eq=False)
class PaddedLayout(_Layout):
    """Scheme 1: every layer reserves ``R_max`` units, of which layer ``l`` fills the first ``counts[l]``.

    The pool is layer-first, ``[L, slots, R_max, ...]``; ``slot_units`` is ``L * R_max``.
    """

    @classmethod
    def from_mask(
        cls,
        geometry: StateGeometry,
        mask: Tensor,
        dtypes: DtypePolicy = DtypePolicy(),  # noqa: B008 - frozen
    ) -> PaddedLayout:
        """Build from a boolean mask ``[L, units_per_layer]``.

        Raises:
            ValueError: for a mask of another shape or dtype, or INT4 and an odd ``V``.
        """
        check_mask(geometry, mask)
        counts = tuple(int(c) for c in mask.sum(dim=1))
        return cls(
            geometry=geometry,
            dtypes=dtypes,
            mask=mask.clone(),
            counts=counts,
            slot_units=geometry.num_layers * max(counts),
        )

    @property
    def slot_shape(self) -> tuple[int, ...]:
        """Temporal shape of one slot across layers, ``[L, R_max, V, K]`` (GDN) or ``[L, R_max, V]`` (KDA).

        In INT4, ``V / 2``.
        """
        return (self.geometry.num_layers, self.max_count, *self.geometry.stored_unit_shape(self.dtypes))


Layout = RaggedLayout | PaddedLayout


def shard_mask(geometry: StateGeometry, mask: Tensor, ranks: int, head_order: Tensor | None = None) -> list[Tensor]:
    """Cut a model's mask into the ranks' masks ``[L, units_per_layer / P]``.

    Args:
        head_order: ``[L, HV]`` compute order of the heads (:class:`~dasc.placement.Placement`); the model's own when
            ``None``.

    Raises:
        ValueError: for a mask of another shape, or heads that the ranks cannot share equally.
    """
    check_mask(geometry, mask)
    geometry.check_ranks(ranks)
    per_head = mask.view(geometry.num_layers, geometry.num_value_heads, geometry.units_per_head)
    if head_order is not None:
        per_head = per_head.gather(1, head_order[:, :, None].expand_as(per_head))
    return [part.flatten(1) for part in per_head.chunk(ranks, dim=1)]


def rank_layouts(
    geometry: StateGeometry,
    mask: Tensor,
    ranks: int = 1,
    *,
    kind: LayoutKind = "ragged",
    placement: Placement | None = None,
    dtypes: DtypePolicy = DtypePolicy(),  # noqa: B008 - frozen
) -> list[Layout]:
    """The layout of each rank, from the whole model's mask.

    Args:
        placement: head order and stored widths; ``None`` means mode ``off``.

    Raises:
        ValueError: for an unknown kind, a placement for another number of ranks, a balanced placement with the
            padded layout (storage balancing moves packed units, appendix B.1), or INT4 and an odd ``V``.
    """
    if kind not in ("ragged", "padded"):
        raise ValueError(f"layout must be 'ragged' or 'padded', got {kind!r}")
    if placement is not None and placement.ranks != ranks:
        raise ValueError(f"placement is for {placement.ranks} ranks, the layout for {ranks}")
    balanced = placement is not None and placement.mode != "off"
    if kind == "padded" and balanced:
        raise ValueError("storage balancing needs the ragged layout, got 'padded'")
    local = geometry.shard(ranks)
    head_order = None if placement is None else placement.head_order
    masks = shard_mask(geometry, mask, ranks, head_order)
    if kind == "padded":
        return [PaddedLayout.from_mask(local, part, dtypes) for part in masks]
    width = placement.slot_units if placement is not None and balanced else None
    return [RaggedLayout.from_mask(local, part, dtypes, slot_units=width) for part in masks]
