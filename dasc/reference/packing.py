"""Dense state to checkpoint slot and back, in the padded and the ragged layout (section 4.1, appendix B).

One rank's units only: a storage-balanced slot, whose width is not what its rank computes, is filled by the transfer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from dasc.geometry import StateGeometry
from dasc.layout import Layout, RaggedLayout
from dasc.reference.int8 import dequantize, quantize


class PackedState(NamedTuple):
    """``N`` compressed checkpoints of one rank, padding zero.

    Attributes:
        temporal: retained units in ``layout.dtypes.stored_temporal``. Ragged ``[N, slot_units, V, K]`` (GDN) or
            ``[N, slot_units, V]`` (KDA); padded ``[L, N, R_max, V, K]`` or ``[L, N, R_max, V]``.
        conv: ``[L, N, channels, width - 1]``, as it was.
        scales: INT8 scales in ``layout.dtypes.temporal``, shaped as ``temporal`` without ``V``; ``None`` unless INT8.
    """

    temporal: Tensor
    conv: Tensor
    scales: Tensor | None


class DenseState(NamedTuple):
    """``N`` whole states of one rank.

    Attributes:
        temporal: ``[L, N, HV, V, K]`` in ``layout.dtypes.temporal``.
        conv: ``[L, N, channels, width - 1]`` in ``layout.dtypes.conv``.
    """

    temporal: Tensor
    conv: Tensor


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")


def _batched(shape: tuple[int, ...], N: int) -> tuple[int, ...]:
    """``[L, ...]`` -> ``[L, N, ...]``."""
    return (shape[0], N, *shape[1:])


def _check_dense(state: Tensor, conv: Tensor, layout: Layout) -> None:
    if state.ndim != 5:
        raise ValueError(f"state must have 5 axes [L, N, HV, V, K], got {list(state.shape)}")
    N = state.shape[1]
    _expect("state", state, _batched(layout.geometry.state_shape, N), layout.dtypes.temporal)
    _expect("conv", conv, _batched(layout.geometry.conv_shape, N), layout.dtypes.conv)


def _check_packed(packed: PackedState, layout: Layout) -> None:
    geometry, dtypes = layout.geometry, layout.dtypes
    if packed.conv.ndim != 4:
        raise ValueError(f"packed.conv must have 4 axes [L, N, channels, width - 1], got {list(packed.conv.shape)}")
    N = packed.conv.shape[1]
    _expect("packed.conv", packed.conv, _batched(geometry.conv_shape, N), dtypes.conv)
    _expect("packed.temporal", packed.temporal, _slots_shape(layout, N, geometry.unit_shape), dtypes.stored_temporal)
    if (packed.scales is not None) != dtypes.int8:
        raise ValueError(f"packed.scales must be {'given' if dtypes.int8 else 'None'} when int8 is {dtypes.int8}")
    if packed.scales is not None:
        scale_shape = (geometry.head_k_dim,) if geometry.kind == "gdn" else ()
        _expect("packed.scales", packed.scales, _slots_shape(layout, N, scale_shape), dtypes.temporal)


def _check_width(layout: Layout) -> None:
    if layout.slot_units < layout.retained_units:
        raise ValueError(
            f"layout allocates {layout.slot_units} units a slot but retains {layout.retained_units}: "
            "a storage-balanced slot is filled by the transfer between ranks"
        )


def _v_dim(geometry: StateGeometry) -> int:
    """The ``V`` axis of packed units, from the end."""
    return -2 if geometry.kind == "gdn" else -1


def _to_units(state: Tensor, geometry: StateGeometry) -> Tensor:
    """``[L, N, HV, V, K]`` -> all units ``[N, L * U, *unit_shape]``, numbered as ``Layout.unit_index``."""
    if geometry.kind == "gdn":
        return rearrange(state, "l n h v k -> n (l h) v k")
    return rearrange(state, "l n h v k -> n (l h k) v")


def _from_units(units: Tensor, geometry: StateGeometry) -> Tensor:
    """The inverse of :func:`_to_units`."""
    L, HV, _, K = geometry.state_shape
    if geometry.kind == "gdn":
        return rearrange(units, "n (l h) v k -> l n h v k", l=L, h=HV)
    return rearrange(units, "n (l h k) v -> l n h v k", l=L, h=HV, k=K)


def _slots_shape(layout: Layout, N: int, tail: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of ``N`` slots whose units have the shape ``tail``."""
    if isinstance(layout, RaggedLayout):
        return (N, layout.slot_units, *tail)
    return (layout.geometry.num_layers, N, layout.max_count, *tail)


def _to_slots(retained: Tensor, layout: Layout) -> Tensor:
    """Lay out the retained units ``[N, R, ...]``, or their scales, in zeroed slots."""
    slots = retained.new_zeros(_slots_shape(layout, retained.shape[0], retained.shape[2:]))
    if isinstance(layout, RaggedLayout):
        slots[:, : layout.retained_units] = retained
    else:
        for layer, units in enumerate(torch.split(retained, list(layout.counts), dim=1)):
            slots[layer, :, : layout.counts[layer]] = units
    return slots


def _from_slots(slots: Tensor, layout: Layout) -> Tensor:
    """The inverse of :func:`_to_slots`; padding is not read."""
    if isinstance(layout, RaggedLayout):
        return slots[:, : layout.retained_units]
    return torch.cat([slots[layer, :, :count] for layer, count in enumerate(layout.counts)], dim=1)


def pack(state: Tensor, conv: Tensor, layout: Layout) -> PackedState:
    """Store: copy the retained units out of ``N`` dense states, exactly or as INT8 (eq. 8).

    Omitted units are not read. The convolution rows are copied whole.

    Args:
        state: ``[L, N, HV, V, K]`` in ``layout.dtypes.temporal``, of one rank.
        conv: ``[L, N, channels, width - 1]`` in ``layout.dtypes.conv``.
        layout: of that rank; its slot must have room for every unit that it retains.

    Raises:
        ValueError: for other shapes or dtypes (nothing is cast), a slot too narrow, or retained units that INT8 cannot
            store.
    """
    _check_dense(state, conv, layout)
    _check_width(layout)
    retained = _to_units(state, layout.geometry)[:, layout.unit_index]
    if not layout.dtypes.int8:
        return PackedState(_to_slots(retained, layout), conv.clone(), None)
    q, scales = quantize(retained, _v_dim(layout.geometry))
    return PackedState(_to_slots(q, layout), conv.clone(), _to_slots(scales, layout))


def unpack(packed: PackedState, layout: Layout, base: Tensor | None = None) -> DenseState:
    """Load: put the retained units back into ``N`` dense states (section 4.2).

    Args:
        packed: from :func:`pack` with the same layout.
        layout: of this rank.
        base: ``[L, N, HV, V, K]`` in ``layout.dtypes.temporal``. The omitted units are zero without it (NR) and taken
            from it when given (WR: the refreshed state). It is not written to.

    Raises:
        ValueError: for shapes or dtypes other than the layout's, or missing or unexpected scales.
    """
    _check_width(layout)
    _check_packed(packed, layout)
    geometry = layout.geometry
    retained = _from_slots(packed.temporal, layout)
    if packed.scales is not None:
        retained = dequantize(retained, _from_slots(packed.scales, layout), _v_dim(geometry))
    shape = _batched(geometry.state_shape, packed.conv.shape[1])
    if base is None:
        base = retained.new_zeros(shape)
    _expect("base", base, shape, layout.dtypes.temporal)
    units = _to_units(base, geometry).clone()
    units[:, layout.unit_index] = retained
    return DenseState(_from_units(units, geometry).contiguous(), packed.conv.clone())
