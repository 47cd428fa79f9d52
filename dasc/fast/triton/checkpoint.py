"""Dense state to checkpoint slot and back on the GPU (section 4.1, appendix B): one launch for all layers, all
checkpoints of a call and the convolution rows.

A store reads each memory sector that holds a retained unit once and writes each byte of the slot once; a load reads
each retained unit once and writes each byte of the state once. Exact copies move integers, so that no bit of a value
changes. The first call with a layout builds its tables on the device, later ones only launch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from dasc.contract import DenseState, PackedState, check_pack, check_slots, check_unpack, slots_shape, zero_slots
from dasc.fast.triton.aot import ShippedKernel
from dasc.fast.triton.checkpoint_launch import RowBuffer, pack_launch, unpack_launch
from dasc.fast.triton.checkpoint_tables import TileTables
from dasc.geometry import QUANTIZATIONS, DtypePolicy, StateGeometry, dtype_name
from dasc.layout import Layout, RaggedLayout


@torch.no_grad()
def pack_slots(
    native: DenseState, native_slots: Tensor, store: PackedState, store_slots: Tensor, layout: Layout
) -> None:
    """Store ``n`` states; see :func:`dasc.fast.pack_slots`."""
    check_slots(native, native_slots, store, store_slots, layout, written="store")
    tables = tile_tables(layout, native.temporal.device)
    pack_launch(native, native_slots, store, store_slots, layout, tables).run()


@torch.no_grad()
def unpack_slots(
    store: PackedState,
    store_slots: Tensor,
    native: DenseState,
    native_slots: Tensor,
    layout: Layout,
    *,
    omitted: Literal["zero", "leave"] = "zero",
) -> None:
    """Load ``n`` states; see :func:`dasc.fast.unpack_slots`."""
    check_slots(native, native_slots, store, store_slots, layout, written="native", omitted=omitted)
    tables = tile_tables(layout, native.temporal.device)
    unpack_launch(store, store_slots, native, native_slots, layout, tables, omitted).run()


@torch.no_grad()
def pack(state: Tensor, conv: Tensor, layout: Layout) -> PackedState:
    """Store ``N`` states; see :func:`dasc.fast.pack`. Quantised, it waits for the device, to see what to refuse."""
    N = check_pack(state, conv, layout)
    geometry, dtypes = layout.geometry, layout.dtypes
    temporal = state.new_empty(slots_shape(layout, N, geometry.stored_unit_shape(dtypes)), dtype=dtypes.stored_temporal)
    scales = None if dtypes.quantized is None else state.new_empty(slots_shape(layout, N, geometry.scale_shape))
    packed = PackedState(temporal, torch.empty_like(conv), scales)
    slots = torch.arange(N, device=state.device)
    pack_launch(DenseState(state, conv), slots, packed, slots, layout, tile_tables(layout, state.device)).run()
    if scales is not None and bool(scales.isnan().any()):
        raise ValueError("state must be finite in float32 to be quantised, got NaN or infinity in a retained unit")
    return packed


@torch.no_grad()
def unpack(packed: PackedState, layout: Layout, base: Tensor | None = None) -> DenseState:
    """Load ``N`` states; see :func:`dasc.fast.unpack`."""
    N = check_unpack(packed, layout, base)
    L, *state_shape = layout.geometry.state_shape
    temporal = packed.temporal.new_empty(L, N, *state_shape, dtype=layout.dtypes.temporal)
    if base is not None:
        temporal.copy_(base)
    dense = DenseState(temporal, torch.empty_like(packed.conv))
    slots = torch.arange(N, device=temporal.device)
    omitted: Literal["zero", "leave"] = "zero" if base is None else "leave"
    unpack_launch(packed, slots, dense, slots, layout, tile_tables(layout, temporal.device), omitted).run()
    return dense


@lru_cache(maxsize=16)
def tile_tables(layout: Layout, device: torch.device) -> TileTables:
    """The tables of a layout on a device. Layouts are told apart by identity: keep the one you have."""
    return TileTables(layout, device)


def shipped() -> list[ShippedKernel]:
    """The kernels for heads of 128 by 128; see :mod:`dasc.fast.triton.aot`."""
    return [
        kernel
        for layout in shipped_layouts()
        for kernel in shipped_for("", layout, TileTables(layout, torch.device("meta")), None)
    ]


def shipped_for(label: str, layout: RaggedLayout, tables: TileTables, buffer: RowBuffer | None) -> list[ShippedKernel]:
    """The store and both loads of a layout, on pools without memory."""
    native, store, slots = _meta_pools(layout)
    form = f"_{layout.dtypes.quantized}" if layout.dtypes.quantized else ""
    name = f"{label}{layout.geometry.kind}_{dtype_name(layout.dtypes.temporal)}{form}"
    zero = unpack_launch(store, slots, native, slots, layout, tables, "zero", buffer)
    leave = unpack_launch(store, slots, native, slots, layout, tables, "leave", buffer)
    return [
        pack_launch(native, slots, store, slots, layout, tables, buffer).shipped(f"pack_{name}"),
        zero.shipped(f"unpack_zero_{name}"),
        leave.shipped(f"unpack_leave_{name}"),
    ]


def shipped_layouts() -> list[RaggedLayout]:
    """A small layout for each kind and form of storage of the real models."""
    blocks, heads = (0, 1), 4
    geometries = (
        StateGeometry("shipped", "gdn", 2, blocks, heads, heads // 2, head_v_dim=128, head_k_dim=128),
        StateGeometry("shipped", "kda", 2, blocks, heads, heads, head_v_dim=128, head_k_dim=128),
    )
    temporals = (torch.float32, torch.bfloat16, torch.float16)
    forms = [DtypePolicy(temporal, quantized=form) for form in QUANTIZATIONS for temporal in temporals]
    forms += [DtypePolicy(torch.float32), DtypePolicy(torch.bfloat16)]  # FP16 is copied as BF16 is
    return [
        RaggedLayout.from_mask(geometry, torch.ones(2, geometry.units_per_layer, dtype=torch.bool), dtypes)
        for geometry in geometries
        for dtypes in forms
    ]


def _meta_pools(layout: RaggedLayout) -> tuple[DenseState, PackedState, Tensor]:
    """Pools without memory, and slots in them."""
    geometry, dtypes, pool = layout.geometry, layout.dtypes, 16
    L, *state_shape = geometry.state_shape
    conv = torch.empty(L, pool, *geometry.conv_shape[1:], dtype=dtypes.conv, device="meta")
    temporal = torch.empty(L, pool, *state_shape, dtype=dtypes.temporal, device="meta")
    slots = torch.empty(pool, dtype=torch.int64, device="meta")
    return DenseState(temporal, conv), zero_slots(layout, pool, "meta"), slots
