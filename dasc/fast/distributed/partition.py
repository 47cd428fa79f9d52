"""A rank's states to its own slots and to the rows that it sends, and back, on the CPU (appendix B.1).

``dasc.fast.triton.partition`` has ``pack_partition`` and ``unpack_partition`` for the GPU. Arguments are checked by
:class:`~dasc.fast.distributed.exchange.StorageExchange`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from dasc.contract import DenseState, PackedState
from dasc.fast.cpu.quantized import dequantize, quantize
from dasc.fast.distributed.routes import Routes
from dasc.layout import RaggedLayout


@torch.no_grad()
def pack_partition(
    native: DenseState,
    native_slots: Tensor,
    store: PackedState,
    store_slots: Tensor,
    send: Tensor,
    layout: RaggedLayout,
    routes: Routes,
) -> None:
    """Store what stays: kept units and convolution rows to their slots, padding zero. Write what goes to ``send``.

    Quantised, what shares a scale with NaN or infinity gets ``q = 0`` and the scale NaN. The slots' rows of units of
    other ranks are not written.

    Args:
        native: pool of dense states, ``[L, S, HV, V, K]`` and ``[L, S, channels, width - 1]`` in any strides.
        native_slots: ``[n]`` int64.
        store: pool of slots of ``layout.slot_units`` rows in any strides; written to.
        store_slots: ``[n]`` int64, all different.
        send: uint8 ``[n * routes.sent.count, row_bytes]``, rows by (destination, checkpoint, unit); written to.
        layout: of this rank's own units.
        routes: of this rank.
    """
    kept, padding = slice(0, routes.kept), slice(routes.stored_units, None)
    store.conv[:, store_slots] = native.conv[:, native_slots]
    values, scales = _stored_form(_read_units(native.temporal, native_slots, layout, kept), layout)
    store.temporal[store_slots, kept] = values
    store.temporal[store_slots, padding] = 0
    if store.scales is not None:
        assert scales is not None
        store.scales[store_slots, kept] = scales
        store.scales[store_slots, padding] = 0
    if routes.sent.count:
        values, scales = _stored_form(_read_units(native.temporal, native_slots, layout, routes.sent.span), layout)
        for units, rows in routes.sent.parts(send, len(native_slots)):
            write_rows(rows, values[:, units], None if scales is None else scales[:, units])


@torch.no_grad()
def unpack_partition(
    store: PackedState,
    store_slots: Tensor,
    received: Tensor,
    native: DenseState,
    native_slots: Tensor,
    layout: RaggedLayout,
    routes: Routes,
    *,
    omitted: Literal["zero", "leave"],
) -> None:
    """Load a rank's own units, from its slots and from the rows that came back: the inverse of :func:`pack_partition`.

    Args:
        store: as in :func:`pack_partition`.
        store_slots: ``[n]`` int64.
        received: uint8 ``[n * routes.sent.count, row_bytes]``, rows by (rank that stored them, checkpoint, unit).
        native: as in :func:`pack_partition`; written to.
        native_slots: ``[n]`` int64, all different.
        layout: of this rank's own units.
        routes: of this rank.
        omitted: whether the units that are not retained become zero or are left as they are.
    """
    kept, first = slice(0, routes.kept), routes.sent.first
    native.conv[:, native_slots] = store.conv[:, store_slots]
    if omitted == "zero":
        native.temporal[:, native_slots] = 0
    scales = None if store.scales is None else store.scales[store_slots, kept]
    values = _active_form(store.temporal[store_slots, kept], scales, layout)
    _write_units(native.temporal, native_slots, layout, kept, values)
    for units, rows in routes.sent.parts(received, len(native_slots)):
        values = _active_form(*read_rows(rows, layout), layout)
        _write_units(native.temporal, native_slots, layout, slice(first + units.start, first + units.stop), values)


def write_rows(rows: Tensor, values: Tensor, scales: Tensor | None) -> None:
    """Fill rows with units: the bytes of the values, then those of the scales.

    Args:
        rows: uint8 ``[n, units, row_bytes]``; written to.
        values: ``[n, units, *stored_unit_shape]``.
        scales: ``[n, units]`` (KDA) or ``[n, units, K]`` (GDN), or ``None``.
    """
    value_bytes = _bytes(values)
    rows[..., : value_bytes.shape[-1]] = value_bytes
    if scales is not None:
        rows[..., value_bytes.shape[-1] :] = _bytes(scales)


def read_rows(rows: Tensor, layout: RaggedLayout) -> tuple[Tensor, Tensor | None]:
    """The values and scales that :func:`write_rows` was given."""
    geometry, dtypes = layout.geometry, layout.dtypes
    size, shape = geometry.stored_unit_bytes(dtypes), geometry.stored_unit_shape(dtypes)
    # a copy starts aligned for its dtype, wherever the bytes lie in a row
    values = rows[..., :size].contiguous().view(dtypes.stored_temporal).view(*rows.shape[:2], *shape)
    if dtypes.quantized is None:
        return values, None
    scales = rows[..., size:].contiguous().view(dtypes.temporal)
    return values, scales if geometry.kind == "gdn" else scales.squeeze(-1)


def _bytes(units: Tensor) -> Tensor:
    """``[n, units, ...]`` -> uint8 ``[n, units, bytes]``."""
    n, count = units.shape[:2]
    return units.reshape(n, count, -1).contiguous().view(torch.uint8)


def _stored_form(values: Tensor, layout: RaggedLayout) -> tuple[Tensor, Tensor | None]:
    """Values as they are stored, with their scales when they are quantised (eq. 8)."""
    quantized = layout.dtypes.quantized
    return (values, None) if quantized is None else quantize(values, layout.geometry.value_axis, quantized)


def _active_form(values: Tensor, scales: Tensor | None, layout: RaggedLayout) -> Tensor:
    """The inverse of :func:`_stored_form`."""
    quantized = layout.dtypes.quantized
    if scales is None or quantized is None:
        return values
    return dequantize(values, scales, layout.geometry.value_axis, quantized)


def _read_units(state: Tensor, slots: Tensor, layout: RaggedLayout, units: slice) -> Tensor:
    """Local units of the states in ``slots``, ``[n, units, *unit_shape]``."""
    # with the axes [.., K, V] a KDA channel is one index more than a GDN head, and its V values come last
    by_unit = state.mT if layout.geometry.kind == "kda" else state
    return by_unit[_positions(slots, layout, units)]


def _write_units(state: Tensor, slots: Tensor, layout: RaggedLayout, units: slice, values: Tensor) -> None:
    """The inverse of :func:`_read_units`, in place."""
    by_unit = state.mT if layout.geometry.kind == "kda" else state
    by_unit[_positions(slots, layout, units)] = values


def _positions(slots: Tensor, layout: RaggedLayout, units: slice) -> tuple[Tensor, ...]:
    """Indices (layer, slot, head) or (layer, slot, head, k) that broadcast to ``[n, units]``."""
    geometry = layout.geometry
    index = layout.unit_index[units]
    layer, unit = index // geometry.units_per_layer, index % geometry.units_per_layer
    if geometry.kind == "gdn":
        return layer, slots[:, None], unit
    return layer, slots[:, None], unit // geometry.head_k_dim, unit % geometry.head_k_dim
