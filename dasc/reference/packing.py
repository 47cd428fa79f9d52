"""Dense state to checkpoint slot and back, in the padded and the ragged layout (section 4.1, appendix B).

One rank's units only: a storage-balanced slot, whose width is not what its rank computes, is filled by the transfer.
"""

from __future__ import annotations

from typing import Literal

import torch
from einops import rearrange
from torch import Tensor

from dasc.contract import (
    QMAX,
    DenseState,
    PackedState,
    check_pack,
    check_slots,
    check_unpack,
    one_slot,
    slots_shape,
)
from dasc.geometry import StateGeometry
from dasc.layout import Layout, RaggedLayout
from dasc.reference.int4 import pack_nibbles, unpack_nibbles
from dasc.reference.int8 import dequantize, quantize


def to_units(state: Tensor, geometry: StateGeometry) -> Tensor:
    """``[L, N, HV, V, K]`` -> all units ``[N, L * U, *unit_shape]``, numbered as ``Layout.unit_index``."""
    if geometry.kind == "gdn":
        return rearrange(state, "l n h v k -> n (l h) v k")
    return rearrange(state, "l n h v k -> n (l h k) v")


def from_units(units: Tensor, geometry: StateGeometry) -> Tensor:
    """The inverse of :func:`to_units`."""
    L, HV, _, K = geometry.state_shape
    if geometry.kind == "gdn":
        return rearrange(units, "n (l h) v k -> l n h v k", l=L, h=HV)
    return rearrange(units, "n (l h k) v -> l n h v k", l=L, h=HV, k=K)


def _to_slots(retained: Tensor, layout: Layout) -> Tensor:
    """Lay out the retained units ``[N, R, ...]``, or their scales, in zeroed slots."""
    slots = retained.new_zeros(slots_shape(layout, retained.shape[0], retained.shape[2:]))
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
    """Store: copy the retained units out of ``N`` dense states, exactly or quantised (eq. 8).

    Omitted units are not read. The convolution rows are copied whole.

    Args:
        state: ``[L, N, HV, V, K]`` in ``layout.dtypes.temporal``, of one rank.
        conv: ``[L, N, channels, width - 1]`` in ``layout.dtypes.conv``.
        layout: of that rank; its slot must have room for every unit that it retains.

    Raises:
        ValueError: for other shapes or dtypes (nothing is cast), a slot too narrow, or NaN or infinity in
            retained units that are to be quantised.
    """
    check_pack(state, conv, layout)
    return _pack(state, conv, layout, broken="raise")


def _pack(state: Tensor, conv: Tensor, layout: Layout, broken: Literal["raise", "nan"]) -> PackedState:
    retained = to_units(state, layout.geometry)[:, layout.unit_index]
    quantized, v_dim = layout.dtypes.quantized, layout.geometry.value_axis
    if quantized is None:
        return PackedState(_to_slots(retained, layout), conv.clone(), None)
    q, scales = quantize(retained, v_dim, broken=broken, qmax=QMAX[quantized])
    if quantized == "int4":
        q = pack_nibbles(q, v_dim)
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
    N = check_unpack(packed, layout, base)
    geometry, v_dim = layout.geometry, layout.geometry.value_axis
    retained = _from_slots(packed.temporal, layout)
    if layout.dtypes.quantized == "int4":
        retained = unpack_nibbles(retained, v_dim)
    if packed.scales is not None:
        retained = dequantize(retained, _from_slots(packed.scales, layout), v_dim)
    if base is None:
        L, *state_shape = geometry.state_shape
        base = retained.new_zeros(L, N, *state_shape)
    units = to_units(base, geometry).clone()
    units[:, layout.unit_index] = retained
    return DenseState(from_units(units, geometry).contiguous(), packed.conv.clone())


def pack_slots(
    native: DenseState, native_slots: Tensor, store: PackedState, store_slots: Tensor, layout: Layout
) -> None:
    """Store from pool to pool: :func:`pack` of the states in ``native_slots`` into ``store_slots``, in place.

    Padding inside a written slot becomes zero. Values are not checked: quantised, what shares a scale with NaN or
    infinity is stored so that it loads as NaN.

    Args:
        native: pool of dense states, ``[L, S, HV, V, K]`` and ``[L, S, channels, width - 1]`` in any strides.
        native_slots: ``[n]`` integers.
        store: pool of slots, as :class:`~dasc.contract.PackedState` with ``N`` slots; written to.
        store_slots: ``[n]`` integers, all different.
        layout: of this rank; its slot must have room for every unit that it retains.

    Raises:
        ValueError: as :func:`dasc.contract.check_slots`.
    """
    check_slots(native, native_slots, store, store_slots, layout, written="store")
    for source, target in zip(native_slots.tolist(), store_slots.tolist()):
        packed = _pack(native.temporal[:, [source]], native.conv[:, [source]], layout, broken="nan")
        for part, stored in zip(one_slot(store, target, layout), packed):
            if part is not None and stored is not None:
                part.copy_(stored)


def unpack_slots(
    store: PackedState,
    store_slots: Tensor,
    native: DenseState,
    native_slots: Tensor,
    layout: Layout,
    *,
    omitted: Literal["zero", "leave"] = "zero",
) -> None:
    """Load from pool to pool: :func:`unpack` of ``store_slots`` into ``native_slots``, in place.

    Args:
        store: as in :func:`pack_slots`.
        store_slots: ``[n]`` integers.
        native: as in :func:`pack_slots`; written to.
        native_slots: ``[n]`` integers, all different.
        layout: as in :func:`pack_slots`.
        omitted: the units that were not stored become zero (NR) or are left as they are in ``native`` (WR).

    Raises:
        ValueError: as :func:`dasc.contract.check_slots`.
    """
    check_slots(native, native_slots, store, store_slots, layout, written="native", omitted=omitted)
    for source, target in zip(store_slots.tolist(), native_slots.tolist()):
        base = native.temporal[:, [target]] if omitted == "leave" else None
        dense = unpack(one_slot(store, source, layout), layout, base)
        native.temporal[:, [target]] = dense.temporal
        native.conv[:, [target]] = dense.conv
