"""Arguments of the checkpoint kernels, from checked pools."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
from torch import Tensor

from dasc.contract import DenseState, PackedState
from dasc.fast.triton.aot import ShippedKernel
from dasc.fast.triton.checkpoint_kernels import pack_kernel, unpack_kernel
from dasc.fast.triton.checkpoint_tables import Tiles, TileTables
from dasc.fast.triton.launch import on_device_of
from dasc.layout import Layout, RaggedLayout

_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BITS = {None: 0, "int8": 8, "int4": 4}
_TRITON_TYPE = {
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}


@dataclass(frozen=True)
class RowBuffer:
    """Rows of units on their way between ranks (:mod:`dasc.fast.triton.partition`).

    Attributes:
        values: ``[rows, ..]`` stored values, as integers.
        scales: ``[rows, ..]`` of the same rows, if quantised.
        group_starts: int32, for each unit of one checkpoint the number of units that go to earlier peers.
        group_sizes: int32, the number of units that go to the same peer.
    """

    values: Tensor
    scales: Tensor | None
    group_starts: Tensor
    group_sizes: Tensor


@dataclass(frozen=True)
class Launch:
    """A kernel with its arguments.

    Attributes:
        kernel: the ``@triton.jit`` function.
        arguments: by name.
        num_warps: of a program.
    """

    kernel: Any
    arguments: dict[str, Any]
    num_warps: int

    def run(self) -> None:
        """Launch it on the device of the pools, unless there is nothing to copy."""
        programs = self.arguments["jobs"] * self.arguments["checkpoints"]
        if programs:
            with on_device_of(self.arguments["native"]):
                self.kernel[(programs,)](
                    **self.arguments, num_warps=self.num_warps, num_stages=1, enable_fp_fusion=False
                )

    def shipped(self, name: str) -> ShippedKernel:
        """What Triton compiles for this launch."""
        constexprs: dict[str, object] = {}
        signature: dict[str, str] = {}
        divisible = []
        for parameter in self.kernel.params:
            value = self.arguments[parameter.name]
            if isinstance(value, Tensor):
                signature[parameter.name] = f"*{_TRITON_TYPE[value.dtype]}"
                divisible.append(parameter.name)
            elif parameter.is_constexpr or value is None or (value == 1 and not parameter.do_not_specialize):
                signature[parameter.name] = "constexpr"
                constexprs[parameter.name] = value
            else:
                signature[parameter.name] = "i32"
                if value % 16 == 0 and not parameter.do_not_specialize:
                    divisible.append(parameter.name)
        return ShippedKernel(
            name, self.kernel, signature, constexprs, self.num_warps, 1, tuple(divisible), False, fp_fusion=False
        )


def pack_launch(
    native: DenseState,
    native_slots: Tensor,
    store: PackedState,
    store_slots: Tensor,
    layout: Layout,
    tables: TileTables,
    buffer: RowBuffer | None = None,
) -> Launch:
    """Native slots to compressed ones, and to ``buffer`` what has no row in a slot."""
    tiles = tables.stored
    arguments = _arguments(native, native_slots, store, store_slots, layout, tables, tiles, buffer)
    arguments |= {"sectors": tiles.sectors, "SECTOR_K": tables.config.sector_k}
    return Launch(pack_kernel, arguments, tables.config.num_warps)


def unpack_launch(
    store: PackedState,
    store_slots: Tensor,
    native: DenseState,
    native_slots: Tensor,
    layout: Layout,
    tables: TileTables,
    omitted: Literal["zero", "leave"],
    buffer: RowBuffer | None = None,
) -> Launch:
    """Compressed slots to native ones, and from ``buffer`` what has no row in a slot."""
    tiles = tables.retained if omitted == "leave" else tables.everything
    arguments = _arguments(native, native_slots, store, store_slots, layout, tables, tiles, buffer)
    return Launch(unpack_kernel, {**arguments, "LEAVE": omitted == "leave"}, tables.config.num_warps)


def as_integers(x: Tensor) -> Tensor:
    """The same bits as integers: a copy of them changes none, whatever they mean."""
    return x.view(_INTEGER_OF_SIZE[x.itemsize])


def _arguments(
    native: DenseState,
    native_slots: Tensor,
    store: PackedState,
    store_slots: Tensor,
    layout: Layout,
    tables: TileTables,
    tiles: Tiles,
    buffer: RowBuffer | None,
) -> dict[str, Any]:
    """All that both kernels take."""
    geometry, config, quantized = layout.geometry, tables.config, layout.dtypes.quantized
    channels, rows = _conv_shape(native.conv, store.conv)
    block_r = triton.next_power_of_2(rows)
    block_c = config.block_c // block_r
    conv_jobs = geometry.num_layers * triton.cdiv(channels, block_c) if geometry.conv_width > 1 else 0
    return {
        "native": native.temporal if quantized else as_integers(native.temporal),
        "native_conv": as_integers(native.conv),
        "store": as_integers(store.temporal),
        "store_conv": as_integers(store.conv),
        "scales": store.scales,
        "buffer": None if buffer is None else buffer.values,
        "buffer_scales": None if buffer is None else buffer.scales,
        "native_slots": native_slots.contiguous(),
        "store_slots": store_slots.contiguous(),
        "tiles": tiles.place,
        "rows": tiles.rows,
        "group_starts": None if buffer is None else buffer.group_starts,
        "group_sizes": None if buffer is None else buffer.group_sizes,
        "jobs": len(tiles) + conv_jobs,
        "unit_jobs": len(tiles),
        "checkpoints": len(native_slots),
        "slot_units": layout.slot_units,
        **_strides("native", ("layer", "slot", "head", "v", "k"), native.temporal.stride()),
        **_strides("store", ("layer", "slot", "row", "v", "k"), _slot_strides(store.temporal, layout)),
        **_strides("scales", ("layer", "slot", "row", "k"), _slot_strides(store.scales, layout)),
        **_strides("native_conv", ("layer", "slot", "c", "r"), _conv_strides(native.conv, rows)),
        **_strides("store_conv", ("layer", "slot", "c", "r"), _conv_strides(store.conv, rows)),
        "buffer_row": 0 if buffer is None else buffer.values.stride(0),
        "buffer_scales_row": 0 if buffer is None or buffer.scales is None else buffer.scales.stride(0),
        "KDA": geometry.kind == "kda",
        "BITS": _BITS[quantized],
        "PARTITION": buffer is not None,
        "V": geometry.stored_unit_shape(layout.dtypes)[0],
        "K": geometry.head_k_dim,
        "CONV_C": channels,
        "CONV_R": rows,
        "BLOCK_V": config.block_v,
        "BLOCK_K": config.block_k,
        "BLOCK_C": block_c,
        "BLOCK_R": block_r,
    }


def _strides(name: str, axes: tuple[str, ...], strides: Sequence[int]) -> dict[str, int]:
    """Arguments ``NAME_AXIS``; axes that a tensor lacks at its end have stride 0."""
    return {f"{name}_{axis}": stride for axis, stride in itertools.zip_longest(axes, strides, fillvalue=0)}


def _slot_strides(slots: Tensor | None, layout: Layout) -> tuple[int, ...]:
    """Strides of (layer, slot, row, ..): a ragged slot has the rows of all layers, so that the layer moves nothing."""
    if slots is None:
        return ()
    return (0, *slots.stride()) if isinstance(layout, RaggedLayout) else slots.stride()


def _conv_shape(native_conv: Tensor, store_conv: Tensor) -> tuple[int, int]:
    """Channels and rows to copy in one layer: all in one run when they lie one after another, alike in both pools."""
    C, R = native_conv.shape[2:]
    if R == 0:
        return C, 1
    lie = {conv.stride()[2:] for conv in (native_conv, store_conv)}
    return (C * R, 1) if lie in ({(R, 1)}, {(1, C)}) else (C, R)


def _conv_strides(conv: Tensor, rows: int) -> tuple[int, ...]:
    """Strides of (layer, slot, channel, row) as :func:`_conv_shape` has them."""
    return conv.stride() if rows == conv.shape[3] else (*conv.stride()[:2], 1, 0)
