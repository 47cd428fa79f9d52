"""The recurrent state as the running server lays it out on one rank, and whether a plan fits it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dasc.geometry import DtypePolicy, Kind, StateGeometry
from dasc.plan import PlanError, SelectionPlan


@dataclass(frozen=True)
class ServedState:
    """What SGLang's cache parameters say of one rank. No field is dasc's opinion.

    Attributes:
        kind: ``"gdn"`` or ``"kda"``.
        layers: block numbers of the recurrent layers.
        temporal: ``(HV / P, V, K)``.
        conv: shapes of the convolution tensors, ``(channels, width - 1)``, or reversed with ``channels_last``.
        channels_last: rows before channels, as KDA has them.
        temporal_dtype: of the temporal state.
        conv_dtype: of the convolution rows.
        ranks: ``P``.
    """

    kind: Kind
    layers: tuple[int, ...]
    temporal: tuple[int, ...]
    conv: tuple[tuple[int, ...], ...]
    channels_last: bool
    temporal_dtype: torch.dtype
    conv_dtype: torch.dtype
    ranks: int

    @classmethod
    def of(cls, cache_params: Any, layers: Sequence[int], ranks: int) -> ServedState:
        """From SGLang's ``BaseLinearStateParams`` and the layers that this process holds."""
        shape = cache_params.shape
        return cls(
            kind="kda" if cache_params.is_kda else "gdn",
            layers=tuple(layers),
            temporal=tuple(shape.temporal),
            conv=tuple(tuple(part) for part in shape.conv),
            channels_last=getattr(shape, "conv_slice_axis", 0) == 1,
            temporal_dtype=cache_params.dtype.temporal,
            conv_dtype=cache_params.dtype.conv,
            ranks=ranks,
        )

    @property
    def dtypes(self) -> DtypePolicy:
        """How a plan for this server stores exact checkpoints."""
        return DtypePolicy(self.temporal_dtype, self.conv_dtype)

    def check(self, plan: SelectionPlan) -> None:
        """Raise unless checkpoints of ``plan`` are of the state that is served.

        Raises:
            PlanError: naming everything that differs.
        """
        geometry: StateGeometry = plan.geometry.shard(self.ranks)
        conv = (geometry.conv_channels, geometry.conv_width - 1)
        pairs = [
            ("the kind of recurrence", geometry.kind, self.kind),
            ("recurrent layers", geometry.recurrent_layers, self.layers),
            ("the state of a layer", geometry.state_shape[1:], self.temporal),
            ("convolution rows", (conv[::-1] if self.channels_last else conv,), self.conv),
            ("the temporal dtype", plan.dtypes.temporal, self.temporal_dtype),
            ("the convolution dtype", plan.dtypes.conv, self.conv_dtype),
        ]
        wrong = [f"{name} is {planned} in the plan, {served} in the server" for name, planned, served in pairs
                 if planned != served]  # fmt: skip
        if wrong:
            raise PlanError(f"the plan does not fit the served model on {self.ranks} ranks: {'; '.join(wrong)}")
