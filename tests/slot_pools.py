"""Pools of dense states and of checkpoint slots, poisoned with NaN, for the tests of packing from pool to pool."""

from typing import NamedTuple

import torch
from torch import Tensor

from dasc.contract import DenseState, PackedState, slots_shape
from dasc.layout import Layout


class Pools(NamedTuple):
    """A native pool of which only ``native_slots`` hold states, a store, and which slots belong together."""

    native: DenseState
    native_slots: Tensor
    store: PackedState
    store_slots: Tensor

    def clone(self) -> "Pools":
        return Pools(
            DenseState(*(part.clone() for part in self.native)),
            self.native_slots,
            PackedState(*(None if part is None else part.clone() for part in self.store)),
            self.store_slots,
        )


def poisoned_pools(state: Tensor, conv: Tensor, layout: Layout, seed: int, *, strided: bool = False) -> Pools:
    """Pools around ``N`` states ``[L, N, HV, V, K]`` and their rows ``[L, N, channels, width - 1]``.

    Args:
        strided: ``K`` before ``V`` and rows before channels in memory.
    """
    gen = torch.Generator().manual_seed(seed)
    N, geometry = state.shape[1], layout.geometry
    native_slots, store_slots = (torch.randperm(N + spare, generator=gen)[:N] for spare in (2, 3))

    def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if not dtype.is_floating_point:
            return torch.full(shape, 77, dtype=dtype)
        return torch.full(shape, torch.nan, dtype=dtype)

    native = []
    for values in (state, conv):
        pool = poisoned((values.shape[0], N + 2, *values.shape[2:]), values.dtype)
        if strided:
            pool = pool.mT.clone(memory_format=torch.contiguous_format).mT
        pool[:, native_slots] = values
        native.append(pool)
    scales = slots_shape(layout, N + 3, geometry.scale_shape)
    store = PackedState(
        poisoned(slots_shape(layout, N + 3, geometry.stored_unit_shape(layout.dtypes)), layout.dtypes.stored_temporal),
        poisoned((geometry.conv_shape[0], N + 3, *geometry.conv_shape[1:]), conv.dtype),
        poisoned(scales, layout.dtypes.temporal) if layout.dtypes.quantized else None,
    )
    return Pools(DenseState(*native), native_slots, store, store_slots)


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal dtype, shape and bits, NaN included."""
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    return torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))


def same_pools(a: Pools, b: Pools) -> bool:
    return all(same_bits(x, y) for x, y in zip((*a.native, *a.store), (*b.native, *b.store)))
