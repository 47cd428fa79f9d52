"""Which tile of the state each program of the checkpoint kernels copies, and to which rows of a slot."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import triton
from torch import Tensor

from dasc.layout import Layout, RaggedLayout

TILE_BYTES = 16 * 1024  # 128 B a thread of 128: enough in flight, and enough tiles for all SMs from one small shard
LINE_BYTES = 128
SECTOR_BYTES = 32


@dataclass(frozen=True)
class TileConfig:
    """Launch configuration of the checkpoint kernels.

    Attributes:
        block_v: values of a tile, or bytes of two in INT4, a power of two; all of them where they share scales over
            ``V``.
        block_k: key channels of a tile, a power of two.
        sector_k: key channels of a memory sector, the least that is read.
        block_c: channels of a block of convolution rows.
        num_warps: of a program.
    """

    block_v: int
    block_k: int
    sector_k: int
    block_c: int = 2048
    num_warps: int = 4


def tile_config(layout: Layout) -> TileConfig:
    """The configuration for a layout.

    GDN heads are copied as they lie, in runs of 16 KiB. A tile of KDA channels is one cache line wide and has all
    values, so that loads along ``K`` and stores along ``V`` are both whole lines. Tiles that are quantised are held
    in registers as FP32: 32 channels of them.
    """
    geometry, dtypes = layout.geometry, layout.dtypes
    itemsize = dtypes.temporal.itemsize
    V = triton.next_power_of_2(geometry.stored_unit_shape(dtypes)[0])
    K = triton.next_power_of_2(geometry.head_k_dim)
    if dtypes.quantized:
        block_v, block_k = V, min(K, 32)
    else:
        block_k = min(K, 128 if geometry.kind == "gdn" else LINE_BYTES // itemsize)
        block_v = min(V, TILE_BYTES // (itemsize * block_k))
    sector_k = block_k if geometry.kind == "gdn" else min(block_k, SECTOR_BYTES // itemsize)
    return TileConfig(block_v, block_k, sector_k)


@dataclass(frozen=True, eq=False)
class Tiles:
    """Tiles of one kind of launch, on the device.

    Attributes:
        place: ``[J, 4]`` int32: layer, head, index of the tile along ``V`` and along ``K``.
        rows: int32 slot row of each channel, ``[J, block_k]`` (KDA), or of the head, ``[J, 1]`` (GDN); -1 for none.
        sectors: ``[J, block_k / sector_k]`` int8, 1 where the state is read; padding reads none.
    """

    place: Tensor
    rows: Tensor
    sectors: Tensor

    def __len__(self) -> int:
        return self.place.shape[0]


class TileTables:
    """The tables of one layout on one device, each built when first asked for.

    Args:
        layout: of this rank.
        device: where the kernels run.
        kept: with storage balancing (appendix B.1 (b)), how many of the rank's own units its slots hold, at the rows of
            their own numbers. The others go to other ranks and get the rows from ``slot_units`` on. All when ``None``.
        stored_units: rows of the slot before the padding; those from ``kept`` on are for units of other ranks.
    """

    def __init__(
        self, layout: Layout, device: torch.device, *, kept: int | None = None, stored_units: int | None = None
    ) -> None:
        self.config = tile_config(layout)
        self._layout = layout
        self._tiles_v = triton.cdiv(layout.geometry.stored_unit_shape(layout.dtypes)[0], self.config.block_v)
        self._device = device
        self._kept = layout.retained_units if kept is None else kept
        self._stored_units = layout.retained_units if stored_units is None else stored_units

    @cached_property
    def retained(self) -> Tiles:
        """Tiles that hold a retained unit."""
        return self._on_device(*self._of_heads(all_tiles=False))

    @cached_property
    def stored(self) -> Tiles:
        """All that one slot holds: the tiles with a retained unit, and the padding."""
        parts = zip(self._of_heads(all_tiles=False), self._of_padding())
        return self._on_device(*(torch.cat(part) for part in parts))

    @cached_property
    def everything(self) -> Tiles:
        """All tiles of a state."""
        return self._on_device(*self._of_heads(all_tiles=True))

    def _of_heads(self, all_tiles: bool) -> tuple[Tensor, Tensor, Tensor]:
        """``place``, ``rows`` and ``sectors`` of the tiles of all heads, or of those that hold a retained unit."""
        geometry, config = self._layout.geometry, self.config
        L, HV, _, K = geometry.state_shape
        tiles_v, tiles_k = self._tiles_v, triton.cdiv(K, config.block_k)
        rows = self._unit_rows().view(L, HV, 1, -1)
        if geometry.kind == "kda":
            rows = torch.nn.functional.pad(rows, (0, tiles_k * config.block_k - K), value=-1)
            rows = rows.view(L, HV, 1, tiles_k, config.block_k)
        else:
            rows = rows[..., None]
        rows = rows.expand(L, HV, tiles_v, tiles_k, -1).flatten(0, 3)
        place = torch.cartesian_prod(*(torch.arange(size) for size in (L, HV, tiles_v, tiles_k)))
        if not all_tiles:
            holds_unit = (rows >= 0).any(dim=1)
            place, rows = place[holds_unit], rows[holds_unit]
        return place, rows, self._sectors(rows)

    def _of_padding(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same of tiles that write zeros: rows of the slot that hold no unit."""
        geometry, config = self._layout.geometry, self.config
        width, tiles_k = config.block_k, 1
        if geometry.kind == "gdn":
            width, tiles_k = 1, triton.cdiv(geometry.head_k_dim, config.block_k)
        layer, rows = torch.empty(0, dtype=torch.int64), torch.empty(0, width, dtype=torch.int64)
        for of_layer, first, stop in self._padding():
            blocks = torch.nn.functional.pad(torch.arange(first, stop), (0, -(stop - first) % width), value=-1)
            rows = torch.cat([rows, blocks.view(-1, width)])
            layer = torch.cat([layer, torch.full((len(rows) - len(layer),), of_layer)])
        of_block, v, k = torch.cartesian_prod(*(torch.arange(size) for size in (len(rows), self._tiles_v, tiles_k))).T
        place = torch.stack([layer[of_block], torch.zeros_like(v), v, k], dim=1)
        rows = rows[of_block]
        return place, rows, self._sectors(torch.full_like(rows, -1))

    def _unit_rows(self) -> Tensor:
        """``[L, U]`` row of each unit in its slot (ragged) or in its layer's part of it (padded); -1 if omitted."""
        mask, layout = self._layout.mask, self._layout
        if not isinstance(layout, RaggedLayout):
            return (mask.cumsum(dim=1) - 1).masked_fill(~mask, -1)
        rows = mask.flatten().cumsum(dim=0) - 1
        rows = torch.where(rows < self._kept, rows, rows - self._kept + layout.slot_units)
        return rows.view_as(mask).masked_fill(~mask, -1)

    def _padding(self) -> list[tuple[int, int, int]]:
        """Layer (0 where the layers share a slot), first row and end of each run of rows without a unit."""
        layout = self._layout
        if isinstance(layout, RaggedLayout):
            return [(0, self._stored_units, layout.slot_units)]
        return [(layer, count, layout.max_count) for layer, count in enumerate(layout.counts)]

    def _sectors(self, rows: Tensor) -> Tensor:
        """Whether each sector of the tiles with these rows holds a unit."""
        sectors = self.config.block_k // self.config.sector_k
        return (rows >= 0).view(len(rows), sectors, rows.shape[1] // sectors).any(dim=2)

    def _on_device(self, place: Tensor, rows: Tensor, sectors: Tensor) -> Tiles:
        return Tiles(
            place.to(self._device, torch.int32),
            rows.to(self._device, torch.int32).contiguous(),
            sectors.to(self._device, torch.int8),
        )
