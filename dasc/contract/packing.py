"""Of packing and unpacking checkpoints, one state or slots of a pool."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dasc.contract.expect import expect_integers, expect_slots, expect_stored
from dasc.geometry import Quantization
from dasc.layout import Layout, RaggedLayout

# Quantised storage (eq. 8): values are scale * q with |q| <= QMAX, and no scale is below MIN_ABSMAX / QMAX.
QMAX: dict[Quantization, int] = {"int8": 127, "int4": 7}
MIN_ABSMAX = 1e-8


class PackedState(NamedTuple):
    """``N`` compressed checkpoints of one rank, padding zero.

    Attributes:
        temporal: retained units in ``layout.dtypes.stored_temporal``. Ragged ``[N, slot_units, V, K]`` (GDN) or
            ``[N, slot_units, V]`` (KDA); padded ``[L, N, R_max, V, K]`` or ``[L, N, R_max, V]``. In INT4 ``V / 2``
            bytes of two codes (:meth:`~dasc.geometry.StateGeometry.stored_unit_shape`).
        conv: ``[L, N, channels, width - 1]``, as it was.
        scales: in ``layout.dtypes.temporal``, shaped as ``temporal`` without ``V``; ``None`` unless quantised.
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


def slots_shape(layout: Layout, N: int, tail: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of ``N`` slots whose units have the shape ``tail``."""
    if isinstance(layout, RaggedLayout):
        return (N, layout.slot_units, *tail)
    return (layout.geometry.num_layers, N, layout.max_count, *tail)


def zero_slots(layout: Layout, slots: int, device: torch.device | str = "cpu") -> PackedState:
    """A pool of ``slots`` slots of zeros, all parts of them."""
    geometry, dtypes = layout.geometry, layout.dtypes
    temporal = slots_shape(layout, slots, geometry.stored_unit_shape(dtypes))
    scales = slots_shape(layout, slots, geometry.scale_shape)
    return PackedState(
        temporal=torch.zeros(temporal, dtype=dtypes.stored_temporal, device=device),
        conv=torch.zeros(_batched(geometry.conv_shape, slots), dtype=dtypes.conv, device=device),
        scales=None if dtypes.quantized is None else torch.zeros(scales, dtype=dtypes.temporal, device=device),
    )


def one_slot(store: PackedState, slot: int, layout: Layout) -> PackedState:
    """Views of one slot of a pool, shaped as one packed checkpoint."""
    axis = 0 if isinstance(layout, RaggedLayout) else 1  # padded pools are layer-first
    return PackedState(
        store.temporal.narrow(axis, slot, 1),
        store.conv.narrow(1, slot, 1),
        None if store.scales is None else store.scales.narrow(axis, slot, 1),
    )


def check_pack(state: Tensor, conv: Tensor, layout: Layout) -> int:
    """Validate the arguments of ``pack`` and return ``N``.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    if state.ndim != 5:
        raise ValueError(f"state must have 5 axes [L, N, HV, V, K], got {list(state.shape)}")
    N = state.shape[1]
    expect_stored("state", state, _batched(layout.geometry.state_shape, N), layout.dtypes.temporal)
    expect_stored("conv", conv, _batched(layout.geometry.conv_shape, N), layout.dtypes.conv)
    _check_width(layout)
    return N


def check_unpack(packed: PackedState, layout: Layout, base: Tensor | None) -> int:
    """Validate the arguments of ``unpack`` and return ``N``.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    geometry, dtypes = layout.geometry, layout.dtypes
    _check_width(layout)
    if packed.conv.ndim != 4:
        raise ValueError(f"packed.conv must have 4 axes [L, N, channels, width - 1], got {list(packed.conv.shape)}")
    N = packed.conv.shape[1]
    expect_stored("packed.conv", packed.conv, _batched(geometry.conv_shape, N), dtypes.conv)
    temporal_shape = slots_shape(layout, N, geometry.stored_unit_shape(dtypes))
    expect_stored("packed.temporal", packed.temporal, temporal_shape, dtypes.stored_temporal)
    if (packed.scales is None) != (dtypes.quantized is None):
        expected = "None" if dtypes.quantized is None else "given"
        raise ValueError(f"packed.scales must be {expected} when quantized is {dtypes.quantized}")
    if packed.scales is not None:
        expect_stored("packed.scales", packed.scales, slots_shape(layout, N, geometry.scale_shape), dtypes.temporal)
    if base is not None:
        expect_stored("base", base, _batched(geometry.state_shape, N), dtypes.temporal)
    return N


def check_slots(
    native: DenseState,
    native_slots: Tensor,
    store: PackedState,
    store_slots: Tensor,
    layout: Layout,
    written: str,
    omitted: str = "zero",
) -> int:
    """Validate the arguments of ``pack_slots`` and ``unpack_slots`` and return the number of checkpoints.

    Args:
        written: ``"native"`` or ``"store"``: the pool that is written to; its slots must be distinct.
        omitted: of ``unpack_slots``.

    Raises:
        ValueError: naming the argument, what was expected and what came. Slots on a GPU are not read.
    """
    if omitted not in ("zero", "leave"):
        raise ValueError(f"omitted must be 'zero' or 'leave', got {omitted!r}")
    geometry, dtypes = layout.geometry, layout.dtypes
    _check_width(layout)
    if native.temporal.ndim != 5 or store.conv.ndim != 4:
        raise ValueError(
            "native.temporal must be [L, S, HV, V, K] and store.conv [L, slots, channels, width - 1], "
            f"got {list(native.temporal.shape)} and {list(store.conv.shape)}"
        )
    sizes = {"native": native.temporal.shape[1], "store": store.conv.shape[1]}
    expect_stored("native.temporal", native.temporal, _batched(geometry.state_shape, sizes["native"]), dtypes.temporal)
    expect_stored("native.conv", native.conv, _batched(geometry.conv_shape, sizes["native"]), dtypes.conv)
    check_unpack(store, layout, None)
    device, count = native.temporal.device, native_slots.numel()
    for name, slots in (("native", native_slots), ("store", store_slots)):
        expect_integers(f"{name}_slots", slots, count, device)
        if device.type == "cpu":
            if name == written:
                expect_slots(slots, sizes[name], 0, f"{name}_slots")
            elif bool(((slots < 0) | (slots >= sizes[name])).any()):
                raise ValueError(f"{name}_slots must be from 0 to {sizes[name] - 1}, got {slots.tolist()}")
    return count


def _check_width(layout: Layout) -> None:
    if layout.slot_units < layout.retained_units:
        raise ValueError(
            f"layout allocates {layout.slot_units} units a slot but retains {layout.retained_units}: "
            "a storage-balanced slot is filled by the transfer between ranks"
        )


def _batched(shape: tuple[int, ...], N: int) -> tuple[int, ...]:
    """``[L, ...]`` -> ``[L, N, ...]``."""
    return (shape[0], N, *shape[1:])
