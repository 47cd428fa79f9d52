"""Units of a checkpoint stored with 32, 16, 8, 4 or 0 bits an element: values, and the bytes that they take.

Not in the paper, which keeps a unit or drops it. 32 is the unit as it is, 16 is IEEE half precision, 8 is eq. 8, 4 is
eq. 8 with codes from -7 to 7, two in a byte, and 0 is a dropped unit. Unlike the INT4 of layouts, 4 is for any ``V``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dasc.contract import QMAX
from dasc.geometry import StateGeometry
from dasc.reference.int4 import pack_nibbles, unpack_nibbles
from dasc.reference.int8 import dequantize, quantize
from dasc.reference.packing import from_units, to_units

BITS = (0, 4, 8, 16, 32)
"""Widths of a unit, ascending."""

HALF = torch.float16
"""Of 16 bits. Its error is an eighth of bfloat16's; what is beyond its largest number is refused."""


class PackedBits(NamedTuple):
    """``N`` checkpoints' temporal states, each width in a tensor of its own, units ascending within it.

    Attributes:
        exact: ``[N, units of 32 bits, *unit_shape]`` in the dtype of the state.
        half: ``[N, units of 16 bits, *unit_shape]`` float16.
        int8: ``[N, units of 8 bits, *unit_shape]`` int8.
        int4: ``[N, units of 4 bits, ceil(unit_elements / 2)]`` uint8, a unit's first half in the low halves of bytes.
        scales: ``[N, units of 8 and then of 4 bits, *scale_shape]`` in the dtype of the state.
    """

    exact: Tensor
    half: Tensor
    int8: Tensor
    int4: Tensor
    scales: Tensor


def check_bits(bits: Tensor, geometry: StateGeometry) -> None:
    """Raise unless ``bits`` is an allocation of this geometry.

    Raises:
        ValueError: for other than int64 ``[L, units_per_layer]`` out of :data:`BITS`.
    """
    expected = [geometry.num_layers, geometry.units_per_layer]
    if bits.dtype != torch.int64 or list(bits.shape) != expected:
        raise ValueError(f"bits must be torch.int64 {expected}, got {bits.dtype} {list(bits.shape)}")
    wrong = bits[~torch.isin(bits, torch.tensor(BITS))]
    if len(wrong):
        raise ValueError(f"bits must be out of {BITS}, got {int(wrong[0])}")


def unit_bytes(geometry: StateGeometry, bits: int, temporal: torch.dtype = torch.float32) -> int:
    """Stored bytes of one unit: its elements, in whole bytes, and its scales.

    Args:
        geometry: of the model.
        bits: out of :data:`BITS`.
        temporal: dtype of the state, in which scales and units of 32 bits are stored.

    Raises:
        ValueError: for other ``bits``.
    """
    elements, scales = geometry.unit_elements, geometry.scales_per_unit * temporal.itemsize
    by_bits = {
        0: 0,
        4: (elements + 1) // 2 + scales,
        8: elements + scales,
        16: elements * HALF.itemsize,
        32: elements * temporal.itemsize,
    }
    if bits not in by_bits:
        raise ValueError(f"bits must be out of {BITS}, got {bits}")
    return by_bits[bits]


def allocation_bytes(geometry: StateGeometry, bits: Tensor, temporal: torch.dtype = torch.float32) -> int:
    """Stored bytes of a temporal state, scales included and convolution rows left out.

    Nothing is lost to alignment: each width has a tensor of its own (:class:`PackedBits`). Which unit has how many bits
    belongs to the model, as a mask does, and not to its checkpoints.

    Args:
        geometry: of the model.
        bits: ``[L, U]`` int64, bits of each unit.
        temporal: dtype of the state.

    Raises:
        ValueError: as :func:`check_bits`.
    """
    check_bits(bits, geometry)
    return sum(int((bits == width).sum()) * unit_bytes(geometry, width, temporal) for width in BITS)


def pack_bits(state: Tensor, bits: Tensor, geometry: StateGeometry) -> PackedBits:
    """Store each unit with its bits.

    Args:
        state: ``[L, N, HV, V, K]``, FP32 or FP64.
        bits: ``[L, U]`` int64, bits of each unit.
        geometry: of the model.

    Raises:
        ValueError: for other shapes or dtypes, or units that cannot be stored so: NaN, infinity, or with 16 bits what
            half precision cannot hold.
    """
    check_bits(bits, geometry)
    without_n = tuple(state.shape[:1] + state.shape[2:])
    if state.dtype not in (torch.float32, torch.float64) or without_n != geometry.state_shape:
        L, *rest = geometry.state_shape
        raise ValueError(f"state must be FP32 or FP64 {[L, 'N', *rest]}, got {state.dtype} {list(state.shape)}")
    units = to_units(state, geometry)
    of_width = {width: units[:, (bits.flatten() == width).nonzero().flatten()] for width in BITS}
    half = of_width[16].to(HALF)
    if not torch.isfinite(half).all():
        raise ValueError(f"units of 16 bits must be finite and at most {torch.finfo(HALF).max:.0f}")
    axis = geometry.value_axis
    int8 = quantize(of_width[8], axis)
    int4 = quantize(of_width[4], axis, qmax=QMAX["int4"])
    return PackedBits(
        of_width[32], half, int8.q, _pack_pairs(int4.q.flatten(2)), torch.cat([int8.scales, int4.scales], 1)
    )


def unpack_bits(packed: PackedBits, bits: Tensor, geometry: StateGeometry) -> Tensor:
    """Load what :func:`pack_bits` stored with the same ``bits``; dropped units are zero (NR).

    Args:
        packed: of ``N`` states.
        bits: ``[L, U]`` int64, bits of each unit.
        geometry: of the model.

    Returns:
        ``[L, N, HV, V, K]``, in the dtype that the state had.

    Raises:
        ValueError: for other bits than the state was stored with.
    """
    check_bits(bits, geometry)
    stored = {32: packed.exact, 16: packed.half, 8: packed.int8, 4: packed.int4}
    for width, part in stored.items():
        if part.shape[1] != (count := int((bits == width).sum())):
            raise ValueError(f"packed must hold {count} units of {width} bits as bits say, got {part.shape[1]}")
    N, int8_units = packed.int8.shape[:2]
    int4 = _unpack_pairs(packed.int4, geometry.unit_elements).view(N, packed.int4.shape[1], *geometry.unit_shape)
    axis = geometry.value_axis
    loaded = {
        32: packed.exact,
        16: packed.half.to(packed.exact.dtype),
        8: dequantize(packed.int8, packed.scales[:, :int8_units], axis),
        4: dequantize(int4, packed.scales[:, int8_units:], axis),
    }
    units = packed.exact.new_zeros(N, geometry.num_units, *geometry.unit_shape)
    for width, values in loaded.items():
        units[:, (bits.flatten() == width).nonzero().flatten()] = values
    return from_units(units, geometry).contiguous()


def _pack_pairs(codes: Tensor) -> Tensor:
    """``[..., n]`` int8 within -8 and 7 to ``[..., ceil(n / 2)]`` uint8; a missing last code is 0."""
    return pack_nibbles(torch.nn.functional.pad(codes, (0, codes.shape[-1] % 2)), -1)


def _unpack_pairs(packed: Tensor, n: int) -> Tensor:
    """The inverse of :func:`_pack_pairs`, int8."""
    return unpack_nibbles(packed, -1)[..., :n]
