"""A rank's states to its own slots and to the rows that it sends, and back, on the GPU (appendix B.1): one launch each.

The kernels are those of :mod:`dasc.fast.triton.checkpoint`; a unit that another rank stores has a row of the buffer in
place of one of the slot. Arguments are checked by :class:`~dasc.fast.distributed.exchange.StorageExchange`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from dasc.contract import DenseState, PackedState
from dasc.fast.distributed.routes import Routes, row_bytes
from dasc.fast.triton.aot import ShippedKernel
from dasc.fast.triton.checkpoint import shipped_for, shipped_layouts
from dasc.fast.triton.checkpoint_launch import RowBuffer, as_integers, pack_launch, unpack_launch
from dasc.fast.triton.checkpoint_tables import TileTables
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
    """Store what stays and write what goes to ``send``; see :mod:`dasc.fast.distributed.partition`.

    Raises:
        ValueError: for quantised units that leave their scales unaligned in a row.
    """
    tables, groups = partition_tables(layout, routes, send.device)
    buffer = row_buffer(send, layout, groups)
    pack_launch(native, native_slots, store, store_slots, layout, tables, buffer).run()


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
    """Load a rank's own units, from its slots and from the rows that came back: inverse of :func:`pack_partition`.

    Raises:
        ValueError: as :func:`pack_partition`.
    """
    tables, groups = partition_tables(layout, routes, received.device)
    buffer = row_buffer(received, layout, groups)
    unpack_launch(store, store_slots, native, native_slots, layout, tables, omitted, buffer).run()


@lru_cache(maxsize=16)
def partition_tables(layout: RaggedLayout, routes: Routes, device: torch.device) -> tuple[TileTables, Tensor]:
    """The tables of a rank, and for each unit that it sends the start and the size of its peer's group, int32."""
    groups = torch.stack(routes.sent.groups()).to(device, torch.int32)
    return TileTables(layout, device, kept=routes.kept, stored_units=routes.stored_units), groups


def row_buffer(rows: Tensor, layout: RaggedLayout, groups: Tensor) -> RowBuffer | None:
    """The parts of rows between ranks, uint8 ``[rows, row_bytes]``: values, then scales. ``None`` if none go."""
    if groups.shape[1] == 0:
        return None
    dtypes = layout.dtypes
    values = rows.view(as_integers(torch.empty(0, dtype=dtypes.stored_temporal)).dtype)
    if dtypes.quantized is None:
        return RowBuffer(values, None, *groups)
    itemsize, size = dtypes.temporal.itemsize, layout.geometry.stored_unit_bytes(dtypes)
    if size % itemsize:
        raise ValueError(f"quantised units must be a multiple of {itemsize} bytes for impl 'triton', got {size}")
    return RowBuffer(values, rows.view(dtypes.temporal)[:, size // itemsize :], *groups)


def shipped() -> list[ShippedKernel]:
    """The kernels for heads of 128 by 128; see :mod:`dasc.fast.triton.aot`."""
    kernels = []
    for layout in shipped_layouts():
        kept, moved = layout.retained_units - 2, 2
        tables = TileTables(layout, torch.device("meta"), kept=kept, stored_units=kept)
        rows = torch.empty(moved, row_bytes(layout), dtype=torch.uint8, device="meta")
        buffer = row_buffer(rows, layout, torch.empty(2, moved, dtype=torch.int32, device="meta"))
        kernels += shipped_for("partition_", layout, tables, buffer)
    return kernels
