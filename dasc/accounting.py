"""Compression ratios, slots for a budget and matched-memory accounting (eq. 6, appendices B and C.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from dasc.geometry import DtypePolicy, StateGeometry
from dasc.layout import Layout


def _ratio(dense: int, stored: int) -> float:
    return float("inf") if stored == 0 else float(Fraction(dense, stored))


def _check_cover(geometry: StateGeometry, layouts: Sequence[Layout]) -> None:
    covered = sum(layout.geometry.num_units for layout in layouts)
    if covered != geometry.num_units:
        raise ValueError(f"layouts must cover the {geometry.num_units} units of geometry together, got {covered}")


def temporal_compression(geometry: StateGeometry, layouts: Sequence[Layout], *, scales: bool = True) -> float:
    """``C_temp`` of eq. 6: dense temporal bytes over stored temporal bytes, convolution rows left out.

    Summed over the ranks given (pass one rank's layout and its sharded geometry for that rank alone).

    Args:
        geometry: of what ``layouts`` cover together.
        layouts: of every rank of ``geometry``.
        scales: count scales as stored bytes; they are part of the payload (eq. 8).

    Raises:
        ValueError: when the layouts are not all of ``geometry``.
    """
    _check_cover(geometry, layouts)
    dense = geometry.temporal_bytes(layouts[0].dtypes)
    return _ratio(dense, sum(x.temporal_slot_bytes + (x.scale_slot_bytes if scales else 0) for x in layouts))


def checkpoint_compression(geometry: StateGeometry, layouts: Sequence[Layout]) -> float:
    """``C_ckpt`` of eq. 6: whole checkpoint, convolution rows counted on both sides, summed over the ranks given.

    Raises:
        ValueError: when the layouts are not all of ``geometry``.
    """
    _check_cover(geometry, layouts)
    return _ratio(geometry.dense_bytes(layouts[0].dtypes), sum(x.slot_bytes for x in layouts))


def bottleneck_compression(layouts: Sequence[Layout]) -> float:
    """``C_ckpt`` by the fullest rank, which limits capacity (section 4.3): dense rank bytes over ``max_r b_r``.

    Raises:
        ValueError: for no layouts.
    """
    if not layouts:
        raise ValueError("layouts must hold one of each rank, got none")
    dense = layouts[0].geometry.dense_bytes(layouts[0].dtypes)
    return _ratio(dense, max(x.slot_bytes for x in layouts))


def usable_slots(pool_bytes: int, slot_bytes: Sequence[int]) -> int:
    """``floor(B_pool / max_r b_r) - 1`` (appendix C.1): slot 0 is reserved. Never below 0.

    Args:
        pool_bytes: budget of *one* rank's pool.
        slot_bytes: bytes of a slot on each rank.

    Raises:
        ValueError: for a negative budget or slots without bytes.
    """
    if pool_bytes < 0:
        raise ValueError(f"pool_bytes must not be negative, got {pool_bytes}")
    if not slot_bytes or min(slot_bytes) <= 0:
        raise ValueError(f"slot_bytes must be positive for every rank, got {list(slot_bytes)}")
    return max(pool_bytes // max(slot_bytes) - 1, 0)


@dataclass(frozen=True)
class MemorySplit:
    """One rank's state memory, charged to one budget (appendix C.1). Slots exclude each pool's reserved slot 0.

    Attributes:
        budget_bytes: what Dense would have had: native plus temporary.
        native_slots: usable slots for running states and dense cached checkpoints.
        native_bytes: bytes of the native pool, reserved slot included.
        compressed_slots: usable slots of the compressed pool.
        compressed_bytes: bytes of the compressed pool, reserved slot included.
        tmp_bytes: staging and scratch.
        unused_bytes: what is too little for one more slot.
    """

    budget_bytes: int
    native_slots: int
    native_bytes: int
    compressed_slots: int
    compressed_bytes: int
    tmp_bytes: int
    unused_bytes: int


def split_budget(
    budget_bytes: int,
    *,
    dense_slot_bytes: int,
    compressed_slot_bytes: int | None = None,
    native_slots: int | None = None,
    tmp_bytes: int = 0,
) -> MemorySplit:
    """Divide one rank's state-memory budget so that native + compressed + temporary never exceeds it.

    Without ``compressed_slot_bytes`` this is the Dense arm: all that ``tmp_bytes`` leaves is native. With it,
    ``native_slots`` usable native slots are set aside first and the compressed pool takes the rest.

    Raises:
        ValueError: when the budget cannot hold what is asked for, saying how many bytes it takes.
    """
    if budget_bytes < 0 or tmp_bytes < 0:
        raise ValueError(f"bytes must not be negative, got a budget of {budget_bytes} and {tmp_bytes} temporary")
    if dense_slot_bytes <= 0:
        raise ValueError(f"dense_slot_bytes must be positive, got {dense_slot_bytes}")
    if compressed_slot_bytes is None:
        if native_slots is not None:
            raise ValueError("native_slots is derived from the budget when there is no compressed pool")
        native = (budget_bytes - tmp_bytes) // dense_slot_bytes - 1
        needed = 2 * dense_slot_bytes + tmp_bytes
        compressed = compressed_bytes = 0
    else:
        if native_slots is None or native_slots < 1 or compressed_slot_bytes <= 0:
            raise ValueError(
                "a compressed pool needs native_slots >= 1 and compressed_slot_bytes > 0, "
                f"got {native_slots} and {compressed_slot_bytes}"
            )
        native = native_slots
        rest = budget_bytes - tmp_bytes - (native + 1) * dense_slot_bytes
        compressed = rest // compressed_slot_bytes - 1
        needed = tmp_bytes + (native + 1) * dense_slot_bytes + 2 * compressed_slot_bytes
        compressed_bytes = (compressed + 1) * compressed_slot_bytes
    if budget_bytes < needed:
        slots = "one usable slot" if compressed_slot_bytes is None else f"{native} native slots and a compressed one"
        raise ValueError(f"a budget of {budget_bytes} bytes is too small: {slots} and what is temporary take {needed}")
    native_bytes = (native + 1) * dense_slot_bytes
    return MemorySplit(
        budget_bytes=budget_bytes,
        native_slots=native,
        native_bytes=native_bytes,
        compressed_slots=compressed,
        compressed_bytes=compressed_bytes,
        tmp_bytes=tmp_bytes,
        unused_bytes=budget_bytes - native_bytes - compressed_bytes - tmp_bytes,
    )


def quantized_only_compression(geometry: StateGeometry, dtypes: DtypePolicy, *, with_conv: bool) -> float:
    """*Every* unit stored as ``dtypes`` say (appendix E.1), with the convolution rows on both sides or on neither.

    Kimi-Linear in INT8: 3.88 of the temporal payload, 3.53 of the whole checkpoint.

    Raises:
        ValueError: for INT4 and an odd ``V``.
    """
    stored = geometry.num_units * (geometry.stored_unit_bytes(dtypes) + geometry.unit_scale_bytes(dtypes))
    conv = geometry.conv_bytes(dtypes) if with_conv else 0
    return _ratio(geometry.temporal_bytes(dtypes) + conv, stored + conv)
