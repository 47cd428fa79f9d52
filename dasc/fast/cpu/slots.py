"""Checkpoints from pool to pool on the CPU."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from dasc.contract import DenseState, PackedState, check_slots, one_slot
from dasc.fast.cpu.packing import load_units, store_units
from dasc.layout import Layout


@torch.no_grad()
def pack_slots(
    native: DenseState, native_slots: Tensor, store: PackedState, store_slots: Tensor, layout: Layout
) -> None:
    """Store ``n`` states; see :func:`dasc.fast.pack_slots`."""
    check_slots(native, native_slots, store, store_slots, layout, written="store")
    for source, target in zip(native_slots.tolist(), store_slots.tolist()):
        slot = one_slot(store, target, layout)
        store_units(native.temporal[:, source : source + 1], layout, slot.temporal, slot.scales)
        slot.conv.copy_(native.conv[:, source : source + 1])


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
    for source, target in zip(store_slots.tolist(), native_slots.tolist()):
        slot = one_slot(store, source, layout)
        state = native.temporal[:, target : target + 1]
        load_units(slot.temporal, slot.scales, layout, state, state if omitted == "leave" else None)
        native.conv[:, target : target + 1] = slot.conv
