"""Dense state to checkpoint slot and back on the CPU (section 4.1, appendix B), a layer of a state at a time.

A GDN unit is a whole ``[V, K]`` head: runs of them are copied. A KDA unit is a column of its head's ``[V, K]``: storing
it transposes, and as some 16 neighbouring columns share a cache line, the whole state passes through the caches
whatever is retained.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dasc.contract import MIN_ABSMAX, QMAX, DenseState, PackedState, check_pack, check_unpack, slots_shape
from dasc.layout import Layout, RaggedLayout


@torch.no_grad()
def pack(state: Tensor, conv: Tensor, layout: Layout) -> PackedState:
    """Store ``N`` states; see :func:`dasc.fast.pack`."""
    N = check_pack(state, conv, layout)
    geometry, dtypes = layout.geometry, layout.dtypes
    temporal = state.new_empty(slots_shape(layout, N, geometry.unit_shape), dtype=dtypes.stored_temporal)
    scale_shape = (geometry.head_k_dim,) if geometry.kind == "gdn" else ()
    scales = state.new_empty(slots_shape(layout, N, scale_shape)) if dtypes.int8 else None
    for layer, kept in enumerate(_kept(layout)):
        for n in range(N):
            target = _slot(temporal, layout, layer, n)
            if scales is None:
                _gather(state[layer, n], kept, target)
            else:
                values = state.new_empty(target.shape)
                _gather(state[layer, n], kept, values)
                _quantize(values, target, _slot(scales, layout, layer, n), _v_dim(layout))
    _zero_padding(temporal, layout)
    if scales is not None:
        _zero_padding(scales, layout)
    return PackedState(temporal, conv.clone(), scales)


@torch.no_grad()
def unpack(packed: PackedState, layout: Layout, base: Tensor | None = None) -> DenseState:
    """Load ``N`` states; see :func:`dasc.fast.unpack`."""
    N = check_unpack(packed, layout, base)
    L, *state_shape = layout.geometry.state_shape
    temporal = packed.temporal.new_empty(L, N, *state_shape, dtype=layout.dtypes.temporal)
    for layer, kept in enumerate(_kept(layout)):
        for n in range(N):
            stored = _slot(packed.temporal, layout, layer, n)
            if packed.scales is not None:
                scales = _slot(packed.scales, layout, layer, n)
                stored = stored.to(scales.dtype) * scales.unsqueeze(_v_dim(layout))
            _scatter(stored, kept, None if base is None else base[layer, n], temporal[layer, n])
    return DenseState(temporal, packed.conv.clone())


def _kept(layout: Layout) -> list[Tensor]:
    """The mask of each layer, ``[HV, 1]`` (GDN) or ``[HV, K]`` (KDA)."""
    geometry = layout.geometry
    return list(layout.mask.view(-1, geometry.num_value_heads, geometry.units_per_head))


def _slot(slots: Tensor, layout: Layout, layer: int, n: int) -> Tensor:
    """The part of slot ``n`` that ``layer`` fills, ``[counts[layer], ..]``."""
    count = layout.counts[layer]
    if isinstance(layout, RaggedLayout):
        return slots[n, layout.offsets[layer] : layout.offsets[layer] + count]
    return slots[layer, n, :count]


def _zero_padding(slots: Tensor, layout: Layout) -> None:
    if isinstance(layout, RaggedLayout):
        slots[:, layout.retained_units :] = 0
    else:
        for layer, count in enumerate(layout.counts):
            slots[layer, :, count:] = 0


def _v_dim(layout: Layout) -> int:
    """The ``V`` axis of stored units, from the end."""
    return -2 if layout.geometry.kind == "gdn" else -1


def _gather(source: Tensor, kept: Tensor, target: Tensor) -> None:
    """One layer's retained units of ``source`` ``[HV, V, K]`` into ``target`` ``[count, V, K]`` or ``[count, V]``."""
    heads, channels = kept.nonzero().unbind(dim=1)
    if target.ndim == 3:
        torch.index_select(source.flatten(1), 0, heads, out=target.flatten(1))
    else:
        # source.mT[heads, channels], written where it belongs
        torch.ops.aten.index.Tensor_out(source.mT, [heads, channels], out=target)


def _scatter(stored: Tensor, kept: Tensor, base: Tensor | None, target: Tensor) -> None:
    """One layer's state ``[HV, V, K]`` from its stored units, and from ``base`` or zeros where none is stored."""
    if stored.ndim == 3:
        head = unit = 0
        runs, lengths = torch.unique_consecutive(kept, return_counts=True)
        for is_kept, length in zip(runs.tolist(), lengths.tolist()):
            run = target[head : head + length]
            if is_kept:
                run.copy_(stored[unit : unit + length])
                unit += length
            elif base is None:
                run.zero_()
            else:
                run.copy_(base[head : head + length])
            head += length
    else:
        if base is None:
            target.zero_()
        else:
            target.copy_(base)
        heads, channels = kept.nonzero().unbind(dim=1)
        target.mT[heads, channels] = stored


def _quantize(values: Tensor, q: Tensor, scales: Tensor, v_dim: int) -> None:
    """Eq. 8: ``s = max(max_v |S|, 1e-8) / 127`` and ``q = clip(round(S / s))``, in FP32."""
    values = values.float()
    absmax = values.abs().amax(dim=v_dim, keepdim=True)
    if not bool(absmax.isfinite().all()):
        raise ValueError("state must be finite in float32 to be stored as INT8, got NaN or infinity in a retained unit")
    step = absmax.clamp(min=MIN_ABSMAX) / QMAX
    q.copy_((values / step).round_().clamp_(-QMAX, QMAX))
    scales.copy_(step.squeeze(v_dim))
