"""Checkpoints: pack what is retained, unpack it again."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from dasc.contract import DenseState, PackedState
from dasc.fast.choice import Impl, implementation
from dasc.layout import Layout


def pack(state: Tensor, conv: Tensor, layout: Layout, *, impl: Impl = "auto") -> PackedState:
    """Store: copy the retained units out of ``N`` dense states, exactly or quantised (eq. 8, appendix B).

    Omitted units are not read. The convolution rows are copied whole.

    Args:
        state: ``[L, N, HV, V, K]`` in ``layout.dtypes.temporal``, of one rank.
        conv: ``[L, N, channels, width - 1]`` in ``layout.dtypes.conv``.
        layout: of that rank; its slot must have room for every unit that it retains.
        impl: as in :func:`chunk_gdn`.

    Raises:
        ValueError: as :func:`dasc.contract.check_pack`, for NaN or infinity in retained units that are to be quantised,
            or for an ``impl`` that cannot run.
    """
    return implementation(impl, state).pack(state, conv, layout)


def unpack(packed: PackedState, layout: Layout, base: Tensor | None = None, *, impl: Impl = "auto") -> DenseState:
    """Load: put the retained units back into ``N`` dense states (section 4.2).

    Args:
        packed: from :func:`pack` with the same layout.
        layout: of this rank.
        base: ``[L, N, HV, V, K]`` in ``layout.dtypes.temporal``. The omitted units are zero without it (NR) and taken
            from it when given (WR: the refreshed state). It is not written to.
        impl: as in :func:`chunk_gdn`.

    Raises:
        ValueError: as :func:`dasc.contract.check_unpack`, or for an ``impl`` that cannot run.
    """
    return implementation(impl, packed.temporal).unpack(packed, layout, base)


def pack_slots(
    native: DenseState,
    native_slots: Tensor,
    store: PackedState,
    store_slots: Tensor,
    layout: Layout,
    *,
    impl: Impl = "auto",
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
        impl: as in :func:`dasc.fast.chunk_gdn`.

    Raises:
        ValueError: as :func:`dasc.contract.check_slots`, or for an ``impl`` that cannot run.
    """
    implementation(impl, native.temporal).pack_slots(native, native_slots, store, store_slots, layout)


def unpack_slots(
    store: PackedState,
    store_slots: Tensor,
    native: DenseState,
    native_slots: Tensor,
    layout: Layout,
    *,
    omitted: Literal["zero", "leave"] = "zero",
    impl: Impl = "auto",
) -> None:
    """Load from pool to pool: :func:`unpack` of ``store_slots`` into ``native_slots``, in place.

    Args:
        store: as in :func:`pack_slots`.
        store_slots: ``[n]`` integers.
        native: as in :func:`pack_slots`; written to.
        native_slots: ``[n]`` integers, all different.
        layout: as in :func:`pack_slots`.
        omitted: the units that were not stored become zero (NR) or are left as they are in ``native`` (WR).
        impl: as in :func:`dasc.fast.chunk_gdn`.

    Raises:
        ValueError: as :func:`dasc.contract.check_slots`, or for an ``impl`` that cannot run.
    """
    implementation(impl, native.temporal).unpack_slots(
        store, store_slots, native, native_slots, layout, omitted=omitted
    )
