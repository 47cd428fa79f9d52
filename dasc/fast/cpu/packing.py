"""Dense state to checkpoint slot and back on the CPU (section 4.1, appendix B).

A GDN unit is a whole ``[V, K]`` head, which is copied as it lies. A KDA unit is a column of its head's ``[V, K]``:
storing it transposes, and as some 16 neighbouring columns share a cache line, nearly the whole state passes through the
caches whatever is retained.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dasc.contract import DenseState, PackedState, check_pack, check_unpack, slots_shape
from dasc.fast.cpu.quantized import dequantize, quantize
from dasc.layout import Layout, PaddedLayout, RaggedLayout

# Rows of a head that columns are written to at a time: columns of 128 rows, 512 bytes apart, evict one another from
# those few sets of the first-level cache that all their lines fall into.
SCATTER_ROWS = 64


@torch.no_grad()
def pack(state: Tensor, conv: Tensor, layout: Layout) -> PackedState:
    """Store ``N`` states; see :func:`dasc.fast.pack`."""
    N = check_pack(state, conv, layout)
    geometry, dtypes = layout.geometry, layout.dtypes
    temporal = state.new_empty(slots_shape(layout, N, geometry.stored_unit_shape(dtypes)), dtype=dtypes.stored_temporal)
    scales = None if dtypes.quantized is None else state.new_empty(slots_shape(layout, N, geometry.scale_shape))
    store_units(state, layout, temporal, scales)
    if scales is not None and not bool(scales.isfinite().all()):
        raise ValueError("state must be finite in float32 to be quantised, got NaN or infinity in a retained unit")
    return PackedState(temporal, conv.clone(), scales)


@torch.no_grad()
def unpack(packed: PackedState, layout: Layout, base: Tensor | None = None) -> DenseState:
    """Load ``N`` states; see :func:`dasc.fast.unpack`."""
    N = check_unpack(packed, layout, base)
    L, *state_shape = layout.geometry.state_shape
    temporal = packed.temporal.new_empty(L, N, *state_shape, dtype=layout.dtypes.temporal)
    load_units(packed.temporal, packed.scales, layout, temporal, base)
    return DenseState(temporal, packed.conv.clone())


def store_units(state: Tensor, layout: Layout, temporal: Tensor, scales: Tensor | None) -> None:
    """Write the retained units of ``N`` states into slots, zeros into their padding; in any strides.

    Quantised, what shares a scale with NaN or infinity gets ``q = 0`` and a scale of NaN.

    Args:
        state: ``[L, N, HV, V, K]``.
        layout: of the slots.
        temporal: the slots' units, as in :class:`~dasc.contract.PackedState`; written.
        scales: their scales, or ``None``; written.
    """
    quantized, v_dim = layout.dtypes.quantized, layout.geometry.value_axis
    by_layer = scales is not None or isinstance(layout, PaddedLayout)
    rows = _cut(_rows(state, layout, layout.unit_index), layout, by_layer)
    for n in range(state.shape[1]):
        units, targets = _units(state[:, n], layout), _slot(temporal, layout, n, by_layer)
        if scales is None or quantized is None:
            for kept, target in zip(rows, targets):
                torch.index_select(units, 0, kept, out=target)
        else:
            for kept, target, of_layer in zip(rows, targets, _slot(scales, layout, n, by_layer)):
                codes, steps = quantize(units.index_select(0, kept), v_dim, quantized)
                target.copy_(codes)
                of_layer.copy_(steps)
    _zero_padding(temporal, layout)
    if scales is not None:
        _zero_padding(scales, layout)


def load_units(temporal: Tensor, scales: Tensor | None, layout: Layout, state: Tensor, base: Tensor | None) -> None:
    """Write the units of ``N`` slots into states, in any strides.

    Args:
        temporal: as in :func:`store_units`; padding is not read.
        scales: likewise.
        layout: of the slots.
        state: ``[L, N, HV, V, K]``; written.
        base: what the omitted units become: those of a state like ``state``, which may be ``state`` itself; zero when
            ``None``.
    """
    heads, quantized, v_dim = layout.geometry.kind == "gdn", layout.dtypes.quantized, layout.geometry.value_axis
    by_layer = scales is not None or isinstance(layout, PaddedLayout) or not heads
    rows = _cut(_rows(state, layout, layout.unit_index), layout, by_layer)
    for n in range(state.shape[1]):
        units, stored = _units(state[:, n], layout), _slot(temporal, layout, n, by_layer)
        if scales is not None and quantized is not None:
            steps = _slot(scales, layout, n, by_layer)
            stored = [dequantize(codes, step, v_dim, quantized) for codes, step in zip(stored, steps)]
        if heads and base is not state:
            _fill_omitted_heads(state, base, n, layout)
        for layer, (kept, values) in enumerate(zip(rows, stored)):
            if heads:
                units.index_copy_(0, kept, values)
                continue
            if base is None:
                state[layer, n].zero_()
            elif base is not state:
                state[layer, n].copy_(base[layer, n])
            for first in range(0, units.shape[1], SCATTER_ROWS):
                part = slice(first, first + SCATTER_ROWS)
                units[:, part].index_copy_(0, kept, values[:, part])


def _fill_omitted_heads(state: Tensor, base: Tensor | None, n: int, layout: Layout) -> None:
    omitted = (~layout.mask).flatten().nonzero().flatten()
    units, rows = _units(state[:, n], layout), _rows(state, layout, omitted)
    if base is None:
        units.index_fill_(0, rows, 0.0)
    else:
        units.index_copy_(0, rows, _units(base[:, n], layout).index_select(0, _rows(base, layout, omitted)))


def _units(state: Tensor, layout: Layout) -> Tensor:
    """All units of a state ``[L, HV, V, K]`` as overlapping rows ``[.., V, K]`` or ``[.., V]``, one at each offset."""
    L, HV, V, K = state.stride()
    layers, heads, *unit = layout.geometry.state_shape
    reach = (layers - 1) * L + (heads - 1) * HV + 1
    if layout.geometry.kind == "gdn":
        return state.as_strided((reach, *unit), (1, V, K))
    return state.as_strided((reach + (unit[1] - 1) * K, unit[0]), (1, V))


def _rows(state: Tensor, layout: Layout, unit_index: Tensor) -> Tensor:
    """Where units, numbered as ``layout.unit_index``, stand in :func:`_units` of ``state`` ``[L, N, HV, V, K]``."""
    L, _, HV, _, K = state.stride()
    per_layer, per_head = layout.geometry.units_per_layer, layout.geometry.units_per_head
    layer, unit = unit_index // per_layer, unit_index % per_layer
    return layer * L + unit // per_head * HV + unit % per_head * K


def _cut(rows: Tensor, layout: Layout, by_layer: bool) -> list[Tensor]:
    return list(torch.split(rows, list(layout.counts))) if by_layer else [rows]


def _slot(slots: Tensor, layout: Layout, n: int, by_layer: bool) -> list[Tensor]:
    """What slot ``n`` holds without padding, cut as by :func:`_cut`; a padded slot can only be cut by layer."""
    if isinstance(layout, RaggedLayout):
        return _cut(slots[n, : layout.retained_units], layout, by_layer)
    return [slots[layer, n, :count] for layer, count in enumerate(layout.counts)]


def _zero_padding(slots: Tensor, layout: Layout) -> None:
    if isinstance(layout, RaggedLayout):
        slots[:, layout.retained_units :] = 0
    else:
        for layer, count in enumerate(layout.counts):
            slots[layer, :, count:] = 0
