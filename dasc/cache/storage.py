"""State data behind the cache's slot numbers: a native pool of whole states, a compressed pool by the plan's layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dasc.contract import DenseState, PackedState, one_slot, zero_slots
from dasc.geometry import DtypePolicy, StateGeometry
from dasc.layout import Layout


class StateCodec(Protocol):
    """What packs and unpacks: :mod:`dasc.reference` or :mod:`dasc.fast`."""

    def pack(self, state: Tensor, conv: Tensor, layout: Layout) -> PackedState: ...
    def unpack(self, packed: PackedState, layout: Layout) -> DenseState: ...


class _CompressedPool:
    """``slots + 1`` compressed checkpoints in the order of ``layout``, all parts of them."""

    def __init__(self, layout: Layout, slots: int, codec: StateCodec, device: torch.device | str) -> None:
        self.layout, self.codec = layout, codec
        self.parts = zero_slots(layout, slots + 1, device)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts if part is not None)

    def slot(self, slot: int) -> PackedState:
        """Views of one slot, shaped as one packed checkpoint."""
        return one_slot(self.parts, slot, self.layout)

    def write(self, slot: int, packed: PackedState) -> None:
        """Store one packed checkpoint."""
        target = self.slot(slot)
        target.temporal.copy_(packed.temporal)
        target.conv.copy_(packed.conv)
        if target.scales is not None:
            assert packed.scales is not None, "quantised units come with scales"
            target.scales.copy_(packed.scales)


class TensorStorage:
    """The :class:`~dasc.cache.transfers.StateStorage` of real tensors. Slot 0 of each pool is reserved (appendix C.1).

    Every call moves all parts of a state: temporal, convolution and, if quantised, scales. Nothing is cast.

    Attributes:
        native_slots: usable native slots.
        compressed_slots: usable compressed slots.
        layout: of a compressed checkpoint; ``None`` in the dense arm.
        temporal: native pool, ``[L, native_slots + 1, HV, V, K]``.
        conv: its convolution rows, ``[L, native_slots + 1, channels, width - 1]``.

    Args:
        geometry: of the model.
        native_slots: usable native slots, at least one.
        dtypes: of the native pool; those of ``layout`` when it is given.
        layout: one rank's layout, ragged or padded.
        compressed_slots: usable compressed slots.
        codec: packs and unpacks by ``layout``.
        device: of both pools.

    Raises:
        ValueError: for a number of slots that cannot be, compressed slots without layout and codec, or a layout of
            another model or of other dtypes.
    """

    def __init__(
        self,
        geometry: StateGeometry,
        native_slots: int,
        dtypes: DtypePolicy,
        *,
        layout: Layout | None = None,
        compressed_slots: int = 0,
        codec: StateCodec | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if native_slots < 1 or compressed_slots < 0:
            raise ValueError(
                f"native_slots >= 1 and compressed_slots >= 0 are needed, got {native_slots} and {compressed_slots}"
            )
        if layout is not None and (layout.geometry, layout.dtypes) != (geometry, dtypes):
            raise ValueError(f"layout must be for {geometry}, {dtypes}, got one for {layout.geometry}, {layout.dtypes}")
        self.native_slots, self.compressed_slots, self.layout = native_slots, compressed_slots, layout
        layers, *state = geometry.state_shape
        _, *conv = geometry.conv_shape
        self.temporal = torch.zeros(layers, native_slots + 1, *state, dtype=dtypes.temporal, device=device)
        self.conv = torch.zeros(layers, native_slots + 1, *conv, dtype=dtypes.conv, device=device)
        self._compressed: _CompressedPool | None = None
        if compressed_slots:
            if layout is None or codec is None:
                raise ValueError(f"{compressed_slots} compressed slots need a layout and a codec, one is None")
            self._compressed = _CompressedPool(layout, compressed_slots, codec, device)

    @property
    def native_bytes(self) -> int:
        """Bytes of the native pool, reserved slot included."""
        return self.temporal.nbytes + self.conv.nbytes

    @property
    def compressed_bytes(self) -> int:
        """Bytes of the compressed pool, reserved slot included."""
        return 0 if self._compressed is None else self._compressed.nbytes

    @property
    def native_slot_bytes(self) -> int:
        return self.native_bytes // (self.native_slots + 1)

    @property
    def compressed_slot_bytes(self) -> int:
        """0 without a compressed pool."""
        return self.compressed_bytes // (self.compressed_slots + 1)

    def _pool(self) -> _CompressedPool:
        if self._compressed is None:
            raise ValueError("there is no compressed pool: compressed_slots is 0")
        return self._compressed

    def pack(self, native_slot: int, compressed_slot: int) -> None:
        """Compress a native slot into a compressed one.

        Raises:
            ValueError: without a compressed pool.
        """
        pool, source = self._pool(), slice(native_slot, native_slot + 1)
        pool.write(compressed_slot, pool.codec.pack(self.temporal[:, source], self.conv[:, source], pool.layout))

    def load(self, compressed_slot: int, active_slot: int, position: int) -> None:
        """Restore a compressed slot: its global units, zero for the others, its convolution rows.

        Raises:
            ValueError: without a compressed pool.
        """
        pool = self._pool()
        dense = pool.codec.unpack(pool.slot(compressed_slot), pool.layout)
        self.temporal[:, active_slot] = dense.temporal[:, 0]
        self.conv[:, active_slot] = dense.conv[:, 0]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy native slots, ``(source, destination)`` each; no slot is both."""
        for source, destination in pairs:
            self.temporal[:, destination] = self.temporal[:, source]
            self.conv[:, destination] = self.conv[:, source]

    def clear(self, slots: Sequence[int]) -> None:
        """Zero native slots."""
        for slot in slots:
            self.temporal[:, slot] = 0
            self.conv[:, slot] = 0


def staging_bytes(layout: Layout) -> int:
    """Temporary bytes charged for transfers (appendix C.1): one pack and one load under way at the same time.

    Each is charged a dense checkpoint and a compressed one beside those in the pools. That is enough for a codec that
    gathers and scatters; the reference, made to be read, holds up to three dense ones for a moment.
    """
    return 2 * (layout.geometry.dense_bytes(layout.dtypes) + layout.slot_bytes)


def scratch_bytes(geometry: StateGeometry, dtypes: DtypePolicy, sequences: int) -> int:
    """Temporary bytes of a one-pass refresh: the replayed state of one layer, for each of ``sequences`` at once."""
    return sequences * geometry.temporal_bytes(dtypes) // geometry.num_layers
