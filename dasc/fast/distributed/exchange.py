"""Store and load of checkpoints whose units are balanced over tensor-parallel ranks (appendix B.1).

Store: states are packed and partitioned by the rank that stores each unit, one variable-split all-to-all carries what
moves, and what comes is written to its slots. Load is the exact inverse. Convolution rows stay where they are.
"""

from __future__ import annotations

import hashlib
import importlib
from dataclasses import astuple, dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from dasc.contract import DenseState, PackedState, check_slots
from dasc.fast.choice import chosen_impl
from dasc.fast.distributed.agreement import agree_on, collective
from dasc.fast.distributed.partition import read_rows, write_rows
from dasc.fast.distributed.routes import PeerUnits, Routes, row_bytes
from dasc.geometry import dtype_name
from dasc.layout import RaggedLayout
from dasc.placement import Placement
from dasc.plan import SelectionPlan

EXCHANGE_FORMAT = 1  # of the rows and their order; ranks of different code must not exchange


@dataclass
class ExchangeCounters:
    """What one rank has moved, counted where it is handed to the all-to-all.

    Attributes:
        stored: checkpoints stored.
        loaded: checkpoints loaded.
        collectives: all-to-alls.
        sent_units: units sent to other ranks, of stores and loads together.
        received_units: units received from them.
        sent_bytes: bytes of ``sent_units``.
        received_bytes: bytes of ``received_units``.
    """

    stored: int = 0
    loaded: int = 0
    collectives: int = 0
    sent_units: int = 0
    received_units: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


class StorageExchange:
    """One rank's end of the stores and loads of a plan with ``storage`` or ``hybrid`` placement.

    All ranks of the group construct it together, and then make the same calls in the same order, each with as many
    checkpoints. It has buffers of its own and is for one thread: whoever packs in the background takes one exchange for
    that and another for loads, each over a group of its own. Where no unit moves, ranks do not communicate at all.

    Attributes:
        routes: which units of this rank stay, go and come.
        layout: of the units that this rank computes; its slots have ``layout.slot_units`` rows.
        counters: what was moved so far.

    Args:
        plan: has a placement for as many ranks as the group.
        group: the tensor-parallel group, whose ranks are the plan's; the default group when ``None``. Its timeout
            limits every wait for another rank.
        max_batch: checkpoints that one all-to-all carries; a larger call takes several.
        device: of the pools and of the buffers, which take ``max_batch`` times the units that this rank sends or
            receives.

    Raises:
        RanksDisagreeError: on every rank, when plans or ``max_batch`` differ, saying in what and where.
        ExchangeError: when a rank is gone, or late by more than the group's timeout.
        ValueError: for a plan without such a placement or with the padded layout, ``max_batch`` below 1, or a device
            that nothing here runs on.
    """

    def __init__(
        self,
        plan: SelectionPlan,
        group: dist.ProcessGroup | None = None,
        *,
        max_batch: int,
        device: torch.device | str = "cpu",
    ) -> None:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        # Ranks compare before they check, so that a rank whose own check fails leaves none waiting.
        agree_on({**_summary(plan, ranks), "max_batch": str(max_batch)}, group, device)
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, got {max_batch}")
        layout = plan.layouts(ranks)[rank]
        placement = plan.placements.get(ranks)
        if placement is None or not isinstance(layout, RaggedLayout):
            raise ValueError(f"plan must have the ragged layout and a placement for {ranks} ranks")
        self.routes = Routes.of(placement, rank)
        self.layout = layout
        self.counters = ExchangeCounters()
        self._group = group
        self._max_batch = max_batch
        self._moves = placement.moved_units > 0
        self._partition = _partition_module(device)
        # This rank's units that others store, and units of others that it stores.
        size = row_bytes(layout)
        self._away = torch.empty(max_batch * self.routes.sent.count, size, dtype=torch.uint8, device=device)
        self._guests = torch.empty(max_batch * self.routes.received.count, size, dtype=torch.uint8, device=device)
        # A slot is checked by its width alone: it may be too narrow for what the rank computes.
        nothing = torch.zeros_like(layout.mask)
        self._slot_shape = RaggedLayout.from_mask(layout.geometry, nothing, layout.dtypes, slot_units=layout.slot_units)

    @torch.no_grad()
    def store(self, native: DenseState, native_slots: Tensor, store: PackedState, store_slots: Tensor) -> None:
        """Store the states in ``native_slots`` of all ranks into ``store_slots`` of all ranks.

        Every byte of the written slots is written, padding with zero; other slots are not touched. Quantised, what
        shares a scale with NaN or infinity is stored so that it loads as NaN.

        Args:
            native: this rank's pool of dense states, in any strides.
            native_slots: ``[n]`` integers, ``n`` being the same on all ranks.
            store: this rank's pool of slots, in any strides; written to.
            store_slots: ``[n]`` integers, all different.

        Raises:
            ValueError: as :func:`dasc.contract.check_slots`; nothing was sent then.
            ExchangeError: when a rank is gone or late; the written slots then hold nothing that may be read.
        """
        for batch in self._batches(native, native_slots, store, store_slots, written="store"):
            sources, targets = native_slots[batch], store_slots[batch]
            away, guests = self._buffers(len(sources))
            self._partition.pack_partition(native, sources, store, targets, away, self.layout, self.routes)
            self._all_to_all("store", guests, self.routes.received, away, self.routes.sent, len(sources))
            for units, rows in self.routes.received.parts(guests, len(sources)):
                values, scales = read_rows(rows, self.layout)
                store.temporal[targets, self._slot_rows(units)] = values
                if store.scales is not None:
                    assert scales is not None
                    store.scales[targets, self._slot_rows(units)] = scales
            self.counters.stored += len(sources)

    @torch.no_grad()
    def load(
        self,
        store: PackedState,
        store_slots: Tensor,
        native: DenseState,
        native_slots: Tensor,
        *,
        omitted: Literal["zero", "leave"] = "zero",
    ) -> None:
        """Load the checkpoints in ``store_slots`` of all ranks into ``native_slots`` of all ranks.

        Args:
            store: as in :meth:`store`.
            store_slots: ``[n]`` integers, ``n`` being the same on all ranks.
            native: as in :meth:`store`; written to.
            native_slots: ``[n]`` integers, all different.
            omitted: the units that were not stored become zero (NR) or are left as they are in ``native`` (WR).

        Raises:
            ValueError: as :func:`dasc.contract.check_slots`; nothing was sent then.
            ExchangeError: when a rank is gone or late; the written slots then hold nothing that may be read.
        """
        for batch in self._batches(native, native_slots, store, store_slots, written="native", omitted=omitted):
            sources, targets = store_slots[batch], native_slots[batch]
            away, guests = self._buffers(len(sources))
            for units, rows in self.routes.received.parts(guests, len(sources)):
                at = (sources, self._slot_rows(units))
                write_rows(rows, store.temporal[at], None if store.scales is None else store.scales[at])
            self._all_to_all("load", away, self.routes.sent, guests, self.routes.received, len(sources))
            self._partition.unpack_partition(
                store, sources, away, native, targets, self.layout, self.routes, omitted=omitted
            )
            self.counters.loaded += len(sources)

    def _batches(
        self,
        native: DenseState,
        native_slots: Tensor,
        store: PackedState,
        store_slots: Tensor,
        *,
        written: str,
        omitted: str = "zero",
    ) -> list[slice]:
        """Check the arguments of a call and cut it into what one all-to-all carries."""
        device = self._away.device
        for name, tensor in (("native", native.temporal), ("store", store.temporal)):
            if tensor.device != device:
                raise ValueError(f"{name} must be on {device} like the exchange, got {tensor.device}")
        count = check_slots(native, native_slots, store, store_slots, self._slot_shape, written, omitted)
        return [slice(start, start + self._max_batch) for start in range(0, count, self._max_batch)]

    def _buffers(self, checkpoints: int) -> tuple[Tensor, Tensor]:
        """Rows of this rank's units that others store, and rows of the units of others that it stores."""
        return (
            self._away[: checkpoints * self.routes.sent.count],
            self._guests[: checkpoints * self.routes.received.count],
        )

    def _slot_rows(self, units: slice) -> slice:
        """Rows of a slot that hold received units, which are counted from 0."""
        first = self.routes.received.first
        return slice(first + units.start, first + units.stop)

    def _all_to_all(
        self, operation: str, output: Tensor, comes: PeerUnits, rows: Tensor, goes: PeerUnits, checkpoints: int
    ) -> None:
        if not self._moves:
            return
        with collective(f"the all-to-all of a {operation} of {checkpoints} checkpoints", self._group):
            dist.all_to_all_single(
                output,
                rows,
                [checkpoints * units for units in comes.splits],
                [checkpoints * units for units in goes.splits],
                group=self._group,
            )
        self.counters.collectives += 1
        self.counters.sent_units += len(rows)
        self.counters.received_units += len(output)
        self.counters.sent_bytes += rows.nbytes
        self.counters.received_bytes += output.nbytes


def _partition_module(device: torch.device | str) -> Any:
    """The module whose ``pack_partition`` and ``unpack_partition`` run on ``device``."""
    room = "distributed" if chosen_impl("auto", device) == "cpu" else "triton"
    return importlib.import_module(f"dasc.fast.{room}.partition")


def _summary(plan: SelectionPlan, ranks: int) -> dict[str, str]:
    """Everything of a plan that must be equal on ranks that exchange, tensors and what is long as digests."""
    dtypes = plan.dtypes
    stored = f"{dtype_name(dtypes.temporal)}, {dtype_name(dtypes.conv)}"
    return {
        "exchange format": str(EXCHANGE_FORMAT),
        "fingerprint of the weights": plan.fingerprint,
        "geometry": _digest(repr(astuple(plan.geometry)).encode()),
        "mask": _tensor_digest(plan.mask),
        "windows": _tensor_digest(plan.windows),
        "w_max": str(plan.w_max),
        "placement": _placement_summary(plan.placements.get(ranks)),
        "dtypes": f"{stored}, {dtypes.quantized}" if dtypes.quantized else stored,
        "layout": plan.layout,
    }


def _placement_summary(placement: Placement | None) -> str:
    if placement is None:
        return "none"
    return f"{placement.mode} {_tensor_digest(placement.head_order)} {_tensor_digest(placement.moves)}"


def _tensor_digest(tensor: Tensor) -> str:
    return _digest(repr(list(tensor.shape)).encode() + tensor.contiguous().numpy().tobytes())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
